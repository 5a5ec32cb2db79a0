"""Random problems as users have them, in five kinds, for bench/random_shapes.py, and a sixth kind
that has to be named. The module knows neither torch nor timing.

- many: self-attention with many heads, 4k to 32k tokens.
- few: 1 to 4 heads and long sequences, so few tiles for a GPU.
- gqa: MQA and GQA with groups of 4 to 16 query heads.
- cross: 77 to 1500 keys under 300 to 9216 queries.
- short: many sequences of 49 to 256 tokens.
- unusual: lengths, numbers of heads and head dims that the others lack, as `UNUSUAL` lists them. No
  bench draws this kind unless it is named, so that a seed's other problems stay the same.
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


def one_kv_head(rng):
    seqlen = length(rng, 150, 12000)
    return rng.choice([1, 2, 3]), rng.choice([3, 8, 12, 20]), 1, seqlen, seqlen


def one_head(rng):
    seqlen = length(rng, 200, 30000)
    return rng.choice([1, 2, 3]), 1, 1, seqlen, seqlen


def keys_77(rng):
    heads = rng.choice([1, 7, 10, 24])
    return rng.choice([1, 2, 3]), heads, heads, length(rng, 100, 8192), 77


def queries_3001(rng):
    heads = rng.choice([3, 9, 16])
    return rng.choice([1, 2, 3]), heads, heads, 3001, rng.choice([88, 1096, 3001, 7789])


def one_row(rng):
    heads_kv = rng.choice([1, 2, 8])
    return rng.choice([1, 3]), heads_kv * rng.choice([1, 4, 16]), heads_kv, 1, length(rng, 300, 30000)


def odd_heads(rng):
    heads, seqlen = rng.choice([3, 5, 14, 25]), length(rng, 40, 4000)
    return rng.choice([1, 3]), heads, heads, seqlen, seqlen


def tiny(rng):
    heads_kv, seqlen = rng.choice([1, 4, 11]), length(rng, 33, 500)
    return rng.choice([1, 2, 3]), heads_kv * rng.choice([1, 1, 5]), heads_kv, seqlen, seqlen


def long(rng):
    heads, seqlen = rng.choice([1, 2, 3]), length(rng, 8000, 30000)
    return rng.choice([1, 2]), heads, heads, seqlen, seqlen


UNUSUAL = [one_kv_head, one_head, keys_77, queries_3001, one_row, odd_heads, tiny, long]
UNUSUAL_HEAD_DIMS = [40, 48, 56, 64, 64, 72, 88, 96, 112, 128, 128, 136, 160, 192, 224, 256]


def unusual(rng):
    return rng.choice(UNUSUAL)(rng)


KINDS = {"many": many, "few": few, "gqa": gqa, "cross": cross, "short": short}
# All that a bench accepts; it draws KINDS unless others are named.
NAMED_KINDS = {**KINDS, "unusual": unusual}
# The share of problems with a causal mask.
CAUSAL = {"many": 0.6, "few": 0.6, "gqa": 0.6, "cross": 0.0, "short": 0.3, "unusual": 0.4}


def draw(rng, kind):
    """A problem of a kind, as a dict."""
    head_dim = rng.choice(UNUSUAL_HEAD_DIMS if kind == "unusual" else HEAD_DIMS)
    batch, heads, heads_kv, seqlen_q, seqlen_k = NAMED_KINDS[kind](rng)
    while batch > 1 and batch * heads * max(seqlen_q, seqlen_k) * head_dim > MOST_ELEMENTS:
        batch //= 2
    return dict(
        kind=kind, batch=batch, heads=heads, heads_kv=heads_kv, seqlen_q=seqlen_q, seqlen_k=seqlen_k, head_dim=head_dim,
        causal=rng.random() < CAUSAL[kind] and seqlen_q == seqlen_k,
    )  # fmt: skip


def label(case):
    group = f"/{case['heads_kv']}" if case["heads"] != case["heads_kv"] else ""
    keys = f" k{case['seqlen_k']}" if case["seqlen_k"] != case["seqlen_q"] else ""
    mask = " causal" if case["causal"] else ""
    return f"b{case['batch']} h{case['heads']}{group} s{case['seqlen_q']}{keys} d{case['head_dim']}{mask}"
