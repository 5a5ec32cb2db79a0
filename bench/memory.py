#!/usr/bin/env python3
"""Measures the memory of a forward and a backward pass at long lengths: batch 1, 16 heads of 64,
bf16, no mask.

Each row has the bytes of inputs, outputs and gradients, which any attention needs; the peak of
torch's allocator, workspaces included; the peak above those tensors; and the bytes of one bf16
score matrix, which unfused attention writes. The last two rows compare SDPA's math backend with
flashtune, at the longest length that the math backend fits: it halves from the shortest. The
figures leave out what the library allocates through the driver: the kernels' code and their tile
counters.
"""

import argparse
import json

import machine
import peers
import torch

HEADS, HEAD_DIM = 16, 64
LENGTHS = "65536,131072"
MIB = 2**20


def measure(attend, seqlen):
    """Bytes of the tensors that both passes read and write, and the peak, which includes them."""
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    q, k, v, dout = (torch.randn(1, seqlen, HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = attend(*leaves, False, 0.0)
    gradients = torch.autograd.grad(out, leaves, dout)
    torch.cuda.synchronize()
    tensors = sum(x.numel() * x.element_size() for x in (*leaves, out, dout, *gradients))
    return dict(tensor_bytes=tensors, peak_bytes=torch.cuda.max_memory_allocated() - before)


def longest_that_fits(attend, seqlen):
    """(length, its measurement) of the first length that fits into the GPU's memory, halving
    from `seqlen`."""
    while True:
        try:
            return seqlen, measure(attend, seqlen)
        except torch.cuda.OutOfMemoryError:
            if seqlen == 1:
                raise
        seqlen //= 2


def show(row):
    numbers = (row["tensor_bytes"], row["peak_bytes"], row["peak_bytes"] - row["tensor_bytes"], row["score_matrix_bytes"])
    print(f"{row['attention']:12}{row['seqlen']:8}" + "".join(f"{number / MIB:14.0f}" for number in numbers), flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", default=LENGTHS, help=f"in tokens, comma-separated, default {LENGTHS}")
    parser.add_argument("--json", metavar="FILE", help="write all rows to FILE")
    arguments = parser.parse_args()
    try:
        lengths = [int(length) for length in arguments.lengths.split(",")]
    except ValueError:
        lengths = []
    if not lengths or min(lengths) < 1:
        parser.error(f"--lengths is {arguments.lengths}; it must be comma-separated positive integers")

    results = dict(machine=machine.describe(), rows=[])
    attends, missing = peers.load(["flashtune", "math"])
    if missing:
        raise SystemExit("; ".join(f"peer {name} is not here: {reason}" for name, reason in missing.items()))
    print("MiB, forward and backward")
    print(f"{'attention':12}{'seqlen':>8}{'tensors':>14}{'peak':>14}{'above tensors':>14}{'score matrix':>14}")

    def add(name, seqlen, measured):
        score_matrix = HEADS * seqlen**2 * torch.bfloat16.itemsize
        results["rows"].append(dict(attention=name, seqlen=seqlen, **measured, score_matrix_bytes=score_matrix))
        show(results["rows"][-1])

    for seqlen in lengths:
        add("flashtune", seqlen, measure(attends["flashtune"], seqlen))
    fits, measured = longest_that_fits(attends["math"], min(lengths))
    add("math", fits, measured)
    add("flashtune", fits, measure(attends["flashtune"], fits))
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(results, file, indent=1)


if __name__ == "__main__":
    main()
