#!/usr/bin/env python3
"""Times both passes of the CPU backend and of PyTorch's CPU attention, round by round on the
same cores.

A time is wall time on all cores. With --one-thread it is the CPU time of one thread, which other
programs on the machine disturb less.
"""

import argparse
import json
import os
import statistics
import time

import torch
import torch.nn.functional as F
from order import orders

import flashtune

ROUNDS = 10


def seconds(function, clock):
    start = clock()
    function()
    return clock() - start


def round_robin(functions, rounds, clock):
    for function in functions.values():
        function()
        function()
    times = {name: [] for name in functions}
    names = list(functions)
    for order in orders(len(names), rounds):
        for i in order:
            times[names[i]].append(seconds(functions[names[i]], clock))
    return {name: statistics.median(seen) for name, seen in times.items()}


def sdpa(q, k, v, causal):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--seqlen", type=int, default=1024)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--one-thread", action="store_true", help="CPU time of one thread on one core")
    parser.add_argument("--tune", action="store_true", help="autotune first")
    parser.add_argument("--json", metavar="FILE", help="write all figures to FILE")
    arguments = parser.parse_args()
    shape = (arguments.batch, arguments.seqlen, arguments.heads, arguments.head_dim)
    torch.manual_seed(0)
    if arguments.one_thread:
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    clock = time.process_time if arguments.one_thread else time.perf_counter
    dtype = getattr(torch, arguments.dtype)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    torch.set_num_threads(cores)
    print(
        f"b{shape[0]} h{shape[2]} s{shape[1]} d{shape[3]}, {arguments.dtype}, {cores} threads, {clock.__name__}, "
        f"torch {torch.__version__}"
    )
    results = []
    for causal in (False, True):
        q, k, v = (torch.randn(shape, dtype=dtype, requires_grad=True) for _ in range(3))
        dout = torch.randn(shape, dtype=dtype)
        if arguments.tune:
            for backward in (False, True):
                flashtune.autotune(q, k, v, causal=causal, backward=backward)
        attends = {
            "flashtune": lambda q, k, v: flashtune.attention(q, k, v, causal=causal),
            "torch": lambda q, k, v: sdpa(q, k, v, causal),
        }
        outs = {name: attend(q, k, v) for name, attend in attends.items()}
        plain = [x.detach() for x in (q, k, v)]
        passes = {
            "forward": {name: (lambda attend=attend: attend(*plain)) for name, attend in attends.items()},
            "backward": {
                name: (lambda out=out: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True))
                for name, out in outs.items()
            },
        }
        for name, functions in passes.items():
            times = round_robin(functions, arguments.rounds, clock)
            ratio = times["flashtune"] / times["torch"]
            mask = "causal" if causal else "full"
            found = ", ".join(f"{peer} {time * 1e3:.1f} ms" for peer, time in times.items())
            print(f"{name:9}{mask:7}{found}: {ratio:.2f} x torch's time")
            results.append(dict(causal=causal, ms={peer: t * 1e3 for peer, t in times.items()}, ratio=ratio))
            results[-1]["pass"] = name
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(dict(shape=shape, dtype=arguments.dtype, threads=cores, results=results), file, indent=1)


if __name__ == "__main__":
    main()
