#!/usr/bin/env python3
"""Times flashtune.quantize and flashtune.rotate beside a device-to-device copy, on one GPU.

x is bf16 (batch, keys, heads, dim). A row of the table is a call, and a column is a head dim. A
cell has the microseconds, then the time over that of the call's bytes, read and written once, at
the rate of x's copy. Calls rotate x, or quantise it, with or without a rotation, by

  given  one scale of the tensor
  head   computed scales of batch entries and heads
  block  computed scales of blocks of 128 keys and heads
  key    computed scales of keys and heads

Each call replays from a CUDA graph.
"""

import argparse
import json

import flashtune
import machine
import torch
from timing import captured, round_robin

FORMATS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "int8": torch.int8}
SCALES = {"given": {}, "head": {}, "block": dict(keys_per_descale=128), "key": dict(keys_per_descale=1)}
DIMS = (64, 80, 96, 128, 192, 256)
# The last one is a step of decoding.
SHAPES = {"prompt": (16, 4096, 8), "mixed": (4, 1000, 32), "step": (64, 1, 8)}


def calls(x, formats):
    """{name: (call, bytes of the result)}"""
    made = {"copy": (lambda y=torch.empty_like(x): y.copy_(x), 2 * x.numel()), "rotate": (lambda: flashtune.rotate(x, 1), 2 * x.numel())}
    given = torch.full((), 0.02, device="cuda")
    for name in formats:
        for by, options in SCALES.items():
            options = dict(options, descale=given if by == "given" else None)
            for seed in (None, 1):
                call = lambda to=FORMATS[name], options=options, seed=seed: flashtune.quantize(x, to, **options, rotation_seed=seed)
                made[f"{name}, {by}{', rotated' if seed else ''}"] = call, x.numel()
    return made


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--dims", nargs="+", type=int, default=DIMS)
    parser.add_argument("--json", metavar="FILE", help="write all rows to FILE")
    arguments = parser.parse_args()
    results = dict(machine=machine.describe(), rows=[])
    for shape in arguments.shapes:
        columns = {}
        for dim in arguments.dims:
            x = torch.randn(*SHAPES[shape], dim, device="cuda", dtype=torch.bfloat16)
            made = calls(x, arguments.formats)
            for call, _ in made.values():
                call()
            torch.cuda.synchronize()
            seconds = round_robin([captured(call) for call, _ in made.values()])
            for (name, (_, written)), took in zip(made.items(), seconds):
                at_copy_rate = seconds[0] * (2 * x.numel() + written) / (4 * x.numel())
                columns.setdefault(name, []).append((1e6 * took, took / at_copy_rate))
        print(f"x of {SHAPES[shape]} and head dims " + ", ".join(map(str, arguments.dims)))
        for name, cells in columns.items():
            results["rows"].append(dict(shape=shape, call=name, dims=list(arguments.dims), cells=cells))
            print(f"  {name:22}" + "".join(f"{us:8.1f} {ratio:5.2f}" for us, ratio in cells), flush=True)
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(results, file, indent=1)


if __name__ == "__main__":
    main()
