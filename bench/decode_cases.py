"""The problems of bench/decode.py: few queries over long K and V, as plain dicts in suites. All are
bf16.

"one" has a single query, as in plain decoding. "several" has 4 or 16 queries, as in speculative
decoding, under a causal mask aligned to the bottom right corner.
"""

# (heads, heads_kv, head_dim)
HEADS = ((32, 8, 128), (32, 32, 128), (64, 8, 128), (64, 8, 64), (16, 8, 256))

SUITES = ("one", "several")

# Reading K and V of this size takes 0.1 ms at 5 TB/s, which hides most of a call's fixed costs.
LARGE_BYTES = 512 << 20


def suites(quick, max_kv_bytes):
    """{suite: its cases} whose K and V together have at most max_kv_bytes."""
    one = dict(queries=(1,), batches=(1, 4, 16, 32, 64, 128), lengths=(1024, 8192, 32768, 131072), heads=HEADS)
    several = dict(queries=(4, 16), batches=(1, 16, 64), lengths=(1024, 8192, 32768), heads=HEADS)
    if quick:
        one.update(batches=(1, 32), lengths=(8192, 32768), heads=HEADS[:1] + HEADS[3:4])
        several.update(batches=(1, 16), lengths=(8192,), heads=HEADS[:1])
    return {
        name: [case for case in grid(**axes) if kv_bytes(case) <= max_kv_bytes]
        for name, axes in {"one": one, "several": several}.items()
    }


def grid(queries, batches, lengths, heads):
    return [
        dict(batch=batch, queries=count, keys=keys, heads=heads_q, heads_kv=heads_kv, head_dim=head_dim)
        for heads_q, heads_kv, head_dim in heads
        for count in queries
        for batch in batches
        for keys in lengths
    ]


def kv_bytes(case):
    return case["batch"] * case["keys"] * case["heads_kv"] * case["head_dim"] * 2 * 2


def label(case):
    heads = f"{case['heads']}/{case['heads_kv']}"
    return f"b{case['batch']} q{case['queries']} k{case['keys']} h{heads} d{case['head_dim']}"
