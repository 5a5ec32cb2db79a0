"""Timing on a GPU whose clock drifts: each round runs every function, the order changes between
rounds (order.py), and the median over rounds counts."""

import statistics

import torch
from order import orders

# The design of order.py twice for four functions, once for eight.
ROUNDS = 8
# Device time of one function in one round.
ROUND_MS = 25.0

COLD_ROUNDS = 16
# Several times any L2. Reading it takes 0.2 ms at 5 TB/s, which gives the host time to enqueue the
# timed call.
COLD_BYTES = 1 << 30


def round_robin(functions, rounds=ROUNDS):
    """Median seconds of a call of each function, by CUDA events around a run of calls."""
    counts = [_calls_in_a_round(function) for function in functions]
    times = [[] for _ in functions]
    for order in orders(len(functions), rounds):
        for i in order:
            times[i].append(_run(functions[i], counts[i]))
    return [statistics.median(seen) for seen in times]


def round_robin_cold(functions, rounds=COLD_ROUNDS):
    """Median seconds of a single call of each function with a cold L2: a buffer larger than L2 is
    read before each call.

    The call waits in the stream behind that read. Host time therefore counts only where it exceeds
    the read's 0.2 ms. Gaps between the kernels of one call count, and so do the one or two
    microseconds between the events.
    """
    buffer = torch.zeros(COLD_BYTES // 4, dtype=torch.float32, device="cuda")
    times = [[] for _ in functions]
    for function in functions:
        function()
    for order in orders(len(functions), rounds):
        events = {}
        for i in order:
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            buffer.sum()
            start.record()
            functions[i]()
            end.record()
            events[i] = start, end
        torch.cuda.synchronize()
        for i, (start, end) in events.items():
            times[i].append(start.elapsed_time(end) / 1e3)
    return [statistics.median(seen) for seen in times]


def captured(function):
    """A function that replays one call of `function` from a CUDA graph. `function` must have run
    before."""
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
