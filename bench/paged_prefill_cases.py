"""The problems of bench/paged_prefill.py: many queries over long keys in pages, as plain dicts in
suites. All are bf16 and causal, with the last query at the last key. The module knows neither torch
nor timing.

"chunks" are chunks of a prompt over the keys before them, "prompts" are whole prompts, and "wide"
has other head dims and MHA.
"""

PAGE_SIZES = (1, 8, 16, 64, 256)

# (batch, queries, keys, heads, heads_kv, head_dim)
SUITES = {
    "chunks": (
        (4, 2048, 16384, 32, 8, 128),
        (1, 512, 8192, 32, 8, 128),
        (1, 2048, 8192, 32, 8, 128),
        (2, 8192, 32768, 32, 8, 128),
        (8, 128, 8192, 32, 8, 128),
        (1, 64, 32768, 32, 8, 128),
    ),
    "prompts": ((1, 8192, 8192, 32, 8, 128), (8, 1024, 1024, 32, 8, 128), (2, 4096, 4096, 64, 8, 128)),
    "wide": ((4, 2048, 8192, 16, 16, 64), (4, 2048, 8192, 16, 8, 256), (4, 2048, 8192, 32, 8, 96)),
}
QUICK = 2  # problems of each suite with --quick


def cases(suite, quick):
    names = ("batch", "queries", "keys", "heads", "heads_kv", "head_dim")
    chosen = SUITES[suite][: QUICK if quick else None]
    return [dict(zip(names, sizes)) for sizes in chosen]


def page_sizes(text):
    """The sizes that a comma-separated list names, in its order. Raises ValueError with the first
    wrong one."""
    sizes = []
    for word in text.split(","):
        if not word.isdecimal() or not int(word):
            raise ValueError(f"page size {word!r} is not a positive integer")
        if int(word) not in sizes:
            sizes.append(int(word))
    return tuple(sizes)


def ratios(seconds, sizes):
    """For each page size that was timed: its time over the dense time, and the time of each peer
    with these pages over flashtune's."""
    found = {}
    for size in sizes:
        pages = f"page{size}"
        ours, dense = seconds.get(pages), seconds.get("flashtune")
        if ours and dense:
            found[f"{pages}/dense"] = ours / dense
        for name, rival in seconds.items():
            if ours and rival and name != pages and name.endswith(pages):
                found[f"{name}/{pages}"] = rival / ours
    return found


def label(case):
    heads = f"{case['heads']}/{case['heads_kv']}"
    return f"b{case['batch']} q{case['queries']} k{case['keys']} h{heads} d{case['head_dim']}"
