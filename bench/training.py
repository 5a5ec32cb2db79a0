#!/usr/bin/env python3
"""Trains a two-layer transformer with the attention of each peer, from the same weights on the same
batches, in bf16.

Prints each peer's final loss and how far its loss curve lies from the math backend's. The spread of
the peers (at each step the largest loss minus the smallest, without flashtune and with it) shows
how much of that distance is noise. The time of a training step at a realistic size follows,
measured round by round.
"""

import argparse
import json
import statistics

import machine
import peers
import torch
from timing import round_robin
from transformer import Training

PEERS = ("math", "cudnn", "fa2", "flashtune")
REFERENCE = "math"
STEPS = 200
LEARNT = dict(width=512, heads=8, seqlen=512)
LEARNT_BATCH = 16
TIMED = dict(width=1024, heads=16, seqlen=2048)
TIMED_BATCH = 4

ALPHABET = 64
ORDERS = 8
NOISE = 0.1


def walks(rows, seqlen, seed):
    """(rows, seqlen + 1) bytes to learn.

    A row's first byte names one of eight orders of the alphabet, and its second byte is random.
    Each later byte is the predecessor's successor in that order; a share of NOISE is random
    instead. Only attention to other bytes reveals the order: without it, the loss stays above log 8
    = 2.1.
    """
    generator = torch.Generator().manual_seed(seed)
    successor = torch.stack([torch.randperm(ALPHABET, generator=generator) for _ in range(ORDERS)])
    order = torch.randint(ORDERS, (rows,), generator=generator)
    drawn = torch.randint(ALPHABET, (rows, seqlen), generator=generator)
    noisy = torch.rand(rows, seqlen, generator=generator) < NOISE
    row = [ALPHABET + order, drawn[:, 0]]
    for at in range(1, seqlen):
        row.append(torch.where(noisy[:, at], drawn[:, at], successor[order, row[-1]]))
    return torch.stack(row, 1)


def start(attend, sizes):
    return Training(lambda q, k, v, causal: attend(q, k, v, causal, 0.0), "cuda", torch.bfloat16, **sizes)


def loss_curves(attends, steps):
    """{peer: the loss at each step}, and {peer: reason} of those that do not run."""
    batches = walks(steps * LEARNT_BATCH, LEARNT["seqlen"], seed=1).cuda().view(steps, LEARNT_BATCH, -1)
    curves, refused = {}, {}
    for name, attend in attends.items():
        training = start(attend, LEARNT)
        try:
            curves[name] = torch.stack([training.step(batch) for batch in batches]).tolist()
        except Exception as error:
            refused[name] = f"{type(error).__name__}: {error}"
    return curves, refused


def largest_and_mean(differences):
    return dict(largest=max(differences), mean=statistics.fmean(differences))


def to_reference(curves):
    """{peer: its distance from the math backend's curve}"""
    reference = curves.get(REFERENCE)
    return {
        name: largest_and_mean([abs(loss - wanted) for loss, wanted in zip(curve, reference)])
        for name, curve in curves.items()
        if reference and name != REFERENCE
    }


def spread(curves):
    """The largest and the mean, over all steps, of the largest loss minus the smallest."""
    return largest_and_mean([max(losses) - min(losses) for losses in zip(*curves)])


def spreads(curves):
    others = [curve for name, curve in curves.items() if name != "flashtune"]
    found = {"without flashtune": others, "with flashtune": list(curves.values())}
    return {name: spread(curves) for name, curves in found.items() if len(curves) > 1}


def step_seconds(attends):
    """{peer: median seconds of a step}"""
    batch = walks(TIMED_BATCH, TIMED["seqlen"], seed=2).cuda()
    trainings = [start(attend, TIMED) for attend in attends.values()]
    steps = [lambda training=training: training.step(batch) for training in trainings]
    return dict(zip(attends, round_robin(steps)))


def size(sizes, batch):
    return f"two layers of width {sizes['width']}, {sizes['heads']} heads, batch {batch} of {sizes['seqlen']} tokens"


def show_learning(results):
    print(f"\n{results['steps']} steps, {size(LEARNT, LEARNT_BATCH)}")
    print(f"{'attention':12}{'first loss':>12}{'final loss':>12}{'from math: largest':>20}{'mean':>10}")
    for name, curve in results["losses"].items():
        distance = results["from_math"].get(name)
        distances = f"{distance['largest']:20.5f}{distance['mean']:10.5f}" if distance else f"{'-':>20}{'-':>10}"
        print(f"{name:12}{curve[0]:12.4f}{curve[-1]:12.4f}{distances}")
    for name, distance in results["spread"].items():
        print(f"{'spread ' + name:36}{distance['largest']:20.5f}{distance['mean']:10.5f}")


def show_times(step_ms):
    print(f"\nmedian of a step, {size(TIMED, TIMED_BATCH)}")
    for name, ms in step_ms.items():
        over = f"  {ms / step_ms['flashtune']:.2f} x flashtune's" if "flashtune" in step_ms else ""
        print(f"{name:12}{ms:8.2f} ms{over}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=STEPS, help=f"training steps whose losses are compared, default {STEPS}")
    known = ", ".join(PEERS)
    parser.add_argument("--peers", default=",".join(PEERS), help=f"comma-separated, from: {known}, efficient, fa3, fa4; default: {known}")
    parser.add_argument("--json", metavar="FILE", help="write the loss curves, distances and times to FILE")
    arguments = parser.parse_args()
    if arguments.steps < 1:
        parser.error(f"--steps is {arguments.steps}; it must be at least 1")

    results = dict(machine=machine.describe(), steps=arguments.steps)
    attends, missing = peers.load(arguments.peers.split(","))
    for name, reason in missing.items():
        print(f"peer {name} is not here: {reason}")
    curves, refused = loss_curves(attends, arguments.steps)
    for name, reason in refused.items():
        print(f"peer {name} cannot train: {reason}")
    results.update(losses=curves, from_math=to_reference(curves), spread=spreads(curves))
    show_learning(results)
    times = step_seconds({name: attends[name] for name in curves})
    results["step_ms"] = {name: seconds * 1e3 for name, seconds in times.items()}
    show_times(results["step_ms"])
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(results, file, indent=1)


if __name__ == "__main__":
    main()
