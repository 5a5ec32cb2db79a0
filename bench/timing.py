"""Timing on a GPU whose clock drifts: everybody takes turns, so that drift hits all alike, and medians decide."""

import statistics

import torch

ROUNDS = 7
# Device time that one peer gets in one round.
ROUND_MS = 25.0


def round_robin(functions, rounds=ROUNDS):
    """Median seconds of a call of each function, by CUDA events around a run of calls."""
    counts = [_calls_in_a_round(function) for function in functions]
    times = [[] for _ in functions]
    for _ in range(rounds):
        for function, count, seen in zip(functions, counts, times):
            seen.append(_run(function, count))
    return [statistics.median(seen) for seen in times]


def _calls_in_a_round(function):
    for _ in range(3):
        function()
    one_ms = max(_run(function, 2) * 1e3, 1e-3)
    return max(3, min(400, int(ROUND_MS / one_ms)))


def _run(function, count):
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(count):
        function()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / count / 1e3
