#!/usr/bin/env python3
"""Times random problems, as users have them, beside other attention implementations on one GPU.

The problems are drawn from a seed (bench/random_cases.py), kind after kind, one pass each. Each
pass is captured in a CUDA graph, so that no host time enters, and the order of the peers changes
from round to round (order.py). flashtune is not tuned, unless --tune tunes a share of the problems
as it goes; "tuned" is then a peer of its own. Prints a line for each problem, then the report of
bench/random_report.py.
"""

import random
import time

import loop
import machine
import peers
import random_cases
import random_report
import report
import timing
import torch

import flashtune

ROUNDS = 8
TUNING_SECONDS = 15.0


def tensors(case, seed):
    generator = torch.Generator("cuda").manual_seed(seed)

    def tensor(seqlen, heads):
        shape = (case["batch"], seqlen, heads, case["head_dim"])
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16, generator=generator)

    return tensor(case["seqlen_q"], case["heads"]), *(tensor(case["seqlen_k"], case["heads_kv"]) for _ in range(2))


def captured_pass(attend, inputs, causal, is_backward):
    """A function that replays a pass from a CUDA graph. Leaves and graph share a stream, because
    autograd runs a node on the stream of its forward pass."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        if is_backward:
            leaves = [x.detach().clone().requires_grad_() for x in inputs]
            out = attend(*leaves, causal, 0.0)
            dout = torch.randn_like(out)

            def call():
                return torch.autograd.grad(out, leaves, dout, retain_graph=True)
        else:

            def call():
                with torch.no_grad():
                    return attend(*inputs, causal, 0.0)

        for _ in range(3):
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        kept = call()
    torch.cuda.synchronize()
    # A graph does not keep the tensors that its kernels read and write.
    return lambda kept=(call, kept): graph.replay()


def row_of(case, name, attends, tunes, seed, rounds):
    inputs, is_backward = tensors(case, seed), name == "backward"
    options = dict(causal=case["causal"], backward=is_backward)
    replays, refused = {}, {}

    def add(peer, attend):
        try:
            replays[peer] = captured_pass(attend, inputs, case["causal"], is_backward)
        except Exception as error:
            refused[peer] = report.reason(error)
            torch.cuda.synchronize()

    for peer, attend in attends.items():
        add(peer, attend)
    plan = flashtune.plan_info(*inputs, **options)
    if tunes:
        flashtune.autotune(*inputs, **options, time_limit=TUNING_SECONDS)
        add("tuned", attends["flashtune"])
    seconds = timing.round_robin(list(replays.values()), rounds)
    us = {peer: time * 1e6 for peer, time in zip(replays, seconds)}
    return {**case, "pass": name, "us": us, "refused": refused, "config": plan["config"], "source": plan["source"]}


def line(row):
    ours = row["us"].get("flashtune")
    others = [f"{peer} {us:.1f}" for peer, us in row["us"].items() if peer != "flashtune"]
    mine = "refused" if ours is None else f"{ours:.1f} us"
    return f"{row['pass']:8} {row['kind']:5} {random_cases.label(row)} [{row['source']}]: {mine}; {', '.join(others)}"


def main():
    tune_help = "tune a third of the problems as it goes"
    parser = loop.parser(__doc__, random_cases.NAMED_KINDS, tune_help, ROUNDS, default=random_cases.KINDS)
    parser.add_argument("--seed", type=int, default=1, help="what the problems are drawn from, default 1")
    parser.add_argument("--count", type=int, default=200, help="number of problems, default 200")
    parser.add_argument("--peers", default="cudnn,fa2,fa3", help="comma-separated, default: cudnn,fa2,fa3")
    parser.add_argument("--chart", metavar="SVG", help="draw the sorted ratios")
    arguments = parser.parse_args()
    measured_on = machine.describe()
    attends, missing = peers.load([*arguments.peers.split(","), "flashtune"])
    for name, why in missing.items():
        print(f"peer {name} is not here: {why}")
    rng, problems = random.Random(arguments.seed), []
    for number in range(10 if arguments.quick else arguments.count):
        case = random_cases.draw(rng, arguments.suites[number % len(arguments.suites)])
        name = rng.choice(random_report.PASSES)
        problems.append((case, name, arguments.tune and rng.random() < 1 / 3, number))

    def rows_of(case, name, tunes, number):
        row = row_of(case, name, attends, tunes, number, arguments.rounds)
        print(line(row), flush=True)
        yield row

    def results(rows):
        return dict(machine=measured_on, seed=arguments.seed, rounds=arguments.rounds, peers=list(attends), rows=rows)

    began = time.monotonic()
    rows, skipped = loop.run(problems, rows_of, results, arguments)
    print(f"\n{random_report.text(results(rows))}\n\n{len(rows)} problems in {time.monotonic() - began:.0f} s")
    report.show_gaps(rows, random_cases.label, skipped)
    if arguments.chart and random_report.compared(rows):
        with open(arguments.chart, "w") as file:
            file.write(random_report.chart(rows, measured_on["gpu"]))


if __name__ == "__main__":
    main()
