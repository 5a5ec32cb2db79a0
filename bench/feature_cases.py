"""The problems of bench/features.py: suites of (name, a function that makes the calls to compare).

The first call of each problem is the one that the others are compared with. Tensors are made when a
problem starts, and are bf16 unless a suite says otherwise.
"""

import functools
import itertools
import random
from typing import Any, NamedTuple

import flashtune
import peers
import torch

WIDTH = 2048
MEAN_LENGTH = 2048
# In elements: 8 bytes, half of the alignment that TMA needs.
PADDING = 4
# The dense batch's length is a multiple of this, so that its tiles are full.
DENSE_STEP = 128


class Variant(NamedTuple):
    name: str
    qkv: tuple
    # Keyword arguments of flashtune.attention_varlen, or of flashtune.attention for a block mask.
    options: dict
    # Visible pairs of a query and a key, over all heads and sequences.
    pairs: int
    # A function to call with these arguments instead of flashtune's; None for flashtune's.
    rival: Any = None


def inputs(*shape, dtype=torch.bfloat16):
    return random_tensors(shape, shape, shape, dtype=dtype)


def random_tensors(*shapes, dtype=torch.bfloat16):
    generator = torch.Generator("cuda").manual_seed(shapes[0][-1])
    options = dict(device="cuda", dtype=dtype, generator=generator, requires_grad=True)
    return tuple(torch.randn(shape, **options) for shape in shapes)


def unaligned(*shape):
    """Views whose start, and every other head's rows, lie between two multiples of 16 bytes. TMA
    cannot load them, so the sm80 kernels run."""
    wider = inputs(*shape[:-1], shape[-1] + PADDING)
    return tuple(x.detach()[..., PADDING:].requires_grad_() for x in wider)


def pairs(seqlen, causal, window_left=None):
    """Visible pairs of one head and one sequence. window_left, which needs causal, is how many
    earlier keys a query sees."""
    if not causal:
        return seqlen**2
    left = seqlen - 1 if window_left is None else min(window_left, seqlen - 1)
    # The first left + 1 queries see 1, 2, … keys, the others left + 1.
    return (left + 1) * (left + 2) // 2 + (seqlen - left - 1) * (left + 1)


def window(quick):
    seqlen, heads = 16384, 16

    def make():
        qkv = inputs(1, seqlen, heads, 128)
        variants = [Variant("causal", qkv, dict(causal=True), heads * pairs(seqlen, True))]
        for left in (256,) if quick else (256, 1024, 4096):
            options = dict(causal=True, window=(left, 0))
            variants.append(Variant(f"window {left}", qkv, options, heads * pairs(seqlen, True, left)))
        return variants

    yield f"b1 h{heads} s{seqlen} d128", make


def varlen(quick):
    axes = ((128,), (8,), (True,)) if quick else ((64, 128), (8, 16), (False, True))
    for head_dim, sequences, causal in itertools.product(*axes):
        mask = "causal" if causal else "full"
        name = f"{sequences} x {MEAN_LENGTH} h{WIDTH // head_dim} d{head_dim} {mask}"
        yield name, functools.partial(ragged_and_dense, head_dim, sequences, causal)


def ragged_and_dense(head_dim, sequences, causal):
    heads = WIDTH // head_dim
    lengths = ragged_lengths(sequences)
    cu_seqlens = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device="cuda")
    options = dict(causal=causal, cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens)
    options.update(max_seqlen_q=max(lengths), max_seqlen_k=max(lengths))
    # FLOP grow with the square of a length.
    root_mean_square = (sum(length**2 for length in lengths) / sequences) ** 0.5
    seqlen = round(root_mean_square / DENSE_STEP) * DENSE_STEP
    dense_pairs = heads * sequences * pairs(seqlen, causal)
    ragged_pairs = heads * sum(pairs(length, causal) for length in lengths)
    return [
        Variant("dense", inputs(sequences, seqlen, heads, head_dim), dict(causal=causal), dense_pairs),
        Variant("ragged", inputs(sum(lengths), heads, head_dim), options, ragged_pairs),
    ]


