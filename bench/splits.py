#!/usr/bin/env python3
"""Times forward passes of few tiles with their keys split into different numbers of pieces.

Each config is imported as a record of exactly its problem, so that the library plans with it. A
config's calls run from one CUDA graph, and the next config replaces the plan. Every config is timed
in two sweeps, the second in reverse order; the lesser median counts. A row has the microseconds of
one tile by number of splits; `*` marks the config that the library chooses without a record, which
does not split.

Compiled kernels and the records go to a folder of their own (--cache), never to the user's.
"""

import argparse
import contextlib
import json
import math
import os
import shutil
import statistics
import tempfile
from pathlib import Path

# Name: batch, query heads, kv heads, seqlen_q, seqlen_k, head dim, causal.
PROBLEMS = {
    "few 1x3249 d128": (1, 1, 1, 3249, 3249, 128, False),
    "few 1x8335 d64 causal": (1, 1, 1, 8335, 8335, 64, True),
    "gqa 4/1x4767 d128 causal": (1, 4, 1, 4767, 4767, 128, True),
    "few 1x2000 d64": (1, 1, 1, 2000, 2000, 64, False),
    "few 2x4096 d128 causal": (1, 2, 2, 4096, 4096, 128, True),
    "few 3x2500 d128": (1, 3, 3, 2500, 2500, 128, False),
    "few 1x16384 d128 causal": (1, 1, 1, 16384, 16384, 128, True),
    "few 2x1500 d256": (1, 2, 2, 1500, 1500, 256, False),
    "few 1x6000 d256 causal": (1, 1, 1, 6000, 6000, 256, True),
    "few 2x2 1200 d64 causal": (2, 2, 2, 1200, 1200, 64, True),
    "heads 8x2048 d128": (1, 8, 8, 2048, 2048, 128, False),
    "cross 2x5 300x1500 d64": (2, 5, 5, 300, 1500, 64, False),
    "cross 1x5 1024x1500 d128": (1, 5, 5, 1024, 1500, 128, False),
    "cross 1x8 300x6000 d128": (1, 8, 8, 300, 6000, 128, False),
}
SPLITS = [1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32]
CALLS = 20  # in a graph
REPLAYS = 9


def bucket(size):
    """As src/plan/canonical.rs."""
    if size < 4:
        return size
    power = 1 << (size.bit_length() - 1)
    ratio = size * 1024 // power
    return power if ratio < 1254 else power + power // 2 if ratio < 1774 else 2 * power


