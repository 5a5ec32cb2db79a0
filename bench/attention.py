#!/usr/bin/env python3
"""Times flashtune beside other attention implementations on one GPU, round by round on the same
tensors.

Prints a row for each problem and pass: TFLOP/s of each peer, then each peer's time over
flashtune's. A summary by pass and head dim follows, then Markdown tables (see
bench/attention_report.py, which prints both again from the JSON).

All backward passes go through autograd. "call" is flashtune_backward alone, as C callers use it; it
enters no ratio. The GPU's clock differs from run to run, so absolute figures do not compare across
runs. Ratios within one run do.
"""

import attention_report
import cases
import loop
import machine
import peers
import report
import timing
import torch


def tensors(case):
    generator = torch.Generator("cuda").manual_seed(case["seqlen"] + case["head_dim"])

    def tensor(heads):
        shape = (case["batch"], case["seqlen"], heads, case["head_dim"])
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16, generator=generator)

    return tensor(case["heads"]), tensor(case["heads_kv"]), tensor(case["heads_kv"])


def forward_of(attend, inputs, options):
    """A function that runs the forward pass. It has run once already."""

    def forward():
        return attend(*inputs, *options)

    with torch.no_grad():
        forward()
    torch.cuda.synchronize()
    return forward


def backward_of(attend, inputs, options):
    """A function that runs the backward pass alone. It has run once already."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    out = attend(*leaves, *options)
    dout = torch.randn_like(out)

    def backward():
        return torch.autograd.grad(out, leaves, dout, retain_graph=True)

    backward()
    torch.cuda.synchronize()
    return backward


PASSES = {"forward": forward_of, "backward": backward_of}


def measure(case, attends, tune, passes, rounds):
    """{pass: {peer: seconds}}, and {peer and pass: reason} of those that do not run."""
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
            # The cost to a C caller: no autograd, no allocation.
            runs["call"] = peers.flashtune_backward_call(*inputs, *options, torch.randn_like(inputs[0]))
        with torch.set_grad_enabled(name == "backward"):
            times[name] = dict(zip(runs, timing.round_robin(list(runs.values()), rounds)))
    return times, refused


def main():
    suites = cases.suites()
    parser = loop.parser(__doc__, suites, "autotune each problem first", timing.ROUNDS)
    known, passes = ", ".join(peers.NAMES), ",".join(PASSES)
    parser.add_argument("--peers", default=",".join(peers.NAMES), help=f"comma-separated, from: {known}, math; default: all but math")
    parser.add_argument("--passes", default=passes, help=f"comma-separated, default: {passes}")
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
    print("TFLOP/s, then the peers' time over flashtune's")
    print(attention_report.header(names))

    def rows_of_case(suite, case):
        times, refused = measure(case, attends, arguments.tune, passes, arguments.rounds)
        for name, seconds in times.items():
            row = attention_report.row_of(suite, case, name, seconds, refused)
            print(attention_report.line(row, names), flush=True)
            yield row

    def results(rows):
        return dict(
            machine=measured_on,
            rounds=arguments.rounds,
            tuned=arguments.tune,
            peers=names,
            rows=rows,
            summary=attention_report.summary(rows, names),
        )

    chosen = cases.suites(arguments.quick)
    problems = [(suite, case) for suite in arguments.suites for case in chosen[suite]]
    rows, skipped = loop.run(problems, rows_of_case, results, arguments)

    print(f"\n{attention_report.summary_text(attention_report.summary(rows, names))}\n")
    report.show_gaps(rows, cases.label, skipped)
    print(f"\n{attention_report.markdown(results(rows))}")


if __name__ == "__main__":
    main()
