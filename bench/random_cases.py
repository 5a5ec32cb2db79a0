"""Random problems as users have them, in five kinds, for bench/random_shapes.py. The module knows
neither torch nor timing.

- many: self-attention with many heads, 4k to 32k tokens.
- few: 1 to 4 heads and long sequences, so few tiles for a GPU.
- gqa: MQA and GQA with groups of 4 to 16 query heads.
- cross: 77 to 1500 keys under 300 to 9216 queries.
- short: many sequences of 49 to 256 tokens.
"""

import math

HEAD_DIMS = [64, 64, 128, 128, 128, 80, 96, 256, 192, 72, 40]
# The most elements of Q, or of K if it is longer: 1 GiB in bf16.
MOST_ELEMENTS = 1 << 29


def length(rng, low, high):
    """A length between two bounds, uniform in its logarithm."""
    return round(2 ** rng.uniform(math.log2(low), math.log2(high)))


def many(rng):
    heads, seqlen = rng.choice([8, 12, 16, 32]), length(rng, 256, 8192)
    return (max(1, min(16, length(rng, 4096, 32768) // seqlen)), heads, heads, seqlen, seqlen)


def few(rng):
    heads, seqlen = rng.choice([1, 2, 3, 4]), length(rng, 1024, 32768)
    return rng.choice([1, 1, 2]), heads, heads, seqlen, seqlen


def gqa(rng):
    heads_kv = rng.choice([1, 1, 2, 4, 8])
    heads, seqlen = heads_kv * rng.choice([4, 7, 8, 16]), length(rng, 256, 16384)
    return rng.choice([1, 1, 2, 4]), heads, heads_kv, seqlen, seqlen


def cross(rng):
    heads, seqlen = (rng.choice([5, 8, 10, 20]), rng.choice([300, 1024, 2304, 4096, 9216]))
    return (rng.choice([1, 2, 4]), heads, heads, seqlen, rng.choice([77, 154, 226, 512, 1500]))


def short(rng):
    heads, seqlen = rng.choice([3, 6, 12, 16]), rng.choice([49, 64, 77, 128, 197, 256])
    return rng.choice([32, 64, 128, 256]), heads, heads, seqlen, seqlen


KINDS = {"many": many, "few": few, "gqa": gqa, "cross": cross, "short": short}
# The share of problems with a causal mask.
CAUSAL = {"many": 0.6, "few": 0.6, "gqa": 0.6, "cross": 0.0, "short": 0.3}


def draw(rng, kind):
    """A problem of a kind, as a dict."""
    head_dim = rng.choice(HEAD_DIMS)
    batch, heads, heads_kv, seqlen_q, seqlen_k = KINDS[kind](rng)
    while batch > 1 and batch * heads * max(seqlen_q, seqlen_k) * head_dim > MOST_ELEMENTS:
        batch //= 2
    return dict(
        kind=kind, batch=batch, heads=heads, heads_kv=heads_kv, seqlen_q=seqlen_q, seqlen_k=seqlen_k, head_dim=head_dim,
        causal=rng.random() < CAUSAL[kind],
    )  # fmt: skip


def label(case):
    group = f"/{case['heads_kv']}" if case["heads"] != case["heads_kv"] else ""
    keys = f" k{case['seqlen_k']}" if case["seqlen_k"] != case["seqlen_q"] else ""
    mask = " causal" if case["causal"] else ""
    return f"b{case['batch']} h{case['heads']}{group} s{case['seqlen_q']}{keys} d{case['head_dim']}{mask}"
