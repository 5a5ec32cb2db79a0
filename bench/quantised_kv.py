#!/usr/bin/env python3
"""Times attention over K/V caches of 8 bits and int4 beside bf16, round by round on one GPU.

Decoding: one query of each sequence over caches of 512 MiB and more in bf16. Prints the
microseconds, the TB/s of K and V with their scales, and that rate over the rate of a
device-to-device copy in the same run. Formats are e4m3, e5m2, int8 and int4; scales are one for
each head ("head") or for each token and head ("token"), and of int4 for 32 or 64 columns; caches
are contiguous or in pages of 16 or 64 keys. L2 is cold.

Prefill: 2,048 and 512 queries over a cache of 16,384 keys. Prints the time over that of bf16.

FA3's fp8 runs beside them where flash_attn_interface can be imported: with q in e4m3, as it has no
16-bit q over an 8-bit cache.
"""

import argparse
import json
import math

import flashtune
import machine
import torch
from timing import round_robin, round_robin_cold

HEADS, HEADS_KV = 32, 8
FORMATS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "int8": torch.int8}
COPY_BYTES = 1 << 30


def copy_rate():
    """Bytes per second of a device-to-device copy, read and written bytes together."""
    source = torch.zeros(COPY_BYTES, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    (seconds,) = round_robin([lambda: target.copy_(source)])
    return 2 * COPY_BYTES / seconds


def quantised(x, dtype, by):
    """(numbers, scales) of a cache (entries, keys, heads, dim): a scale for each head or token."""
    largest = 127.0 if dtype is torch.int8 else torch.finfo(dtype).max
    top = x.abs().amax(-1).float() if by == "token" else x.abs().amax((0, 1, 3)).float()
    scales = top / largest
    wide = x.float() / (scales[..., None] if by == "token" else scales[None, None, :, None])
    numbers = wide.round().clamp(-127, 127).to(dtype) if dtype is torch.int8 else wide.clamp(-largest, largest).to(dtype)
    return numbers, scales if by == "token" else scales[None, :]


def int4_rows(x, group):
    """Rows of int4 of a cache (entries, keys, heads, dim)."""
    dim = x.shape[-1]
    groups = x.unflatten(-1, (dim // group, group))
    zeros = groups.amin(-1).half()
    scales = ((groups.amax(-1).float() - zeros.float()) / 15).half()
    numbers = ((groups - zeros[..., None]) / scales[..., None]).round().clamp(0, 15).to(torch.uint8).flatten(-2)
    rows = torch.zeros(*x.shape[:-1], flashtune.int4_row_bytes(dim, group), dtype=torch.uint8, device=x.device)
    rows[..., : dim // 2] = numbers[..., 0::2] | numbers[..., 1::2] << 4
    rows[..., dim // 2 : dim // 2 + dim // group * 4] = torch.stack((scales, zeros), -1).view(torch.uint8).flatten(-2)
    return rows


def calls(batch, queries, keys, dim, page_size, formats, scalings):
    """{name: (call, bytes of K and V with their scales)}"""
    entries, rows = (batch * keys // page_size, page_size) if page_size else (batch, keys)
    q = torch.randn(batch, queries, HEADS, dim, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(entries, rows, HEADS_KV, dim, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    table = torch.randperm(entries, dtype=torch.int32, device="cuda").view(batch, -1) if page_size else None
    lengths = torch.full((batch,), keys, dtype=torch.int32, device="cuda")
    causal = queries > 1
    of = dict(block_table=table, seqused_k=lengths, causal=causal)
    made = {"bf16": (lambda: flashtune.attention_kvcache(q, k, v, **of), 2 * k.numel() * 2)}
    for name in formats:
        for by in scalings:
            (k8, ks), (v8, vs) = (quantised(x, FORMATS[name], by) for x in (k, v))
            if by == "head":
                ks, vs = (s.expand(batch, HEADS_KV).contiguous() for s in (ks, vs))
            made[f"{name}/{by}"] = (
                lambda k8=k8, v8=v8, ks=ks, vs=vs: flashtune.attention_kvcache(q, k8, v8, k_descale=ks, v_descale=vs, **of),
                2 * k8.numel() + 4 * (ks.numel() + vs.numel()),
            )
    for group in (32, 64):
        k4, v4 = int4_rows(k, group), int4_rows(v, group)
        made[f"int4/{group}"] = (
            lambda k4=k4, v4=v4, group=group: flashtune.attention_kvcache(q, k4, v4, int4_group=group, **of),
            2 * k4.numel(),
        )
    try:
        from flash_attn_interface import flash_attn_with_kvcache

        k8, v8, q8 = (x.to(torch.float8_e4m3fn) for x in (k, v, q))
        fa3 = lambda: flash_attn_with_kvcache(q8, k8, v8, cache_seqlens=lengths, page_table=table, causal=causal)
        fa3()
        made["FA3 fp8"] = (fa3, 2 * k8.numel())
    except Exception as error:
        print(f"    without FA3: {type(error).__name__}: {str(error).splitlines()[0][:80] if str(error) else ''}")
    return made


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two caches and one prompt")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--json", metavar="FILE", help="write all rows to FILE")
    arguments = parser.parse_args()
    rate = copy_rate()
    results = dict(machine=machine.describe(), copy_tbps=rate / 1e12, decode=[], prefill=[])
    print(f"copy: {rate / 1e12:.2f} TB/s")
    shapes = [(64, 8192, 128, None), (64, 8192, 128, 16), (16, 32768, 128, 64), (128, 8192, 64, None), (16, 8192, 256, None)]
    for batch, keys, dim, page_size in shapes[:2] if arguments.quick else shapes:
        where = f"pages of {page_size}" if page_size else "contiguous"
        print(f"decode batch {batch} keys {keys} d{dim} {where}", flush=True)
        made = calls(batch, 1, keys, dim, page_size, FORMATS, ("head", "token"))
        times = round_robin_cold([call for call, _ in made.values()], arguments.rounds)
        for (name, (_, size)), seconds in zip(made.items(), times):
            row = dict(batch=batch, keys=keys, dim=dim, page_size=page_size, name=name, us=seconds * 1e6)
            row.update(tbps=size / seconds / 1e12, of_copy=size / seconds / rate, of_bf16=times[0] / seconds)
            results["decode"].append(row)
            print(f"    {name:12}{row['us']:9.1f} us{row['tbps']:7.2f} TB/s  {row['of_copy']:.2f} of a copy  {row['of_bf16']:.2f} x bf16", flush=True)
        del made
        torch.cuda.empty_cache()
    prompts = [(1, 2048, 16384, 128, None), (1, 2048, 16384, 128, 16), (4, 512, 16384, 128, 64), (1, 4096, 4096, 64, None)]
    for batch, queries, keys, dim, page_size in prompts[:1] if arguments.quick else prompts:
        where = f"pages of {page_size}" if page_size else "contiguous"
        print(f"prefill batch {batch} queries {queries} keys {keys} d{dim} {where}", flush=True)
        made = calls(batch, queries, keys, dim, page_size, FORMATS, ("head", "token"))
        times = round_robin([call for call, _ in made.values()], max(4, arguments.rounds // 2))
        flops = 4 * batch * HEADS * queries * (keys - queries / 2) * dim
        for name, seconds in zip(made, times):
            row = dict(batch=batch, queries=queries, keys=keys, dim=dim, page_size=page_size, name=name, us=seconds * 1e6)
            row.update(tflops=flops / seconds / 1e12, over_bf16=seconds / times[0])
            results["prefill"].append(row)
            print(f"    {name:12}{row['us']:9.1f} us{row['tflops']:7.0f} TFLOPS  {row['over_bf16']:.2f} of bf16's time", flush=True)
        del made
        torch.cuda.empty_cache()
    for of, is_int4 in (("8-bit", False), ("int4", True)):
        ratios = [row["of_copy"] for row in results["decode"] if "/" in row["name"] and row["name"].startswith("int4") == is_int4]
        print(f"geometric mean of {of} reads over a copy: {math.exp(sum(map(math.log, ratios)) / len(ratios)):.3f}")
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(results, file, indent=1)


if __name__ == "__main__":
    main()
