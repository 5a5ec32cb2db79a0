#!/usr/bin/env python3
"""Times both passes of flashtune with each feature, and compares them with a call without it, round
by round on one GPU.

window: causal with windows of several widths, compared with plain causal.
varlen: packed sequences of different lengths, compared with a dense batch of as many sequences and
    about the same FLOP.
scores: softcap, ALiBi, bias, mask and sinks, each alone, compared with plain causal.
deterministic: the deterministic backward pass, compared with the default (the forward passes are
    the same).
deterministic-sm80: the same on tensors that TMA cannot load, which the sm80 kernels take.
batch-invariant: the batch-invariant forward pass, compared with the default (the backward passes
    are the same).
fp32: fp32, and PyTorch's memory-efficient attention in fp32, compared with bf16.
blocks: block masks that keep 50 to 5 % of the blocks, and FlexAttention with the same masks,
    compared with dense attention.

TFLOP/s count the pairs of a query and a key that causal, window and lengths leave visible. "time"
and "rate" are a call's time and TFLOP/s over those of the call that it is compared with. The
backward pass goes through autograd. The bias has a gradient in "bias, learnt" only; the sinks
always have one.
"""

import cases
import feature_cases
import flashtune
import loop
import machine
import report
import torch
from timing import ROUNDS, round_robin

PASSES = ("forward", "backward")


def tune(variant):
    if variant.rival:
        return
    bias = variant.options.get("bias")
    flashtune.autotune(*variant.qkv, **variant.options)
    flashtune.autotune(
        *variant.qkv, backward=True, need_dbias=bias is not None and bias.requires_grad, **variant.options
    )


def attend(variant):
    # attention_varlen without lengths equals attention, but only attention takes a block mask.
    call = flashtune.attention if "block_mask" in variant.options else flashtune.attention_varlen
    return (variant.rival or call)(*variant.qkv, **variant.options)


def backward_of(variant):
    """A function that runs the backward pass alone."""
    inputs = (*variant.qkv, *variant.options.values())
    learnt = [x for x in inputs if isinstance(x, torch.Tensor) and x.requires_grad]
    out = attend(variant)
    dout = torch.randn_like(out)
    return lambda: torch.autograd.grad(out, learnt, dout, retain_graph=True)


def measure(variants, tune_first, rounds):
    """{pass: {variant: seconds}}, and {variant: reason} of those that do not run."""
    runs, refused = {name: {} for name in PASSES}, {}
    for variant in variants:
        try:
            if tune_first:
                tune(variant)
            backward = backward_of(variant)
            backward()
            torch.cuda.synchronize()
        except Exception as error:
            refused[variant.name] = report.reason(error)
            continue
        runs["forward"][variant.name] = lambda variant=variant: attend(variant)
        runs["backward"][variant.name] = backward
    times = {}
    for name, functions in runs.items():
        with torch.set_grad_enabled(name == "backward"):
            times[name] = dict(zip(functions, round_robin(list(functions.values()), rounds)))
    return times, refused


def flops(variant, backward):
    return cases.work(variant.pairs, variant.qkv[0].shape[-1], backward)


def over(values, baseline):
    """Each value over that of `baseline`; empty where `baseline` has no value."""
    return {name: value / values[baseline] for name, value in values.items()} if baseline in values else {}


def rows_of(suite, problem, variants, times, refused):
    baseline = variants[0].name
    for name, seconds in times.items():
        row = dict(suite=suite, problem=problem, refused=refused)
        row["pass"] = name
        row["us"] = {variant: time * 1e6 for variant, time in seconds.items()}
        row["tflops"] = {
            variant.name: flops(variant, name == "backward") / seconds[variant.name] / 1e12
            for variant in variants
            if variant.name in seconds
        }
        row["time"], row["rate"] = over(row["us"], baseline), over(row["tflops"], baseline)
        yield row


def show(row):
    for variant, us in row["us"].items():
        ratios = "".join(f"{row[of][variant]:8.2f}" if variant in row[of] else f"{'-':>8}" for of in ("time", "rate"))
        print(
            f"{row['suite']:20}{row['problem']:38}{variant:17}{row['pass']:9}{us:11.1f}{row['tflops'][variant]:9.0f}{ratios}",
            flush=True,
        )


def problem_of(row):
    return row["problem"]


def summary(rows):
    """One entry for each suite, variant and pass that has several problems: the mean and the
    least of the rate."""
    groups = {}
    for row in rows:
        for variant in list(row["rate"])[1:]:
            groups.setdefault((row["suite"], variant, row["pass"]), []).append(row)
    found = []
    for (suite, variant, name), members in groups.items():
        if len(members) > 1:
            entry = dict(suite=suite, variant=variant)
            entry["pass"] = name
            entry.update(report.mean_and_least(members, lambda row, variant=variant: row["rate"][variant], problem_of))
            found.append(entry)
    return found


def main():
    suites = feature_cases.SUITES
    arguments = loop.parser(__doc__, suites, "autotune each call first", ROUNDS).parse_args()

    measured_on = machine.describe()
    print(f"{'suite':20}{'problem':38}{'call':17}{'pass':9}{'us':>11}{'TFLOP/s':>9}{'time':>8}{'rate':>8}")

    def rows_of_problem(suite, problem, make):
        variants = make()
        for row in rows_of(suite, problem, variants, *measure(variants, arguments.tune, arguments.rounds)):
            show(row)
            yield row

    def results(rows):
        return dict(machine=measured_on, rows=rows, summary=summary(rows))

    problems = [(suite, *problem) for suite in arguments.suites for problem in suites[suite](arguments.quick)]
    rows, skipped = loop.run(problems, rows_of_problem, results, arguments)

    for entry in summary(rows):
        print(
            f"{entry['suite']} {entry['variant']} {entry['pass']}: rate {entry['geometric_mean']:.3f} (geometric mean of"
            f" {entry['cells']}), least {entry['min']:.2f} at {entry['min_cell']}"
        )
    report.show_gaps(rows, problem_of, skipped)


if __name__ == "__main__":
    main()
