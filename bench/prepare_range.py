#!/usr/bin/env python3
"""Times what preparing a server of Llama-3-8B costs, and what its calls then cost on the host.

It prepares the range of docs/serving.md in an empty cache folder, prepares it again in a new
process that finds the cache, and makes random calls over pages in the sealed context: decoding
steps, prompt chunks, and mixes of both. A sealed context compiles nothing: a call that needs
another kernel fails. A call of a new shape chooses a config; a repeated call finds its plan. Times
are of the host, without waiting for the device.
"""

import argparse
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time

import flashtune
import torch

HEADS, HEADS_KV, DIM, PAGE = 32, 8, 128, 64
LARGEST = (256, 8192, 131072)


def prepare(device):
    """The report of the range."""
    q = torch.empty(1, HEADS, DIM, device=device, dtype=torch.bfloat16)
    pages = torch.empty(1, PAGE, HEADS_KV, DIM, device=device, dtype=torch.bfloat16)
    lengths = dict(device=device, dtype=torch.int32)
    return flashtune.prepare_range(
        q, pages, pages, largest=LARGEST, optional=("cu_seqlens_q",), causal=True,
        cu_seqlens_q=torch.tensor([0, 1], **lengths), max_seqlen_q=1,
        block_table=torch.zeros(1, 1, **lengths), seqused_k=torch.ones(1, **lengths),
    )  # fmt: skip


def calls(device, count, keys, tokens, seed):
    """Random calls. No sequence has more than `keys` keys, no call more than `tokens` tokens."""
    pick = random.Random(seed)
    pages = torch.randn(keys // PAGE, PAGE, HEADS_KV, DIM, device=device, dtype=torch.bfloat16)
    lengths = dict(device=device, dtype=torch.int32)
    for _ in range(count):
        batch = 1 << pick.randrange(9)
        rows = [1] * batch
        if pick.random() < 0.5:
            rows = [pick.choice((1, pick.randint(1, max(1, tokens // batch)))) for _ in rows]
        used = [pick.randint(row, keys) for row in rows]
        table = torch.randint(keys // PAGE, (batch, keys // PAGE), **lengths)
        arguments = dict(causal=True, block_table=table, seqused_k=torch.tensor(used, **lengths), max_seqlen_k=max(used))
        q = torch.randn(sum(rows), HEADS, DIM, device=device, dtype=torch.bfloat16)
        begins = torch.tensor([sum(rows[:i]) for i in range(batch + 1)], **lengths)
        if max(rows) > 1:
            arguments |= dict(cu_seqlens_q=begins, max_seqlen_q=max(rows))
        else:
            q = q.unsqueeze(1)
        yield q, pages, arguments


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=2000, help="random calls (default 2000)")
    parser.add_argument("--keys", type=int, default=8192, help="keys of the longest sequence (default 8192)")
    parser.add_argument("--tokens", type=int, default=4096, help="tokens of the largest call (default 4096)")
    parser.add_argument("--seed", type=int, default=1, help="seed of the random calls (default 1)")
    parser.add_argument("--deadline", type=float, default=math.inf, metavar="SECONDS", help="make no further call after this time")
    parser.add_argument("--again", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if "FLASHTUNE_CACHE_DIR" not in os.environ:
        # The library reads the folder's name when it opens the context.
        with tempfile.TemporaryDirectory() as folder:
            for again in ([], ["--again"]):
                command = [sys.executable, *sys.argv, *again]
                subprocess.run(command, env=os.environ | {"FLASHTUNE_CACHE_DIR": folder}, check=True)
        return
    device = "cuda" if torch.cuda.is_available() else "cpu"
    done = prepare(device)
    print("cache" if arguments.again else "empty", " ".join(f"{name} {value:g}" for name, value in done.items()), flush=True)
    if not arguments.again:
        return
    flashtune.seal(torch.cuda.current_device() if device == "cuda" else None)
    first, later, began = [], [], time.monotonic()
    for q, pages, options in calls(device, arguments.calls, arguments.keys, arguments.tokens, arguments.seed):
        if time.monotonic() - began > arguments.deadline:
            break
        for times in (first, later):
            start = time.perf_counter()
            flashtune.attention_kvcache(q, pages, pages, **options)
            times.append(1e6 * (time.perf_counter() - start))
        if device == "cuda" and len(first) % 100 == 0:
            torch.cuda.synchronize()
    if device == "cuda":
        torch.cuda.synchronize()
    print(f"{len(first)} calls of {arguments.calls} in {time.monotonic() - began:.1f} s, none of which compiled")
    for name, times in (("first", first), ("again", later)):
        ordered = sorted(times)
        print(f"{name}: median {statistics.median(times):.0f} us, 99 % {ordered[len(times) * 99 // 100]:.0f}, most {ordered[-1]:.0f}")


if __name__ == "__main__":
    main()
