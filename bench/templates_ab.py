#!/usr/bin/env python3
"""Times two folders of kernel templates against each other on one GPU.

A refactoring that changes the order of instructions shows here what that costs. Both folders run
in this process on the same tensors: the library is loaded twice, and each copy renders from its own
folder (FLASHTUNE_TEMPLATES). Each call replays from a CUDA graph, and the order of the two changes
between rounds (order.py). A row has the microseconds of both, their ratio, and the largest
difference of the results over the largest result; the last rows have the geometric means.
"""

import argparse
import os
import re
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import torch
from timing import captured, round_robin

import flashtune
from flashtune import _context, _library, _torch_drafts

TRAINING = [
    (f"d{dim} s{seqlen} {'causal' if causal else 'full'}", 16384 // seqlen, seqlen, heads, heads, dim, {"causal": causal})
    for dim, heads in ((64, 32), (128, 16), (160, 12), (192, 10), (256, 8))
    for seqlen in (1024, 4096, 16384)
    for causal in (False, True)
] + [
    ("d128 s4096 gqa", 2, 4096, 32, 4, 128, {"causal": True}),
    ("d128 s2048 few heads", 1, 2048, 2, 2, 128, {}),
    ("d128 s4096 window", 4, 4096, 16, 16, 128, {"causal": True, "window": (512, None)}),
]
DECODING = [
    (f"decode d{dim} b{batch} q{queries} page{page}", batch, queries, heads, heads_kv, dim, page)
    for dim, heads, heads_kv in ((128, 32, 8), (64, 32, 8), (256, 16, 8))
    for batch in (1, 32)
    for queries in (1, 16)
    for page in (0, 64, 16)
]
KEYS = 8192


class Side:
    """A copy of the library that renders from one folder of templates."""

    def __init__(self, library, templates, folder):
        copy = shutil.copy(library, folder)
        self.templates = str(Path(templates).resolve())
        os.environ["FLASHTUNE_LIBRARY"] = str(copy)
        _library._library = None
        self.library = _library.library()
        self.contexts = {}

    def use(self):
        """Makes this copy the one that the package calls. A copy reads the variable when it first
        renders. Drafts of the copy before would repeat its calls."""
        os.environ["FLASHTUNE_TEMPLATES"] = self.templates
        _library._library, _context._contexts = self.library, self.contexts
        _torch_drafts.start()


def normal(*shape, generator):
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16, generator=generator)


def training_calls(case):
    """The passes of a problem by name, each a function that returns a tuple of tensors."""
    _, batch, seqlen, heads, heads_kv, dim, options = case
    generator = torch.Generator("cuda").manual_seed(1)
    q, dout = (normal(batch, seqlen, heads, dim, generator=generator) for _ in range(2))
    k, v = (normal(batch, seqlen, heads_kv, dim, generator=generator) for _ in range(2))
    out, lse = flashtune.attention_forward(q, k, v, **options)
    return {
        "forward": lambda: flashtune.attention_forward(q, k, v, **options),
        "backward": lambda: flashtune.attention_backward(dout, q, k, v, out, lse, **options),
    }


def decoding_calls(case):
    _, batch, queries, heads, heads_kv, dim, page = case
    generator = torch.Generator("cuda").manual_seed(1)
    q, options = normal(batch, queries, heads, dim, generator=generator), {}
    shape = (batch, KEYS, heads_kv, dim)
    if page:
        pages = KEYS // page
        shape = (batch * pages, page, heads_kv, dim)
        order = torch.randperm(batch * pages, device="cuda", generator=generator)
        options = {"block_table": order.to(torch.int32).view(batch, pages)}
    k, v = (normal(*shape, generator=generator) for _ in range(2))
    return {"decode": lambda: (flashtune.attention_kvcache(q, k, v, **options),)}


def difference(one, other):
    """The largest difference of two results, over the largest element of the first."""
    pairs = [(a.double(), b.double()) for a, b in zip(one, other)]
    return max(((a - b).abs().max() / a.abs().max().clamp(min=1e-30)).item() for a, b in pairs)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", help="a folder of templates")
    parser.add_argument("after", help="another one")
    parser.add_argument("--only", default="", metavar="REGEX", help="rows whose name matches: 'backward d128', 'decode'")
    parser.add_argument("--rounds", type=int, default=8, help="timing rounds of each row, default 8")
    parser.add_argument("--deadline", type=float, default=float("inf"), metavar="SECONDS", help="start no row after this time")
    arguments = parser.parse_args()
    library = next(path for path in _library.candidates() if path.is_file())
    ratios, start = {}, time.monotonic()
    rows = [(case, decoding_calls, ("decode",)) for case in DECODING]
    rows += [(case, training_calls, ("forward", "backward")) for case in TRAINING]
    with tempfile.TemporaryDirectory() as folder:
        sides = [
            Side(library, templates, Path(folder) / f"{name}.so")
            for name, templates in (("before", arguments.before), ("after", arguments.after))
        ]
        for case, calls_of, passes in rows:
            for name in passes:
                label = case[0] if name == "decode" else f"{name} {case[0]}"
                if not re.search(arguments.only, label) or time.monotonic() - start > arguments.deadline:
                    continue
                # A graph does not keep the tensors that its kernels read; the calls do.
                calls, results, replays = [], [], []
                for side in sides:
                    side.use()
                    calls.append(calls_of(case)[name])
                    results.append(calls[-1]())
                    replays.append(captured(calls[-1]))
                before, after = (seconds * 1e6 for seconds in round_robin(replays, arguments.rounds))
                ratios.setdefault(name, []).append(after / before)
                apart = difference(*results)
                print(f"{label:36} {before:10.1f} {after:10.1f}  {after / before:.3f}  {apart:.1e}", flush=True)
    for name, found in ratios.items():
        mean = statistics.geometric_mean(found)
        print(f"{name}: {mean:.4f} of the time before (least {min(found):.3f}, most {max(found):.3f}, {len(found)} rows)")


if __name__ == "__main__":
    main()
