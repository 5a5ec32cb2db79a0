#!/usr/bin/env python3
"""Times attention over a sequence whose rows are spread over GPUs, and compares it with one GPU.

The program starts one process for each GPU. Problems are causal, batch 1, head dim 128, bf16.
"one" is `flashtune.attention` on one GPU over the whole sequence. The methods are those of
`flashtune.context_parallel`, in the layout "zigzag". "torch" is PyTorch's own ring attention,
`torch.distributed.tensor.experimental.context_parallel`, with its flash backend. Each time is the
longest of the ranks.

For each method two more times follow. "alone" is the time of the same messages without any
computation. "compute" is the time with the messages left out. hidden = (alone + compute -
together) / alone is the share of the messages' time that computation hides. It falls below 0 where
messages slow the computation down by more than their own time.

A case that fails or takes longer than --seconds is reported, and the processes start again behind
it. Each process writes to its own file in --logs.
"""

import argparse
import contextlib
import itertools
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import context_parallel_rank

METHODS = ("one", "ring", "all_gather", "ulysses", "torch")
PASSES = ("forward", "both")
COLUMNS = (("ms", 10), ("TFLOP/s", 9), ("speed-up", 10), ("alone ms", 10), ("compute ms", 12), ("hidden", 9))


def cases_of(arguments):
    """The cases in order; the methods of a problem follow one another."""
    cases = itertools.product(arguments.tokens, arguments.heads, arguments.methods)
    return [dict(tokens=tokens, heads=heads, heads_kv=heads_kv, method=method) for tokens, (heads, heads_kv), method in cases]


def free_port():
    with contextlib.closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start(cases, arguments, results):
    """One process for each GPU, all with the same cases."""
    processes = []
    port = free_port()
    for rank in range(arguments.ranks):
        asked = dict(
            rank=rank, ranks=arguments.ranks, port=port, cases=cases, seconds=arguments.seconds, device=arguments.device,
            head_dim=arguments.head_dim, head_start=not arguments.no_head_start, results=str(results),
        )  # fmt: skip
        with open(arguments.logs / f"rank{rank}.txt", "a") as log:
            command = [sys.executable, context_parallel_rank.__file__, json.dumps(asked)]
            processes.append(subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT))
    return processes


def wait(processes, deadline, report):
    """Returns when all have ended; ends the others if one fails or the deadline passes."""
    while any(process.poll() is None for process in processes):
        report()
        if any(process.poll() for process in processes) or time.monotonic() > deadline:
            time.sleep(0.5)  # For the last lines of the others' logs.
            for process in processes:
                process.kill()
        time.sleep(0.2)


def rows_in(results):
    """The rows of finished lines: rank 0 may be writing the last one."""
    text = results.read_text() if results.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def measured(arguments):
    """One row for each case, with its times or the reason why it has none."""
    results, deadline = arguments.logs / "rows.jsonl", time.monotonic() + arguments.deadline
    for old in (results, *arguments.logs.glob("rank*.txt")):
        old.unlink(missing_ok=True)
    cases, shown = cases_of(arguments), []

    def report():
        rows = with_ratios(rows_in(results), arguments.head_dim)
        for row in rows[len(shown) :]:
            show(row)
            shown.append(row)

    while len(shown) < len(cases):
        wait(start(cases[len(shown) :], arguments, results), deadline, report)
        rows = rows_in(results)
        if len(rows) < len(cases):
            failed = dict(cases[len(rows)], refused=f"failed or took longer than {arguments.seconds} s; see {arguments.logs}")
            # Where neither of the first two runs, none will.
            is_hopeless = len(rows) == 1 and "refused" in rows[0]
            lost = [failed] if time.monotonic() < deadline else []
            if is_hopeless or not lost:
                lost += [dict(case, refused="not started") for case in cases[len(rows) + len(lost) :]]
            with open(results, "a") as file:
                file.writelines(json.dumps(row) + "\n" for row in lost)
        report()
    return shown


def with_ratios(rows, head_dim):
    """The rows with TFLOP/s of all GPUs together, speed-up over one GPU and the hidden share."""
    ones = {problem_of(row): row for row in rows if row["method"] == "one" and "refused" not in row}
    found = []
    for row in rows:
        row = dict(row)
        for name in PASSES:
            if "refused" in row:
                break
            times = row[name] = dict(row[name])
            # Two products forward and five backward, over half of all pairs.
            work = (2 if name == "forward" else 7) * 2 * row["heads"] * row["tokens"] ** 2 / 2 * head_dim
            times["TFLOP/s"] = work / times["ms"] / 1e9
            if problem_of(row) in ones and row["method"] != "one":
                times["speed-up"] = ones[problem_of(row)][name]["ms"] / times["ms"]
            if times.get("alone ms"):
                times["hidden"] = (times["alone ms"] + times["compute ms"] - times["ms"]) / times["alone ms"]
        found.append(row)
    return found


def problem_of(row):
    return row["tokens"], row["heads"], row["heads_kv"]


def show(row):
    name = f"{row['tokens']:>8} tokens  heads {row['heads']}/{row['heads_kv']:<4}{row['method']:12}"
    if "refused" in row:
        print(f"{name}{row['refused']}", flush=True)
        return
    for which in PASSES:
        times = row[which]
        cells = "".join(f"{times[column]:{width}.2f}" if column in times else f"{'-':>{width}}" for column, width in COLUMNS)
        print(f"{name}{which:8}{cells}", flush=True)


def numbers(text):
    return [int(part) for part in text.split(",")]


def heads_of(text):
    return [tuple(int(part) for part in pair.split("/")) for pair in text.split(",")]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=numbers, default=[65536, 262144], help="comma-separated, default 65536,262144")
    parser.add_argument("--heads", type=heads_of, default=[(16, 16), (32, 8)], help="query/KV heads, default 16/16,32/8")
    parser.add_argument("--methods", type=lambda text: text.split(","), default=METHODS, help=f"default: {','.join(METHODS)}")
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--ranks", type=int, default=2, help="processes, default 2")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu tries the program with gloo")
    parser.add_argument("--no-head-start", action="store_true", help="do not let messages start before computation")
    parser.add_argument("--seconds", type=float, default=60.0, help="time limit of a case, default 60")
    parser.add_argument("--deadline", type=float, default=600.0, help="time limit of the program, default 600")
    parser.add_argument("--logs", type=Path, default=Path("build/context-parallel"), help="a folder for each rank's log")
    parser.add_argument("--json", metavar="FILE", help="write all rows to FILE")
    arguments = parser.parse_args()
    unknown = [method for method in arguments.methods if method not in METHODS]
    if unknown:
        parser.error(f"no method is called {unknown[0]}; the methods are {', '.join(METHODS)}")
    arguments.logs.mkdir(parents=True, exist_ok=True)
    print(f"{'problem':38}{'pass':8}" + "".join(f"{column:>{width}}" for column, width in COLUMNS), flush=True)
    rows = measured(arguments)
    if arguments.json:
        described = arguments.logs / "machine.json"
        machine = json.loads(described.read_text()) if described.exists() else None
        environment = {name: os.environ[name] for name in context_parallel_rank.VARIABLES if name in os.environ}
        results = dict(machine=machine, environment=environment, head_start=not arguments.no_head_start, rows=rows)
        Path(arguments.json).write_text(json.dumps(results, indent=1))
    return 1 if any("refused" in row and row["method"] != "torch" for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
