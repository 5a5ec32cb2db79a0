"""The problems of bench/mixed_batches.py: batches of prompt chunks and single tokens over pages, as
plain dicts in suites. All are bf16 and causal, with each sequence's last query at its last key. The
module knows neither torch nor timing.

"fixed" are batches of equal chunks. "mixes" are random batches that a seed chooses.
"""

import random

SUITES = ("fixed", "mixes")
MIXES = 10
QUICK = 2  # problems of each suite with --quick

# (chunks, queries of each, single tokens, keys of each sequence)
FIXED = ((8, 512, 56, 8192), (1, 2048, 127, 4096), (4, 128, 252, 2048), (16, 1024, 0, 4096), (0, 0, 64, 8192))


def fixed():
    for chunks, queries, tokens, keys in FIXED:
        yield dict(
            name=f"{chunks}x{queries} + {tokens}x1 over {keys}",
            queries=[queries] * chunks + [1] * tokens,
            keys=[keys] * (chunks + tokens),
            page_size=64,
            heads=32,
            heads_kv=8,
            head_dim=128,
        )


def mixes(seed):
    """Batches of up to 8192 queries in up to 12 chunks, and up to 200 single tokens."""
    draw = random.Random(seed)
    for number in range(MIXES):
        room, chunks = 8192, []
        for _ in range(draw.randint(1, 12)):
            queries = min(room, int(2 ** draw.uniform(5, 11.5)))
            if queries >= 17:
                chunks.append(queries)
                room -= queries
        longest = draw.choice((2048, 8192, 16384))
        lengths = [queries + int(draw.random() * longest) for queries in chunks]
        tokens = [1 + int(draw.random() * longest) for _ in range(int(2 ** draw.uniform(2, 7.6)))]
        heads, heads_kv, head_dim = draw.choice(((32, 8, 128), (32, 8, 128), (64, 8, 128), (16, 16, 64)))
        yield dict(
            name=f"mix {seed}.{number}: {len(chunks)} chunks of {sum(chunks)} + {len(tokens)}x1 over {longest}",
            queries=chunks + [1] * len(tokens),
            keys=lengths + tokens,
            page_size=draw.choice((16, 64)),
            heads=heads,
            heads_kv=heads_kv,
            head_dim=head_dim,
        )


def cases(suite, seed, quick):
    found = list(fixed() if suite == "fixed" else mixes(seed))
    return found[: QUICK if quick else None]


def chunks_of(case):
    """How many sequences have several queries; they come first."""
    return sum(queries > 1 for queries in case["queries"])


def ratio(seconds):
    """The time of one call over the sum of the two parts timed apart."""
    parts = [seconds[name] for name in ("prefill", "decode") if name in seconds]
    return seconds["one call"] / sum(parts) if parts and "one call" in seconds else None
