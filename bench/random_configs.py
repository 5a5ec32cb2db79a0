#!/usr/bin/env python3
"""Times several configs of each random problem on one GPU: what a model of their times is fitted
to (docs/tuning/choice.md).

The problems are drawn as in bench/random_shapes.py, without the largest. Each config is pinned
(pinned.py), its calls run from one CUDA graph, and its result is compared with the first one's.
Every config is timed in two sweeps, the second in reverse order; the lesser median counts. A row
has the time of the fastest and the configs that come next, as ratios to it.

--choose FILE writes the library's own choice for each problem and times nothing. --chosen FILE
times these configs too. --prepare I/N compiles the I-th of N shares of all kernels and times
nothing, so that N processes compile side by side.

--list FILE writes the problems, without a GPU. `flashtune records choice-error --candidates 1.3
FILE` names the configs that the library's model expects to take at most 1.3 times the least time.
--timed FILE times these configs of these problems, in place of drawn ones.
"""

import argparse
import json
import math
import os
import random
import shutil
import statistics
import tempfile
import time
import zlib
from pathlib import Path

import pinned
import random_cases

SPLITS = [2, 3, 4, 6, 8, 12, 16, 24, 32]
WAVES = [0, 1, 2, 4, 8]
GRAPH_US = 400.0
REPLAYS = 7


def forward_tiles(dim):
    """block_m, block_n, stages of K, V and Q, CTAs an SM."""
    if dim <= 64:
        tiles = [(64, 64, 4, 4, 2, 1), (64, 128, 4, 4, 2, 1), (128, 64, 4, 4, 2, 1), (128, 128, 3, 3, 2, 1)]
        tiles += [(64, 64, 4, 4, 2, 2), (64, 128, 2, 2, 2, 2), (64, 64, 2, 2, 2, 3)]
        return [*tiles, (192, 64, 4, 4, 2, 1), (192, 96, 4, 4, 2, 1), (256, 64, 4, 4, 2, 1)]
    if dim <= 128:
        tiles = [(64, 64, 4, 4, 2, 1), (64, 128, 2, 2, 1, 1), (128, 64, 4, 4, 2, 1), (128, 80, 3, 3, 2, 1)]
        tiles += [(64, 64, 2, 2, 2, 2), (64, 128, 1, 1, 2, 2), (64, 128, 2, 2, 2, 1), (128, 128, 2, 2, 2, 1)]
        return [*tiles, (192, 80, 3, 3, 2, 1) if dim <= 96 else (192, 64, 4, 4, 2, 1)]
    tiles = [(64, 64, 2, 2, 2, 1), (64, 80, 2, 2, 2, 1)]
    if dim <= 192:
        tiles += [(64, 64, 2, 1, 1, 2), (128, 64, 3, 3, 1, 1), (128, 64, 3, 2, 2, 1), (128, 80, 2, 2, 2, 1)]
        return [*tiles, (128, 96, 2, 1, 2, 1), (128, 96, 2, 2, 1, 1)]
    tiles += [(128, 48, 2, 2, 2, 1), (128, 64, 2, 1, 2, 1), (128, 80, 1, 1, 2, 1)]
    return [*tiles, (128, 64, 3, 2, 1, 1), (128, 80, 2, 2, 1, 1)]