def ragged_lengths(sequences):
    """Lengths drawn uniformly from 1 to twice the mean, in pairs that add up to twice the mean,
    so that the mean is exact."""
    draw = random.Random(sequences)
    halves = [draw.randint(1, 2 * MEAN_LENGTH - 1) for _ in range(sequences // 2)]
    lengths = [length for half in halves for length in (half, 2 * MEAN_LENGTH - half)]
    draw.shuffle(lengths)
    return lengths


def scores(quick):
    batch, seqlen, heads = 4, 4096, 16

    def make():
        qkv, visible = inputs(batch, seqlen, heads, 128), batch * heads * pairs(seqlen, True)
        features = score_features(batch, seqlen, heads)
        if quick:
            features = {name: features[name] for name in ("softcap", "bias")}
        # Pairs that the mask hides count as visible: kernels do not skip single pairs.
        options = {"plain": {}, **features}
        return [Variant(name, qkv, dict(causal=True, **extra), visible) for name, extra in options.items()]

    yield f"b{batch} h{heads} s{seqlen} d128 causal", make


def score_features(batch, seqlen, heads):
    """{name: keyword arguments}. Each head has its bias, each sequence its mask, which hides a
    tenth of all pairs."""
    generator = torch.Generator("cuda").manual_seed(seqlen)
    slopes = [2 ** (-8 * (head + 1) / heads) for head in range(heads)]
    bias = torch.randn(1, heads, seqlen, seqlen, device="cuda", dtype=torch.bfloat16, generator=generator)
    mask = torch.rand(batch, 1, seqlen, seqlen, device="cuda", generator=generator) > 0.1
    return {
        "softcap": dict(softcap=30.0),
        "alibi": dict(alibi_slopes=torch.tensor(slopes, device="cuda")),
        "bias": dict(bias=bias),
        "bias, learnt": dict(bias=bias.clone().requires_grad_()),
        "mask": dict(mask=mask),
        "sinks": dict(sinks=torch.randn(heads, device="cuda", generator=generator).requires_grad_()),
    }


def deterministic(quick, make_inputs=inputs):
    tokens = 16384
    axes = ((128,), (True,), (4096,)) if quick else ((64, 128, 256), (False, True), (1024, 4096, tokens))
    for head_dim, causal, seqlen in itertools.product(*axes):
        batch, heads = tokens // seqlen, WIDTH // head_dim
        visible = batch * heads * pairs(seqlen, causal)

        def make(shape=(batch, seqlen, heads, head_dim), causal=causal, visible=visible):
            qkv = make_inputs(*shape)
            options = {"default": {}, "deterministic": dict(deterministic=True)}
            return [Variant(name, qkv, dict(causal=causal, **extra), visible) for name, extra in options.items()]

        yield f"b{batch} h{heads} s{seqlen} d{head_dim} {'causal' if causal else 'full'}", make


def batch_invariant(quick):
    # (batch, heads, heads_kv, seqlen_q, seqlen_k, head_dim)
    prefill = [
        (8, 16, 16, 2048, 2048, 128),
        (1, 32, 8, 8192, 8192, 128),
        (8, 32, 32, 2048, 2048, 64),
        (1, 32, 8, 2048, 16384, 128),
        (2, 16, 16, 4096, 4096, 256),
    ]
    # Long enough for GPU time to exceed the host's.
    decoding = [(batch, 32, 8, 1, keys, 128) for batch, keys in ((1, 131072), (4, 32768), (32, 8192), (64, 8192))]
    decoding += [(16, 32, 8, 1, 8192, 64), (16, 64, 8, 4, 8192, 128)]
    for batch, heads, heads_kv, seqlen_q, seqlen_k, head_dim in (prefill + decoding)[:: 4 if quick else 1]:
        causal = seqlen_q > 1
        seen = pairs(seqlen_k, True) - pairs(seqlen_k - seqlen_q, True)
        visible = batch * heads * (seen if causal else seqlen_q * seqlen_k)
        q, k = (batch, seqlen_q, heads, head_dim), (batch, seqlen_k, heads_kv, head_dim)

        def make(q=q, k=k, causal=causal, visible=visible):
            qkv = random_tensors(q, k, k)
            options = {"default": {}, "batch-invariant": dict(batch_invariant=True)}
            return [Variant(name, qkv, dict(causal=causal, **extra), visible) for name, extra in options.items()]

        name = f"b{batch} q{seqlen_q} k{seqlen_k} h{heads}/{heads_kv} d{head_dim} {'causal' if causal else 'full'}"
        yield name, make


def fp32(quick):
    """bf16, fp32, and PyTorch's fp32 attention, its memory-efficient kernels."""
    efficient = functools.partial(peers.sdpa("efficient"), dropout_p=0.0)
    for head_dim, causal in itertools.product((64,) if quick else (64, 128), (False, True)):
        batch, seqlen, heads = 4, 4096, WIDTH // head_dim
        visible = batch * heads * pairs(seqlen, causal)

        def make(shape=(batch, seqlen, heads, head_dim), causal=causal, visible=visible):
            halves, floats = inputs(*shape), inputs(*shape, dtype=torch.float32)
            return [
                Variant("bf16", halves, dict(causal=causal), visible),
                Variant("fp32", floats, dict(causal=causal), visible),
                Variant("efficient", floats, dict(causal=causal), visible, efficient),
            ]

        yield f"b{batch} h{heads} s{seqlen} d{head_dim} {'causal' if causal else 'full'}", make


BLOCK = 128


def blocks(quick):
    seqlen, heads = 16384, 16
    for head_dim in (128,) if quick else (128, 64):
        yield f"b1 h{heads} s{seqlen} d{head_dim}", functools.partial(listed_and_dense, seqlen, heads, head_dim, quick)


def listed_and_dense(seqlen, heads, head_dim, quick):
    """Random full blocks, equally many in each row and the same for all heads; FlexAttention
    with the same mask where this PyTorch has it."""
    qkv, rows = inputs(1, seqlen, heads, head_dim), seqlen // BLOCK
    generator = torch.Generator("cuda").manual_seed(seqlen)
    order = torch.rand(1, 1, rows, rows, device="cuda", generator=generator).argsort(-1)
    variants = [Variant("dense", qkv, {}, heads * pairs(seqlen, False))]
    flex = flex_attention()
    for percent in (10,) if quick else (50, 25, 10, 5):
        kept = max(1, round(rows * percent / 100))
        full = order < kept
        visible = heads * rows * kept * BLOCK**2
        mask = flashtune.block_mask(torch.zeros_like(full), full, block_size=BLOCK)
        variants.append(Variant(f"{percent} %", qkv, dict(block_mask=mask), visible))
        if flex:
            variants.append(Variant(f"{percent} % flex", qkv, dict(block_mask=flex_mask(mask)), visible, flex))
    return variants


def flex_attention():
    """Compiled FlexAttention on (batch, seqlen, heads, dim) tensors; None where this PyTorch has
    none."""
    try:
        from torch.nn.attention.flex_attention import flex_attention
    except ImportError:
        return None
    compiled = torch.compile(flex_attention, dynamic=False)

    def attend(q, k, v, block_mask):
        return compiled(*(x.transpose(1, 2) for x in (q, k, v)), block_mask=block_mask).transpose(1, 2)

    return attend


def flex_mask(mask):
    from torch.nn.attention.flex_attention import BlockMask

    lists = (mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices)
    return BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=BLOCK)


SUITES = {
    "window": window,
    "varlen": varlen,
    "scores": scores,
    "deterministic": deterministic,
    "deterministic-sm80": functools.partial(deterministic, make_inputs=unaligned),
    "batch-invariant": batch_invariant,
    "fp32": fp32,
    "blocks": blocks,
}
