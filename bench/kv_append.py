#!/usr/bin/env python3
"""Times what writing new keys into a K/V cache costs.

It compares a decoding step of flash_attn_with_kvcache that writes a token with one that only reads:
launched and captured into a graph, with a contiguous cache and with pages of 64 keys. It also times
flashtune.kv_append alone. bf16, heads 32/8, head dim 128, cold L2.
"""

import argparse
import json
import time

import flashtune
import machine
import torch
from flashtune.flash_attn_interface import flash_attn_with_kvcache
from timing import captured, round_robin_cold

HEADS, HEADS_KV, DIM, KEYS = 32, 8, 128, 8192
# Host time is the mean over this many calls.
HOST_CALLS = 50


def tensor(*shape):
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def lengths(batch, keys):
    return torch.full((batch,), keys, device="cuda", dtype=torch.int32)


def step(batch, page_size):
    """Device microseconds of (read, read and write, both again captured), and host microseconds
    of (read, read and write)."""
    q, new = tensor(batch, 1, HEADS, DIM), [tensor(batch, 1, HEADS_KV, DIM) for _ in range(2)]
    rows = (batch * KEYS // page_size, page_size) if page_size else (batch, KEYS)
    cache = [tensor(*rows, HEADS_KV, DIM) for _ in range(2)]
    table = torch.randperm(rows[0], device="cuda", dtype=torch.int32).view(batch, -1) if page_size else None
    before, after = lengths(batch, KEYS - 1), lengths(batch, KEYS)
    read = lambda: flash_attn_with_kvcache(q, *cache, cache_seqlens=after, block_table=table)
    write = lambda: flash_attn_with_kvcache(q, *cache, *new, cache_seqlens=before, block_table=table)
    read(), write()
    torch.cuda.synchronize()
    device_us = [1e6 * seconds for seconds in round_robin_cold([read, write, captured(read), captured(write)])]
    return device_us, [host_us(read), host_us(write)]


def host_us(call):
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(HOST_CALLS):
        call()
    return 1e6 * (time.perf_counter() - start) / HOST_CALLS


def append(batch, seqlen_new):
    """Microseconds of kv_append alone, and its rate in TB/s, read and written bytes together."""
    cache = [tensor(batch, 2 * seqlen_new + 1000, HEADS_KV, DIM) for _ in range(2)]
    new = [tensor(batch, seqlen_new, HEADS_KV, DIM) for _ in range(2)]
    before = lengths(batch, 1000)
    (seconds,) = round_robin_cold([lambda: flashtune.kv_append(*cache, *new, before)])
    moved = 2 * sum(x.numel() * x.element_size() for x in new)
    return seconds * 1e6, moved / seconds / 1e12


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", help="write all rows to FILE")
    arguments = parser.parse_args()
    results = dict(machine=machine.describe(), steps=[], appends=[])
    print(f"us of a step over {KEYS} keys, each without and with a write: launched, captured, host")
    for batch in (1, 32):
        for page_size in (None, 64):
            (launched, writing, graph, writing_graph), (host, writing_host) = step(batch, page_size)
            row = dict(batch=batch, page_size=page_size, launched=[launched, writing], graph=[graph, writing_graph], host=[host, writing_host])
            results["steps"].append(row)
            where = f"pages of {page_size}" if page_size else "contiguous"
            numbers = (launched, writing, graph, writing_graph, host, writing_host)
            print(f"batch {batch:3} {where:12}" + "".join(f"{us:8.1f}" for us in numbers), flush=True)
    for batch, seqlen_new in ((1, 1), (32, 1), (128, 1), (32, 2048)):
        us, rate = append(batch, seqlen_new)
        results["appends"].append(dict(batch=batch, seqlen_new=seqlen_new, us=us, tbps=rate))
        print(f"kv_append, batch {batch:3}, {seqlen_new:4} new keys per sequence: {us:8.1f} us, {rate:5.2f} TB/s read and written", flush=True)
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(results, file, indent=1)


if __name__ == "__main__":
    main()
