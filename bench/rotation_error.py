#!/usr/bin/env python3
"""Shows what rotating q and k (flashtune.rotate) changes in the error of 8-bit attention.

Runs on the CPU backend, with NumPy and ml_dtypes. q, k and v are in bf16 and of four kinds:

  normal    N(0, 1)
  outliers  N(0, 1) and a thousandth of N(0, 100), FlashAttention-3's recipe
  channel   N(0, 1), and one column of k is 20 times larger
  spikes    N(0, 1), and one element of each row of q and k, in a random column, is 20 to 40

They are quantised with scales of the tensor, of heads, or of blocks of 128 keys (q: of heads). v
is not rotated. Three forward passes are compared with fp64 on the tensors before quantising: q, k
and v in e4m3, and k and v in e4m3 or int8 beside q in bf16.

A line has three numbers for each kind of scale: the root mean square error of out without and with
a rotation, and their quotient. Then come quotients for the three kinds of scales. They are those of
out where v stays as it is, by fp64 on the quantised q and k; of the errors of all scores; and of
the errors of each row's largest score.
"""

import argparse

import flashtune
import ml_dtypes
import numpy

BF16, E4M3, INT8 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, numpy.int8
LARGEST = {E4M3: 448, INT8: 127}
PASSES = {"q, k, v e4m3": (True, E4M3), "k, v e4m3": (False, E4M3), "k, v int8": (False, INT8)}
SCALES = {"tensor": None, "head": 0, "block": 128}
KINDS = ("normal", "outliers", "channel", "spikes")


def tensors(random, kind, shape):
    """q, k and v"""
    made = [random.standard_normal(shape) for _ in range(3)]
    if kind == "outliers":
        for x in made:
            x += 10 * random.standard_normal(shape) * (random.random(shape) < 1e-3)
    if kind == "channel":
        made[1][..., 5] *= 20
    if kind == "spikes":
        for x in made[:2]:
            rows = (*shape[:3], 1)
            numpy.put_along_axis(x, random.integers(shape[3], size=rows), random.uniform(20, 40, rows), -1)
    return [x.astype(BF16) for x in made]


def quantised(x, dtype, scales, seed):
    """(numbers, scales, their product in fp64)"""
    keys = SCALES[scales]
    if keys is None:
        turned = x if seed is None else flashtune.rotate(x, seed)
        top = numpy.abs(turned.astype(numpy.float32)).max()
        numbers, scale = flashtune.quantize(x, dtype, descale=float(top / LARGEST[dtype]), rotation_seed=seed)
        return numbers, scale, numbers.astype(float) * float(scale)
    numbers, scale = flashtune.quantize(x, dtype, keys_per_descale=keys, rotation_seed=seed)
    wide = numpy.repeat(scale, 128, 1)[:, : x.shape[1]] if keys else scale[:, None]
    return numbers, scale, numbers.astype(float) * wide[..., None]


def exact(q, k, v):
    """(out, scores) in fp64, by heads."""
    q, k, v = (x[0].swapaxes(0, 1).astype(float) for x in (q, k, v))
    scores = q @ k.swapaxes(1, 2) / q.shape[2] ** 0.5
    weights = numpy.exp(scores - scores.max(-1, keepdims=True))
    return weights @ v / weights.sum(-1, keepdims=True), scores


def errors(q, k, v, reference, has_q, dtype, scales, seed):
    """The errors of out, of out with v as it is, of scores and of each row's largest score."""
    k8, k_scales, wide_k = quantised(k, dtype, scales, seed)
    v8, v_scales, _ = quantised(v, dtype, scales, None)
    descales = {"k_descale": k_scales, "v_descale": v_scales}
    if has_q:
        q8, descales["q_descale"], wide_q = quantised(q, dtype, "head" if scales == "block" else scales, seed)
    else:
        q8 = wide_q = q if seed is None else flashtune.rotate(q, seed)
    out = flashtune.attention_kvcache(q8, k8, v8, **descales)[0].swapaxes(0, 1).astype(float)
    made, scores = exact(wide_q, wide_k, v)
    largest = numpy.take_along_axis(scores - reference[1], reference[1].argmax(-1)[..., None], -1)
    wrong = (out - reference[0], made - reference[0], scores - reference[1], largest)
    return [numpy.sqrt(numpy.mean(x**2)) for x in wrong]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--head-dim", type=int, default=128, help="default 128")
    parser.add_argument("--keys", type=int, default=2048, help="queries and keys (default 2048)")
    parser.add_argument("--heads", type=int, default=8, help="heads (default 8)")
    parser.add_argument("--seed", type=int, default=1, help="of the tensors and of the rotation's signs (default 1)")
    arguments = parser.parse_args()
    print(f"| Values | 8 bits | {' | '.join(SCALES)} | out, v as it is | scores | largest scores |")
    print("|---" * (5 + len(SCALES)) + "|")
    shape = (1, arguments.keys, arguments.heads, arguments.head_dim)
    for kind in KINDS:
        q, k, v = tensors(numpy.random.default_rng(arguments.seed), kind, shape)
        reference = exact(q, k, v)
        for name, (has_q, dtype) in PASSES.items():
            cells, quotients = [], []
            for scales in SCALES:
                plain, rotated = (errors(q, k, v, reference, has_q, dtype, scales, seed) for seed in (None, arguments.seed))
                cells.append(f"{plain[0]:.4f}, {rotated[0]:.4f}, {plain[0] / rotated[0]:.2f}")
                quotients.append([f"{a / b:.2f}" for a, b in zip(plain[1:], rotated[1:])])
            cells += [", ".join(of_scales) for of_scales in zip(*quotients)]
            print(f"| {kind} | {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
