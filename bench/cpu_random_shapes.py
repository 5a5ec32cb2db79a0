#!/usr/bin/env python3
"""Times random problems of small sizes on the CPU backend beside PyTorch's CPU attention.

The problems are those of bench/random_cases.py, cut until a forward pass has at most --gflop. The
dtypes follow one another. A time is wall time on all cores. With --one-thread it is the CPU time of
one thread, which other programs on the machine disturb less. Prints a line for each problem and
pass, then the tables of bench/random_report.py: ratios are PyTorch's time over flashtune's.
"""

import argparse
import json
import os
import random
import statistics
import time

import random_cases
import random_report
import torch
import torch.nn.functional as F
from order import orders

import flashtune

ROUNDS = 6
DTYPES = ("float32", "bfloat16", "float16")
# A call shorter than this is repeated within a round.
LEAST_SECONDS = 0.003


def flops(case):
    return 4 * case["batch"] * case["heads"] * case["seqlen_q"] * case["seqlen_k"] * case["head_dim"]


def cut(case, most):
    """The case with fewer sequences, then shorter ones, until it has no more operations."""
    case = dict(case)
    while flops(case) > most and case["batch"] > 1:
        case["batch"] //= 2
    while flops(case) > most:
        longer = "seqlen_q" if case["seqlen_q"] > case["seqlen_k"] else "seqlen_k"
        if case["seqlen_q"] == case["seqlen_k"]:
            case["seqlen_q"] = case["seqlen_k"] = max(1, round(case["seqlen_q"] / 2**0.5))
        else:
            case[longer] = max(1, case[longer] // 2)
    return case


def sdpa(q, k, v, causal):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped).transpose(1, 2)


def passes(case, dtype):
    """For each pass the functions that run it, by name."""
    causal = case["causal"]

    def tensor(seqlen, heads):
        return torch.randn(case["batch"], seqlen, heads, case["head_dim"], dtype=dtype)

    q = tensor(case["seqlen_q"], case["heads"])
    k, v = (tensor(case["seqlen_k"], case["heads_kv"]) for _ in range(2))
    attends = {
        "flashtune": lambda q, k, v: flashtune.attention(q, k, v, causal=causal),
        "torch": lambda q, k, v: sdpa(q, k, v, causal),
    }
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    outs = {name: attend(*leaves) for name, attend in attends.items()}
    dout = torch.randn_like(q)
    return {
        "forward": {name: (lambda attend=attend: attend(q, k, v)) for name, attend in attends.items()},
        "backward": {
            name: (lambda out=out: torch.autograd.grad(out, leaves, dout, retain_graph=True))
            for name, out in outs.items()
        },
    }


def microseconds(functions, rounds, clock):
    """Each function's median time over the rounds; the order of the functions changes."""
    names, repeats = list(functions), {}
    for name in names:
        functions[name]()
        start = time.perf_counter()
        functions[name]()
        repeats[name] = max(1, round(LEAST_SECONDS / (time.perf_counter() - start)))
    times = {name: [] for name in names}
    for order in orders(len(names), rounds):
        for name in (names[i] for i in order):
            start = clock()
            for _ in range(repeats[name]):
                functions[name]()
            times[name].append((clock() - start) / repeats[name])
    return {name: statistics.median(seen) * 1e6 for name, seen in times.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--problems", type=int, default=30, help="all kinds together")
    parser.add_argument("--kinds", nargs="+", choices=random_cases.NAMED_KINDS, default=list(random_cases.KINDS))
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--gflop", type=float, default=0.5, help="the most operations of a forward pass")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--one-thread", action="store_true", help="CPU time of one thread on one core")
    parser.add_argument("--json", metavar="FILE", help="write all figures to FILE")
    arguments = parser.parse_args()
    if arguments.one_thread:
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    torch.set_num_threads(threads)
    torch.manual_seed(arguments.seed)
    clock = time.process_time if arguments.one_thread else time.perf_counter
    print(f"seed {arguments.seed}, {threads} threads, {clock.__name__}, torch {torch.__version__}")
    rng, rows = random.Random(arguments.seed), []
    for number in range(arguments.problems):
        case = random_cases.draw(rng, arguments.kinds[number % len(arguments.kinds)])
        case = cut(case, arguments.gflop * 1e9)
        dtype = arguments.dtypes[number // len(arguments.kinds) % len(arguments.dtypes)]
        for name, functions in passes(case, getattr(torch, dtype)).items():
            us = microseconds(functions, arguments.rounds, clock)
            row = case | {"pass": name, "us": us, "config": dtype}
            rows.append(row)
            print(
                f"{random_report.ratio(row):5.2f} {name:8} {case['kind']:5} {dtype:8} {random_cases.label(case)}: "
                f"flashtune {us['flashtune']:.0f} us, torch {us['torch']:.0f} us",
                flush=True,
            )
    for dtype in arguments.dtypes:
        print(f"\n{dtype}\n\n{random_report.table([row for row in rows if row['config'] == dtype])}")
    print(f"\nbehind:\n{random_report.behind(rows) or 'none'}")
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(dict(seed=arguments.seed, threads=threads, rows=rows), file, indent=1)


if __name__ == "__main__":
    main()