def max_splits(batch, heads, seqlen_q, seqlen_k):
    """As src/problem/workspace.rs, for many queries."""
    tiles = batch * heads * -(-seqlen_q // 64)
    return max(1, min(seqlen_k // 256, 640 // tiles, 32))


def tiles(head_dim):
    """Tiles to time: block_m, block_n, stages of K, V and Q."""
    if head_dim > 128:
        return [(64, 64, 3, 2, 1), (128, 64, 3, 2, 1)]
    return [(64, 64, 4, 4, 2), (128, 64, 4, 4, 2), (192, 64, 4, 4, 2), (64, 128, 2, 2, 1), (128, 128, 2, 2, 1)]


def record(problem, config, median_us, device):
    batch, heads, heads_kv, seqlen_q, seqlen_k, head_dim, causal = problem
    mask = "causal" if causal else "full"
    sizes = f"gqa{bucket(heads // heads_kv)} b{bucket(batch)} hq{bucket(heads)} sq{bucket(seqlen_q)} sk{bucket(seqlen_k)}"
    return {
        "key": f"v1 forward bf16 d{head_dim} dv{head_dim} {mask} nodropout vec8 {sizes}",
        **device,
        "config": {"family": "sm90", **config},
        "median_us": median_us,
        "spread": 0.0,
        "check_error": 0.0,
        "problem": {
            "pass": "forward",
            "dtype": "bf16",
            "batch_size": batch,
            "num_heads_q": heads,
            "num_heads_kv": heads_kv,
            "seqlen_q": seqlen_q,
            "seqlen_k": seqlen_k,
            "head_dim": head_dim,
            "head_dim_v": head_dim,
            "causal": "bottom-right" if causal else "none",
            "dropout": False,
            "layout": "vec8",
        },
        "driver_version": 0,
        "nvrtc_version": [0, 0],
        "library_version": "0",
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="problems whose name has this text")
    parser.add_argument("--cache", default=tempfile.gettempdir() + "/flashtune-splits", help="folder of kernels and records")
    parser.add_argument("--out", help="JSON file of all times")
    arguments = parser.parse_args()
    # The library reads both when it makes its context. Shipped records would hide the heuristic.
    os.makedirs(arguments.cache, mode=0o700, exist_ok=True)
    os.makedirs(arguments.cache + "/no-records", exist_ok=True)
    for name in ("records.index", "records.sled"):
        shutil.rmtree(f"{arguments.cache}/{name}", ignore_errors=True)
    with contextlib.suppress(FileNotFoundError):
        os.remove(arguments.cache + "/records.journal")
    os.environ["FLASHTUNE_CACHE_DIR"] = arguments.cache
    os.environ["FLASHTUNE_TUNING_DB"] = arguments.cache + "/no-records"

    import torch

    import flashtune

    properties = torch.cuda.get_device_properties(0)
    device = {"device": properties.name, "arch": "sm_90", "sm_count": properties.multi_processor_count}
    file = Path(arguments.cache) / "record.jsonl"
    imports, results = 0, {}

    def microseconds(run):
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            run()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(CALLS):
                run()
        seen = []
        for _ in range(REPLAYS):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            seen.append(start.elapsed_time(end) / CALLS * 1e3)
        return statistics.median(seen)

    def inputs(problem):
        batch, heads, heads_kv, seqlen_q, seqlen_k, head_dim, _ = problem
        shapes = (seqlen_q, heads), (seqlen_k, heads_kv), (seqlen_k, heads_kv)
        torch.manual_seed(0)
        return [torch.randn(batch, rows, of, head_dim, device="cuda", dtype=torch.bfloat16) for rows, of in shapes]

    problems = {name: problem for name, problem in PROBLEMS.items() if arguments.only in name}
    # Before any record is there, which would serve the problems of its class.
    own = {}
    for name, problem in problems.items():
        q, k, v = inputs(problem)
        chosen = flashtune.plan_info(q, k, v, causal=problem[-1])
        own[name] = chosen, microseconds(lambda: flashtune.attention_forward(q, k, v, causal=problem[-1]))

    for name, problem in problems.items():
        batch, heads, heads_kv, seqlen_q, seqlen_k, head_dim, causal = problem
        q, k, v = inputs(problem)
        run = lambda: flashtune.attention_forward(q, k, v, causal=causal)
        chosen, own_us = own[name]
        expected = torch.nn.functional.scaled_dot_product_attention(
            *(x.float().transpose(1, 2).repeat_interleave(heads // x.shape[2], 1) for x in (q, k, v)),
            attn_mask=torch.ones(seqlen_q, seqlen_k, dtype=torch.bool, device="cuda").tril(seqlen_k - seqlen_q) if causal else None,
        ).transpose(1, 2)
        print(f"\n{name}: {own_us:.1f} us by {chosen['source']}: {chosen['config']}", flush=True)
        most = min(max_splits(batch, heads, seqlen_q, seqlen_k), max_splits(*map(bucket, (batch, heads, seqlen_q, seqlen_k))))
        configs = [(tile, splits) for tile in tiles(head_dim) for splits in SPLITS if splits <= most]
        times = {}
        for tile, splits in configs + configs[::-1]:
            block_m, block_n, k_stages, v_stages, q_stages = tile
            config = dict(block_m=block_m, block_n=block_n, k_stages=k_stages, v_stages=v_stages, q_stages=q_stages)
            tma_store = int(splits == 1 and q_stages == 2)
            config.update(stale_max=1, group_mb=32 if causal else 1, tma_store=tma_store, num_splits=splits)
            imports += 1
            # Ever faster, so that each record replaces the one before it.
            file.write_text(json.dumps(record(problem, config, 1e6 * 0.999**imports, device)) + "\n")
            flashtune.import_records(str(file), device=q.device.index or 0)
            got = flashtune.plan_info(q, k, v, causal=causal)["config"]
            wanted = "sm90 " + " ".join(f"{knob}={config[knob]}" for knob in sorted(config))
            if got != wanted:
                print(f"  {wanted}: not taken; the plan is {got}")
                continue
            error = ((run()[0].float() - expected).abs().max() / expected.abs().max()).item()
            if not error < 0.02:
                print(f"  {wanted}: WRONG, off by {error:.3g}")
                continue
            times[tile, splits] = min(times.get((tile, splits), math.inf), microseconds(run))
        for tile in tiles(head_dim):
            row = {splits: us for (of, splits), us in times.items() if of == tile}
            if not row:
                continue
            best = min(row, key=row.get)
            is_own = lambda splits: all(
                f"{knob}={value} " in chosen["config"] + " "
                for knob, value in (("block_m", tile[0]), ("block_n", tile[1]), ("num_splits", splits))
            )
            cells = " ".join(f"{splits}:{us:.1f}{'*' * is_own(splits)}" for splits, us in sorted(row.items()))
            print(f"  {tile[0]}x{tile[1]}: {cells}  best {best}", flush=True)
        results[name] = {
            "chosen": chosen["config"],
            "chosen_us": own_us,
            "us": [{"tile": tile, "num_splits": splits, "us": us} for (tile, splits), us in times.items()],
        }
        if arguments.out:
            Path(arguments.out).write_text(json.dumps(results, indent=1) + "\n")
    for name, result in results.items():
        best = min((entry["us"] for entry in result["us"]), default=math.nan)
        print(f"{name}: chosen {result['chosen_us']:.1f} us, best {best:.1f} us, {result['chosen_us'] / best:.2f} times")


if __name__ == "__main__":
    main()
