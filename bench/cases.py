"""The problems of bench/attention.py: plain dicts, grouped into suites. Tensors are (batch, seqlen,
heads, dim) in bf16.

It imports nothing, so that reports of stored results need neither a GPU nor PyTorch.
"""

TOKENS = 16384
WIDTH = 2048


def case(seqlen, heads, heads_kv, head_dim, causal, batch=None, dropout_p=0.0):
    return dict(
        batch=batch or TOKENS // seqlen,
        seqlen=seqlen,
        heads=heads,
        heads_kv=heads_kv,
        head_dim=head_dim,
        causal=causal,
        dropout_p=dropout_p,
    )


def suites(quick=False):
    """{suite: its cases}; `quick` keeps a few of each."""
    masks = (False, True)
    dims, lengths = ((64, 128, 256), (512, 1024, 2048, 4096, 8192, 16384))
    odd_dims = (32, 40, 72, 80, 96, 112, 160, 192, 224)
    gqa_lengths, gqa_dims = (2048, 8192), (64, 128)
    if quick:
        dims, lengths, odd_dims, gqa_lengths, gqa_dims = (64, 128), (1024, 4096), (40, 96), (2048,), (128,)
    return {
        "grid": [case(n, WIDTH // d, WIDTH // d, d, c) for d in dims for n in lengths for c in masks],
        "gqa": [case(n, 32, 4, d, c) for d in gqa_dims for n in gqa_lengths for c in masks],
        "heads": [case(4096, 16, 16, d, c, batch=4) for d in odd_dims for c in masks],
        "dropout": [case(4096, 16, 16, d, c, batch=4, dropout_p=0.1) for d in (64, 128) for c in masks],
    }


def work(pairs, head_dim, backward):
    """FLOP of `pairs` pairs of a query and a key: two for each multiply-add, in two products
    forward and five backward."""
    return (10 if backward else 4) * pairs * head_dim


def flops(case, backward):
    """FLOP of one pass of a case; a causal mask counts as half of all pairs."""
    pairs = case["batch"] * case["heads"] * case["seqlen"] ** 2
    return work(pairs / 2 if case["causal"] else pairs, case["head_dim"], backward)


def label(case):
    heads = str(case["heads"]) if case["heads"] == case["heads_kv"] else f"{case['heads']}/{case['heads_kv']}"
    mask = "causal" if case["causal"] else "full"
    return f"b{case['batch']} h{heads} s{case['seqlen']} d{case['head_dim']} {mask}"