def forward_configs(case):
    batch, heads, seqlen_k = case["batch"], case["heads"], case["seqlen_k"]
    cells = batch * heads * -(-case["seqlen_q"] // 64)
    most = max(1, min(seqlen_k // 256, 640 // max(cells, 1), 32))
    for block_m, block_n, k_stages, v_stages, q_stages, ctas in forward_tiles(case["head_dim"]):
        if block_m > 64 and block_m - 64 >= case["seqlen_q"]:
            continue
        for splits in [1, *(splits for splits in SPLITS if splits <= most)]:
            for group in (32, 0) if case["causal"] and splits == 1 and seqlen_k >= 4096 else (32,):
                yield dict(
                    block_m=block_m, block_n=block_n, k_stages=k_stages, v_stages=v_stages, q_stages=q_stages,
                    ctas_per_sm=ctas, stale_max=1,
                    group_mb=group if case["causal"] else 1, tma_store=int(splits == 1 and q_stages == 2), num_splits=splits, decode_rows=0,
                    decode_splits=0,
                    widens=0,
                    splits_rest=0,
                )  # fmt: skip


def backward_tiles(dim):
    """block_m, block_n, num_stages, kv_stages, v_regs."""
    if dim <= 64:
        return [(rows, 128, 2, 2, 0) for rows in (128, 112, 96, 64)]
    if dim <= 96:
        return [(96, 128, 2, 1, 0), (80, 128, 2, 1, 0), (64, 128, 2, 1, 0)]
    if dim <= 128:
        return [(64, 128, 2, 1, 2), (48, 128, 2, 1, 0), (64, 128, 2, 1, 0)]
    if dim <= 192:
        return [(64, 96, 1, 1, 0), (64, 64, 2, 1, 0)]
    return [(64, 128, 1, 1, 0), (48, 128, 1, 1, 0)]


def direct_tiles(case, block_n):
    """The tiles of a head whose last one writes dQ, or 0 where tiles add to it."""
    tiles = -(-case["seqlen_k"] // block_n)
    meet_the_first = not case["causal"] or case["seqlen_q"] <= case["seqlen_k"]
    return tiles if tiles <= 2 and meet_the_first and case["head_dim"] <= 192 else 0


def backward_configs(case):
    for block_m, block_n, num_stages, kv_stages, v_regs in backward_tiles(case["head_dim"]):
        direct = direct_tiles(case, block_n)
        for waves, direct_dq in [*((waves, direct % 2) for waves in WAVES), *([(0, 2)] if direct == 2 else [])]:
            for group in (16, 0) if waves == 0 and case["seqlen_q"] >= 4096 else (16,):
                yield dict(
                    block_m=block_m, block_n=block_n, direct_dq=direct_dq, num_stages=num_stages, kv_stages=kv_stages,
                    group_mb=group, sink_softmax=0, v_regs=v_regs, split_waves=waves, splits_rest=0,
                )  # fmt: skip


def draw(arguments):
    """Random problems, each as a pair of a case and whether its pass is the backward one."""
    rng, kinds, problems = random.Random(arguments.seed), arguments.kinds.split(","), []
    while len(problems) < arguments.count:
        case = random_cases.draw(rng, kinds[len(problems) % len(kinds)])
        backward = rng.choice(["forward", "backward"]) == "backward"
        flops = 4 * case["batch"] * case["heads"] * case["seqlen_q"] * case["seqlen_k"] * case["head_dim"]
        word = "backward" if backward else "forward"
        if word in arguments.passes and flops <= arguments.most_flops:
            problems.append((case, backward))
    return problems


def of_name(text):
    """The config of a name, or None if it is not of sm90."""
    if not text.startswith("sm90 "):
        return None
    pairs = (word.split("=") for word in text.split()[1:])
    return {knob: int(value) for knob, value in pairs}


def microseconds(torch, run):
    run()
    torch.cuda.synchronize()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    run()
    end.record()
    end.synchronize()
    calls = max(1, min(20, round(GRAPH_US / max(start.elapsed_time(end) * 1e3, 1.0))))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            run()
    seen = []
    for _ in range(REPLAYS):
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        seen.append(start.elapsed_time(end) / calls * 1e3)
    return statistics.median(seen)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1, help="what the problems are drawn from, default 1")
    parser.add_argument("--count", type=int, default=100, help="number of problems, default 100")
    parser.add_argument("--kinds", default=",".join(random_cases.KINDS), help="comma-separated, default all but unusual")
    parser.add_argument("--passes", default="forward,backward", help="comma-separated, default both")
    parser.add_argument("--most-flops", type=float, default=3e12, help="leave out larger forward passes, default 3e12")
    parser.add_argument("--prepare", metavar="I/N", help="compile share I of N (from 0 on) of the kernels and end")
    parser.add_argument("--choose", metavar="FILE", help="write the library's choices to FILE and end")
    parser.add_argument("--chosen", metavar="FILE", help="choices to time too")
    parser.add_argument("--list", metavar="FILE", help="write the problems to FILE and end")
    parser.add_argument("--timed", metavar="FILE", help="time the configs of the problems of FILE, in place of drawn ones")
    parser.add_argument("--deadline", type=float, default=math.inf, metavar="SECONDS", help="start no problem after this time")
    parser.add_argument("--cache", default=tempfile.gettempdir() + "/flashtune-configs", help="a folder for this bench alone: its records are deleted first")
    parser.add_argument("--out", help="JSON file of all times")
    arguments = parser.parse_args()
    if arguments.timed:
        listed = json.loads(Path(arguments.timed).read_text())
        problems = [(one["case"], one["backward"]) for one in listed]
        configs_of = [[config for config in map(of_name, one["us"]) if config] for one in listed]
    else:
        problems = draw(arguments)
        configs_of = [list((backward_configs if backward else forward_configs)(case)) for case, backward in problems]
    if arguments.list:
        rows = [dict(case=case, backward=backward, us={}) for case, backward in problems]
        Path(arguments.list).write_text(json.dumps(rows) + "\n")
        return
    folder = Path(arguments.cache)
    if arguments.choose:
        os.environ["FLASHTUNE_CACHE_DIR"] = tempfile.mkdtemp()
    elif arguments.prepare:
        # Each share has records and kernels of its own. The timed run takes over the kernels.
        pinned.use_folder(f"{folder}/share-{arguments.prepare.replace('/', '-')}")
    else:
        pinned.use_folder(arguments.cache)
        for share in folder.glob("share-*/cubins"):
            shutil.copytree(share, folder / "cubins", dirs_exist_ok=True)

    import torch

    import flashtune

    chosen = json.loads(Path(arguments.chosen).read_text()) if arguments.chosen else []
    choices = []
    began, pins, results, kernels = time.monotonic(), pinned.Pins(folder), [], set()
    for number, (case, backward) in enumerate(problems):
        if time.monotonic() - began > arguments.deadline:
            print(f"{len(problems) - number} problems were not started")
            break
        torch.manual_seed(number)
        sizes = [(case["seqlen_q"], case["heads"]), *[(case["seqlen_k"], case["heads_kv"])] * 2]
        batch, dim, causal = case["batch"], case["head_dim"], case["causal"]
        q, k, v = (torch.randn(batch, rows, of, dim, device="cuda", dtype=torch.bfloat16) for rows, of in sizes)
        options = dict(causal=causal, backward=backward)
        if arguments.choose:
            choices.append(flashtune.plan_info(q, k, v, **options)["config"])
            continue
        configs = configs_of[number]
        config = of_name(chosen[number]) if number < len(chosen) else None
        configs += [config] if config and config not in configs else []
        if arguments.prepare:
            share, of = map(int, arguments.prepare.split("/"))
            for config in configs:
                splits = config.get("num_splits", 1) > 1 or config.get("split_waves", 0) > 0
                text = {knob: value for knob, value in config.items() if knob not in ("num_splits", "splits_rest", "split_waves")}
                kernel = str((backward, dim, causal, sorted(text.items()), splits))
                if kernel in kernels or zlib.crc32(kernel.encode()) % of != share:
                    continue
                kernels.add(kernel)
                if pins.pin(case, config, backward) and flashtune.plan_info(q, k, v, **options)["config"] == pinned.name(config):
                    flashtune.prepare(q, k, v, **options)
            continue
        out, lse = flashtune.attention_forward(q, k, v, causal=causal)
        dout = torch.randn_like(out)

        def run():
            if backward:
                return flashtune.attention_backward(dout, q, k, v, out, lse, causal=causal)
            return flashtune.attention_forward(q, k, v, causal=causal)[:1]

        expected, times, wrong = None, {}, set()
        for config in configs + configs[::-1]:
            text = pinned.name(config)
            if not pins.pin(case, config, backward) or flashtune.plan_info(q, k, v, **options)["config"] != text:
                continue
            if text not in times and text not in wrong:
                expected = expected or [x.float() for x in run()]
                pairs = zip(run(), expected, strict=True)
                error = max(((a.float() - b).abs().max() / b.abs().max()).item() for a, b in pairs)
                if not error < 0.05:
                    print(f"  {text}: WRONG, off by {error:.3g}")
                    wrong.add(text)
            if text in wrong:
                continue
            times[text] = min(times.get(text, math.inf), microseconds(torch, run))
        word = "backward" if backward else "forward"
        ranked = sorted(times.items(), key=lambda entry: entry[1]) or [("refused", math.nan)]
        best = ranked[0]
        print(f"{word} {case['kind']} {random_cases.label(case)}: {best[1]:.1f} us by {best[0]}", flush=True)
        print("  " + "; ".join(f"{us / best[1]:.3f} {text[5:]}" for text, us in ranked[1:4]), flush=True)
        results.append(dict(case=case, backward=backward, us=times))
        if arguments.out:
            Path(arguments.out).write_text(json.dumps(results) + "\n")
    if arguments.choose:
        Path(arguments.choose).write_text(json.dumps(choices) + "\n")


if __name__ == "__main__":
    main()
