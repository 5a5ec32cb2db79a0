#!/usr/bin/env python3
"""Times flashtune beside PyTorch's attention backends on one GPU, taking turns on the same tensors.

Prints a row for each problem and pass, TFLOP/s of each peer and flashtune's speed over FA2's, cuDNN's and FA4's, over that
of the best peer measured in this run, and on the grid over the best of cuDNN, FlashAttention-3 and -4 by the table in
envelope.py; then the geometric means. All backward passes go through autograd; "call" is flashtune_backward alone, as C callers
use it, and enters no ratio. Absolute figures shift with the GPU's clock from run to run; the ratios within one run hold.
"""

import cases
import envelope
import loop
import machine
import peers
import report
import torch
from timing import round_robin

RIVALS = ("fa2", "cudnn", "fa4", "best", "envelope")
OURS = ("flashtune", "call")


def tensors(case):
    generator = torch.Generator("cuda").manual_seed(case["seqlen"] + case["head_dim"])

    def tensor(heads):
        shape = (case["batch"], case["seqlen"], heads, case["head_dim"])
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16, generator=generator)

    return tensor(case["heads"]), tensor(case["heads_kv"]), tensor(case["heads_kv"])


def forward_of(attend, inputs, options):
    """A function that runs the forward pass, which has run once."""

    def forward():
        return attend(*inputs, *options)

    with torch.no_grad():
        forward()
    torch.cuda.synchronize()
    return forward


def backward_of(attend, inputs, options):
    """A function that runs the backward pass alone, which has run once."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    out = attend(*leaves, *options)
    dout = torch.randn_like(out)

    def backward():
        return torch.autograd.grad(out, leaves, dout, retain_graph=True)

    backward()
    torch.cuda.synchronize()
    return backward


PASSES = {"forward": forward_of, "backward": backward_of}


def measure(case, attends, tune, passes):
    """{pass: {peer: seconds}} and {peer and pass: reason} of those that cannot do it."""
    inputs, options = tensors(case), (case["causal"], case["dropout_p"])
    times, refused = {}, {}
    for name in passes:
        if tune:
            import flashtune

            flashtune.autotune(*inputs, causal=options[0], dropout_p=options[1], backward=name == "backward")
        runs = {}
        for peer, attend in attends.items():
            try:
                runs[peer] = PASSES[name](attend, inputs, options)
            except Exception as error:
                refused[f"{peer} {name}"] = report.reason(error)
        if name == "backward" and "flashtune" in runs:
            # Beside it what a C caller pays: no autograd, no allocation.
            runs["call"] = peers.flashtune_backward_call(*inputs, *options, torch.randn_like(inputs[0]))
        with torch.set_grad_enabled(name == "backward"):
            times[name] = dict(zip(runs, round_robin(list(runs.values()))))
    return times, refused


def rows_of(suite, case, times, refused):
    for name, seconds in times.items():
        row = dict(suite=suite, **case)
        row["pass"] = name
        row["us"] = {peer: time * 1e6 for peer, time in seconds.items()}
        row["tflops"] = {peer: cases.flops(case, name == "backward") / time / 1e12 for peer, time in seconds.items()}
        others = {peer: time for peer, time in seconds.items() if peer not in OURS}
        if others:
            others["best"] = min(others.values())
        row["ratio"] = {
            rival: others[rival] / seconds["flashtune"]
            for rival in RIVALS
            if rival in others and "flashtune" in seconds
        }
        best_peer = envelope.over_cudnn(name, case) if suite == "grid" else None
        if best_peer and "cudnn" in row["ratio"]:
            row["ratio"]["envelope"] = row["ratio"]["cudnn"] / best_peer
        row["refused"] = refused
        yield row


def show(row, names):
    rates = "".join(f"{row['tflops'][name]:11.0f}" if name in row["tflops"] else f"{'-':>11}" for name in names)
    ratios = "".join(f"{row['ratio'][rival]:11.2f}" if rival in row["ratio"] else f"{'-':>11}" for rival in RIVALS)
    print(f"{row['suite']:8}{cases.label(row):32}{row['pass']:9}{rates}{ratios}", flush=True)


def summary(rows):
    """One entry for each suite and head dim of it, pass and rival: geometric mean, worst cell, how many cells."""
    groups = {}
    for row in rows:
        groups.setdefault(row["suite"], []).append(row)
    for row in rows:
        groups.setdefault(f"{row['suite']} d{row['head_dim']}", []).append(row)
    found = []
    for suite, members in groups.items():
        for name in PASSES:
            for rival in RIVALS:
                of_rival = [row for row in members if row["pass"] == name and rival in row["ratio"]]
                if not of_rival:
                    continue
                entry = dict(suite=suite, rival=rival)
                entry["pass"] = name
                entry.update(report.mean_and_least(of_rival, lambda row, rival=rival: row["ratio"][rival], cases.label))
                found.append(entry)
    return found


def main():
    suites = cases.suites()
    parser = loop.parser(__doc__, suites, "autotune each problem first")
    parser.add_argument("--peers", default=",".join(peers.NAMES), help=f"of {', '.join(peers.NAMES)}, math")
    parser.add_argument("--passes", default=",".join(PASSES), help=f"of {', '.join(PASSES)}")
    arguments = parser.parse_args()
    passes = arguments.passes.split(",")
    if not set(passes) <= set(PASSES):
        parser.error(f"--passes is {arguments.passes}; it must be of {', '.join(PASSES)}")

    measured_on = machine.describe()
    attends, missing = peers.load(arguments.peers.split(","))
    for name, reason in missing.items():
        print(f"peer {name} is not here: {reason}")
    names = list(attends)
    if "flashtune" in names and "backward" in passes:
        names.append("call")
    print("TFLOP/s, and flashtune's speed over the rivals'")
    columns = [*names, *(f"x {rival}" for rival in RIVALS)]
    print(f"{'suite':8}{'problem':32}{'pass':9}" + "".join(f"{column:>11}" for column in columns))

    def rows_of_case(suite, case):
        for row in rows_of(suite, case, *measure(case, attends, arguments.tune, passes)):
            show(row, names)
            yield row

    def results(rows):
        return dict(machine=measured_on, rows=rows, summary=summary(rows))

    chosen = cases.suites(arguments.quick)
    problems = [(suite, case) for suite in arguments.suites for case in chosen[suite]]
    rows, skipped = loop.run(problems, rows_of_case, results, arguments)

    print(f"\n{'suite':14}{'pass':10}{'over':10}{'geometric mean':>15}{'min':>7}  cell of the minimum (cells)")
    for entry in summary(rows):
        print(
            f"{entry['suite']:14}{entry['pass']:10}{entry['rival']:10}{entry['geometric_mean']:15.3f}{entry['min']:7.2f}"
            f"  {entry['min_cell']} ({entry['cells']})"
        )
    report.show_gaps(rows, cases.label, skipped)


if __name__ == "__main__":
    main()
