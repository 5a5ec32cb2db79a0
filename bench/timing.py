"""Timing on a GPU whose clock drifts: everybody takes turns, so that drift hits all alike, and medians decide."""

import statistics

import torch

ROUNDS = 7
# Device time that one peer gets in one round.
ROUND_MS = 25.0

COLD_ROUNDS = 15
# Several times any L2. Reading it takes 0.2 ms at 5 TB/s, which leaves the host time to enqueue what comes after.
COLD_BYTES = 1 << 30


def round_robin(functions, rounds=ROUNDS):
    """Median seconds of a call of each function, by CUDA events around a run of calls."""
    counts = [_calls_in_a_round(function) for function in functions]
    times = [[] for _ in functions]
    for _ in range(rounds):
        for function, count, seen in zip(functions, counts, times):
            seen.append(_run(function, count))
    return [statistics.median(seen) for seen in times]


def round_robin_cold(functions, rounds=COLD_ROUNDS):
    """Median seconds of a single call of each function, before which a buffer larger than L2 was read.

    The call waits in the stream behind that reading, so that host time up to the reading's does not count; what lies
    between two kernels of a call does, and so do the one or two microseconds between the events.
    """
    buffer = torch.zeros(COLD_BYTES // 4, dtype=torch.float32, device="cuda")
    times = [[] for _ in functions]
    for function in functions:
        function()
    for _ in range(rounds):
        events = []
        for function in functions:
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            buffer.sum()
            start.record()
            function()
            end.record()
            events.append((start, end))
        torch.cuda.synchronize()
        for (start, end), seen in zip(events, times):
            seen.append(start.elapsed_time(end) / 1e3)
    return [statistics.median(seen) for seen in times]


def captured(function):
    """A function that replays one call of `function` from a CUDA graph. The function must have run before."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph.replay


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
