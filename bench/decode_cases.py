"""The problems of bench/decode.py: few queries against long K and V, as plain dicts in suites. "one" has a single query, as
in plain decoding; "several" has 4 or 16, as in speculative decoding, causal to the bottom right corner. All bf16."""

HEADS = ((32, 8, 128), (32, 32, 128), (64, 8, 128), (64, 8, 64), (16, 8, 256))
"""(heads, heads_kv, head_dim)"""

SUITES = ("one", "several")

# From here on K and V stream for so long (0.1 ms at 5 TB/s) that what a call costs at its ends hardly counts.
LARGE_BYTES = 512 << 20


def suites(quick, most_bytes):
    """Suite name to its cases, of those whose K and V together take no more than most_bytes."""
    one = dict(queries=(1,), batches=(1, 4, 16, 32, 64, 128), lengths=(1024, 8192, 32768, 131072), heads=HEADS)
    several = dict(queries=(4, 16), batches=(1, 16, 64), lengths=(1024, 8192, 32768), heads=HEADS)
    if quick:
        one.update(batches=(1, 32), lengths=(8192, 32768), heads=HEADS[:1] + HEADS[3:4])
        several.update(batches=(1, 16), lengths=(8192,), heads=HEADS[:1])
    return {
        name: [case for case in grid(**axes) if kv_bytes(case) <= most_bytes]
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
