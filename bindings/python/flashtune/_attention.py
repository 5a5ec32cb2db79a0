"""The public calls, on NumPy arrays and torch tensors of (batch, seqlen, heads, dim).

The type of q selects the module that does the rest, `_numpy` or `_torch`. Neither array library is
imported here: the caller's array shows that its library is loaded.
"""

import sys
from collections.abc import Sequence

from . import _call, _features
from ._errors import InvalidArgumentError, UnsupportedError, shown


_FORWARD_ONLY = ("block_table", "cache_batch_idx", "leftpad_k", "q_descale", "k_descale", "v_descale", "int4_group")
"""The features that the backward pass lacks."""

_modules = {}
"""Modules that `module_of` has imported: an import statement takes ten times as long as a look-up."""


def module_of(q, name="q"):
    """`_torch` or `_numpy`, by the type of q; `name` is q's name in the error message."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(q, torch.Tensor):
        return _modules.get("_torch") or _imported_torch()
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(q, numpy.ndarray):
        return _modules.get("_numpy") or _imported_numpy()
    raise TypeError(f"{name} is a {type(q).__name__}; it must be a NumPy array or a torch tensor")


# torch.compile traces import statements, but in PyTorch 2.8 not importlib.
def _imported_torch():
    from . import _torch

    _modules["_torch"] = _torch
    return _torch


def _imported_numpy():
    from . import _numpy

    _modules["_numpy"] = _numpy
    return _numpy


def attention(
    q, k, v, *, causal=False, softmax_scale=None, dropout_p=0.0, seed=None, deterministic=False, return_lse=False,
    window=None, softcap=0.0, alibi_slopes=None, bias=None, mask=None, sinks=None, mask_bits=None,
    block_mask=None, batch_invariant=False, q_descale=None, k_descale=None, v_descale=None,
):  # fmt: skip
    """softmax(q k^T * softmax_scale) v, exactly.

    q is (batch, seqlen_q, heads_q, dim), k (batch, seqlen_k, heads_kv, dim) and v (batch, seqlen_k,
    heads_kv, dim_v); heads_q must be a multiple of heads_kv. Views are used in place if their last
    dim is contiguous. Torch tensors that require gradients get them. A double backward pass is
    refused.

    causal: False, True, "bottom-right" or "top-left". True and "bottom-right" let the last query
        see the last key; "top-left" lets the first query see only the first key.
    softmax_scale: None means 1/sqrt(dim). Its magnitude must be from 2**-100 to 2**100.
    dropout_p: the probability of dropping a weight, in [0, 1), rounded to a multiple of 1/65536.
        The mask depends only on the seed and on each score's position; the C header defines it at
        dropout_seed.
    seed: an int, a pair (seed, offset), or for torch an int64 tensor (seed, offset) on q's device,
        which the kernels read when they run. None draws a seed from torch's default generator of
        the device, or from NumPy's global generator.
    deterministic: True makes gradients bit-equal from run to run, which costs time. The output is
        always deterministic.
    return_lse: True returns (out, lse). lse is fp32 (batch, heads_q, seqlen_q), in natural log, and
        carries a gradient.

    window: (left, right), the numbers of keys before and after its diagonal that a query sees. None
        or -1 means all keys of that side. The diagonal is causal's, or the bottom-right one without
        causal. With causal, right must be 0 or None.
    softcap: each score s becomes softcap * tanh(s / softcap) before anything is added. 0 means no
        cap; other values must be from 2**-100 to 2**100.
    alibi_slopes: fp32 (heads_q) or (batch, heads_q). Adds -slope * |i + seqlen_k - seqlen_q - j| to
        the scores. It gets no gradient.
    bias: added to the scores; of q's dtype, or bfloat16 with q in float8_e4m3fn; broadcast to
        (batch, heads_q, seqlen_q, seqlen_k). Its gradient takes as much memory as the bias has in
        fp32. With deterministic, a bias that requires a gradient must not be broadcast.
    mask: bool or uint8, broadcast like bias. False or 0 hides a key.
    sinks: (heads_q), a score of each head that belongs to no key. It takes its share of the softmax
        and is part of lse. fp32; for torch any floating point dtype.
    mask_bits: replaces mask by one bit a score: uint8 (..., ceil(seqlen_k / 8)), where the leading
        dims broadcast. The lowest bit of a byte is its first key, as in
        numpy.packbits(mask, axis=-1, bitorder="little").
    block_mask: the blocks of scores that count, from `flashtune.block_mask` or as a FlexAttention
        BlockMask. mask_mod is not called: causal, window and mask hide keys within a block. Full
        blocks skip the mask. Time is proportional to the number of blocks. Not supported on a GPU
        with deterministic.
    batch_invariant: True gives each query the same output bits in any call: in a prefill at once,
        in chunks and while decoding, alone and in any batch. It costs time. The C header lists the
        conditions at batch_invariant. Gradients are not covered, and dropout is refused.
    q_descale, k_descale, v_descale: the scales of 8-bit tensors, as `attention_kvcache` takes them.
        Such a call has no gradient.
    """
    opts = _call.options(causal, softmax_scale, dropout_p, deterministic, batch_invariant)
    features = _features.of(
        window=window, softcap=softcap, alibi_slopes=alibi_slopes, bias=bias, mask=mask, sinks=sinks, mask_bits=mask_bits,
        block_mask=block_mask, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale,
    )  # fmt: skip
    return module_of(q).attention(q, k, v, opts, seed, _call.flag("return_lse", return_lse), features)


def attention_varlen(
    q, k, v, *, cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None, seqused_k=None, max_seqlen_q=None, max_seqlen_k=None,
    causal=False, softmax_scale=None, dropout_p=0.0, seed=None, deterministic=False, return_lse=False,
    window=None, softcap=0.0, alibi_slopes=None, bias=None, mask=None, sinks=None, mask_bits=None,
    batch_invariant=False, q_descale=None, k_descale=None, v_descale=None,
):  # fmt: skip
    """`attention` for sequences of different lengths.

    Each result equals that of the sequence alone. The other arguments are those of `attention`.

    cu_seqlens_q: int32 (batch + 1) on q's device, from 0 and not decreasing. q is then
        (total_q, heads_q, dim), and sequence b has its rows cu_seqlens_q[b] to cu_seqlens_q[b + 1].
        out and its gradients have the same layout, and lse is (heads_q, total_q). torch leaves rows
        after the last sequence unset. None: q is (batch, seqlen_q, heads_q, dim).
    cu_seqlens_k: the same for k and v.
    seqused_q, seqused_k: int32 (batch), the number of used rows of each sequence, from its first
        row on. None: all rows. In unused rows out and gradients are 0 and lse is -infinity.
    max_seqlen_q, max_seqlen_k: with cu_seqlens, upper bounds of the lengths. None takes the longest
        sequence, if the host can read the lengths. bias and mask broadcast to (batch, heads_q,
        max_seqlen_q, max_seqlen_k), and mask_bits likewise.
    q_descale, k_descale, v_descale: as in `attention`. With cu_seqlens_k, (total_k, heads_kv) has a
        scale for each key of k or v. Where total_k is the batch size, that shape has the scales of
        sequences, and (1, total_k, heads_kv) those of keys.
    """
    opts = _call.options(causal, softmax_scale, dropout_p, deterministic, batch_invariant)
    features = _features.of(
        window=window, softcap=softcap, alibi_slopes=alibi_slopes, bias=bias, mask=mask, sinks=sinks, mask_bits=mask_bits,
        cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, seqused_q=seqused_q, seqused_k=seqused_k,
        max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale,
    )  # fmt: skip
    return module_of(q).attention(q, k, v, opts, seed, _call.flag("return_lse", return_lse), features)


def attention_forward(
    q, k, v, *, causal=False, softmax_scale=None, dropout_p=0.0, seed=None, batch_invariant=False, **features
):
    """(out, lse), without autograd. Dropout needs a seed, which the backward pass needs too.

    features: the keyword arguments of `attention_varlen` from cu_seqlens_q on and from window on,
    block_table, cache_batch_idx, leftpad_k, num_splits, the descales and int4_group of
    `attention_kvcache`, and block_mask of `attention`.
    """
    _need_seed(dropout_p, seed)
    opts = _call.options(causal, softmax_scale, dropout_p, False, batch_invariant)
    return module_of(q).attention_forward(q, k, v, opts, seed, features_of(features))


def attention_kvcache(
    q, k_cache, v_cache, *, block_table=None, seqused_k=None, max_seqlen_k=None, cache_batch_idx=None,
    leftpad_k=None, num_splits=0, cu_seqlens_q=None, seqused_q=None, max_seqlen_q=None, causal=False, softmax_scale=None, return_lse=False,
    window=None, softcap=0.0, alibi_slopes=None, bias=None, mask=None, sinks=None, mask_bits=None,
    batch_invariant=False, q_descale=None, k_descale=None, v_descale=None, int4_group=None,
):  # fmt: skip
    """`attention_varlen` over a K/V cache, without autograd; made for few queries over many keys.

    The other arguments are those of `attention_varlen`.

    k_cache, v_cache: (batch, max_seqlen, heads_kv, dim), of which each sequence uses its first
        seqused_k keys. With block_table: (num_pages, page_size, heads_kv, dim).
    block_table: int32 (batch, pages) on q's device. Page block_table[b, i] holds the keys of
        sequence b from i * page_size on. Entries past a sequence's length are not read. Other
        entries must name a page: the CPU refuses invalid ones, and a GPU reads the last page
        instead.
    max_seqlen_k: only with block_table: an upper bound of the lengths, which the launch is laid out
        for. None: the number of keys that a row of block_table holds.
    cache_batch_idx: int32 (batch) on q's device: the entry of k_cache and v_cache that holds each
        sequence's keys. The caches then have any number of entries. The CPU refuses an invalid
        entry, and a GPU reads the last one instead. Not with block_table.
    leftpad_k: int32 (batch) on q's device: the rows before each sequence's first key. seqused_k
        counts them too. causal, window, alibi_slopes, bias and mask count from the first key. The
        CPU refuses a number above seqused_k. Not with block_table.
    num_splits: 0 leaves to the config into how many parts the keys are split over CTAs. Otherwise
        the most parts. It must be 0 with batch_invariant.
    q_descale, k_descale, v_descale: with tensors of 8 bits, the fp32 scales of their elements.
        k_cache and v_cache may be float8_e4m3fn, float8_e5m2 or int8, and q too may be
        float8_e4m3fn, which gives a bfloat16 result. A number is one scale for the tensor; None is
        1. (batch, heads_kv) has one for each sequence and head, (batch, ceil(max_seqlen_k / 128),
        heads_kv) one for each 128 keys of a sequence, and the cache's shape without dim one for
        each key; the last two are for k and v alone. Where both shapes are equal, each key has its
        own. Sizes of 1 are shared. The CPU refuses scales that are not finite and above 0.
    int4_group: 32 or 64: k_cache and v_cache are uint8 and hold rows of int4, in which so many
        neighbouring columns share a scale and a zero. Their last dim is int4_row_bytes(dim,
        int4_group), and `kv_append` writes them. q is float16 or bfloat16.
    """
    opts = _call.options(causal, softmax_scale, 0.0, False, batch_invariant)
    return_lse = _call.flag("return_lse", return_lse)
    features = _features.of(
        window=window, softcap=softcap, alibi_slopes=alibi_slopes, bias=bias, mask=mask, sinks=sinks, mask_bits=mask_bits,
        cu_seqlens_q=cu_seqlens_q, seqused_q=seqused_q, seqused_k=seqused_k, max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k, block_table=block_table, cache_batch_idx=cache_batch_idx, leftpad_k=leftpad_k,
        num_splits=num_splits, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale, int4_group=int4_group,
    )  # fmt: skip
    out, lse = module_of(q).attention_forward(q, k_cache, v_cache, opts, None, features, want_lse=return_lse)
    return (out, lse) if return_lse else out


def merge(outs, lses, *, dtype=None):
    """(out, lse) of attention over all keys, from results over parts of them; without autograd.

    Each part is weighted by its lse.

    outs: a sequence or a stack of outputs, each (batch, seqlen, heads, dim), or (total, heads, dim)
        for packed sequences.
    lses: likewise, each (batch, heads, seqlen), or (heads, total) for packed sequences.
    dtype: the dtype of out. None: the dtype of outs, which may also be fp32.
    """
    for name, given in (("outs", outs), ("lses", lses)):
        if not hasattr(given, "shape") and not (isinstance(given, Sequence) and len(given)):
            raise InvalidArgumentError(f"{name} is {shown(given)}; it must be a sequence of at least one array, or a stack")
    first = outs if hasattr(outs, "shape") else outs[0]
    return module_of(first, "outs").merge(outs, lses, dtype)


def kv_append(
    k_cache, v_cache, k, v, cache_seqlens, *, block_table=None, cache_batch_idx=None, seqused_new=None, in_place=False,
    rotary_cos=None, rotary_sin=None, rotary_interleaved=True, q=None, q_at_one_position=False,
    k_descale=None, v_descale=None, computes_descale=False, int4_group=None,
):  # fmt: skip
    """Appends k and v to a K/V cache and returns the new lengths, int32 (batch).

    With q the result is (lengths, rotated q).

    k_cache, v_cache, block_table, cache_batch_idx: as `attention_kvcache` takes them. The caches
        are written.
    k, v: (batch, seqlen_new, heads_kv, dim), written behind the keys that each sequence has.
    cache_seqlens: the number of keys that each sequence has, an int or int32 (batch).
    seqused_new: int32 (batch): how many of its seqlen_new keys each sequence appends. 0 leaves its
        cache and its length as they are. None: all.
    in_place: True writes the new lengths into cache_seqlens, a contiguous tensor, and returns it. A
        captured graph then needs no second array.
    rotary_cos, rotary_sin: (rows, rotary_dim / 2), in k's dtype or fp32, with a row for each key
        that the cache has room for. The first rotary_dim columns of k, and of q, turn by the angles
        of their positions. The new key at row r of its sequence has position r.
    rotary_interleaved: True turns columns 2i and 2i + 1 together, False i and i + rotary_dim / 2.
    q: (batch, seqlen_q, heads_q, dim), rotated in the same launch. Its query i has position
        cache_seqlens + i, or cache_seqlens with q_at_one_position.
    k_descale, v_descale: with caches of 8 bits (float8_e4m3fn, float8_e5m2, int8) beside k and v of
        16 bits, the fp32 scales of the caches' elements: a number, (batch, heads_kv), or the
        cache's shape without dim. None is 1.
    computes_descale: True computes the scale of each new key and head from its largest magnitude
        and writes it into k_descale and v_descale, which have the cache's shape without dim.
    int4_group: 32 or 64: the caches are uint8 and get rows of int4, as `attention_kvcache` takes
        them, with the scales and zeros of the new rows.

    Wrong arguments that the host can see are refused before anything is written. The host does not
    read lengths and tables on a GPU. There a sequence gets no keys if its length is negative, or if
    there is no room or no page for the new ones.
    """
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(k_cache, torch.Tensor):
        module_of(k_cache, "k_cache")  # refuses what is no array either
        from . import _numpy_append

        return _numpy_append.append(
            k_cache, v_cache, k, v, cache_seqlens, block_table, cache_batch_idx, seqused_new, in_place, rotary_cos, rotary_sin,
            rotary_interleaved, q, q_at_one_position, k_descale, v_descale, computes_descale, int4_group,
        )  # fmt: skip
    from . import _kvcache

    rotary = _kvcache.rotary_of(rotary_cos, rotary_sin, rotary_interleaved, q_at_one_position)
    descales = _kvcache.Descales(k_descale, v_descale, computes_descale, int4_group)
    return _kvcache.append(
        k_cache, v_cache, k, v, cache_seqlens, block_table, cache_batch_idx, seqused_new, in_place, rotary, q, descales
    )  # fmt: skip


def quantize(x, dtype, *, descale=None, keys_per_descale=0, heads_per_descale=1, rotation_seed=None):
    """(numbers, scales): x divided by its scales and rounded to 8 bits, without autograd.

    x: float16 or bfloat16, (batch, seqlen, heads, dim).
    dtype: float8_e4m3fn, float8_e5m2 or int8, of torch or of ml_dtypes and NumPy.
    descale: the fp32 scales, a number or an array of the shape below. None computes each as
        the largest magnitude of its elements over the largest number of dtype, or 1 for zeros.
    keys_per_descale: 0: all rows of a batch entry share a scale, and the shape is (batch, heads).
        1 or 128: so many rows share one: (batch, ceil(seqlen / keys_per_descale), heads).
    heads_per_descale: neighbouring heads that share a scale. For q it is heads_q / heads_kv, which
        gives the q_descale that `attention_forward` takes.
    rotation_seed: an int rotates the rows before, as `rotate` does. None does not.

    Numbers beyond the largest become the largest, infinities too, and NaN stays NaN (0 in int8).
    """
    return module_of(x, "x").quantize(x, dtype, descale, keys_per_descale, heads_per_descale, rotation_seed)


def rotate(x, seed):
    """x with each row rotated by a Hadamard matrix and random signs, without autograd.

    The result has x's dtype. q and k rotated by the same seed have the same q k^T, up to rounding.
    Outliers spread over the columns of their row, which mostly lowers the error of 8 bits. v is not
    rotated.

    x: float16 or bfloat16, (batch, seqlen, heads, dim), with a dim that is a multiple of 8.
    seed: an int from 0 to 2**64 - 1. FLASHTUNE_ROTATION_HADAMARD in flashtune.h has the formula.
    """
    return module_of(x, "x").rotate(x, seed)


def attention_fp8(
    q, k, v, *, causal=False, softmax_scale=None, window=None, softcap=0.0, sinks=None, rotation_seed=None
):
    """`attention` of torch tensors with an fp8 forward pass and a 16-bit backward pass.

    The forward pass quantises q, k and v to float8_e4m3fn, with a scale for each batch entry and
    KV head. The backward pass reads q, k and v themselves, with out and the lse of the fp8 pass. On
    normal values the norm of the error is 4 to 6 % of out's and 1 to 4 % of the gradients'. sinks
    get a gradient too.

    rotation_seed: an int rotates q and k before they are quantised, as `rotate` does, which mostly
        lowers the error where they have outliers. None does not.
    """
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(q, torch.Tensor):
        raise TypeError(f"q is a {type(q).__name__}; it must be a torch tensor")
    from . import _torch_fp8

    opts = _call.options(causal, softmax_scale, 0.0)
    features = _features.of(window=window, softcap=softcap, sinks=sinks)
    return _torch_fp8.attention(q, k, v, opts, _features.Features() if features is None else features, rotation_seed)


def attention_backward(
    dout, q, k, v, out, lse, *, causal=False, softmax_scale=None, dropout_p=0.0, seed=None, deterministic=False,
    dlse=None, need_dbias=True, **features,
):  # fmt: skip
    """(dq, dk, dv) from the inputs and results of `attention_forward`.

    The keyword arguments must be the same, without batch_invariant. With bias or sinks the result
    is (dq, dk, dv, dbias, dsinks). dbias and dsinks are fp32, or None without such an input.

    deterministic: True makes the gradients bit-equal from run to run, which costs time.
    dlse: the gradient of lse, in its shape; None if nothing depends on lse.
    need_dbias: False skips the gradient of the bias.
    """
    _need_seed(dropout_p, seed)
    opts = _call.options(causal, softmax_scale, dropout_p, deterministic)
    features, need_dbias = features_of(features), _call.flag("need_dbias", need_dbias)
    refuse_forward_only(features)
    gradients = module_of(q).attention_backward(dout, q, k, v, out, lse, opts, seed, features, dlse, need_dbias)
    has_more = features is not None and (features.bias is not None or features.sinks is not None)
    return gradients if has_more else gradients[:3]


def refuse_forward_only(features):
    """Refuses features that the backward pass lacks."""
    reason = forward_only(features)
    if reason is not None:
        raise UnsupportedError(reason)


def forward_only(features):
    """Why the backward pass lacks these features, or None."""
    for name in _FORWARD_ONLY if features is not None else ():
        if getattr(features, name) is not None:
            return f"{name} is given; the backward pass has neither caches nor quantised tensors"
    return None


def features_of(keywords):
    """The features from keyword arguments."""
    if not keywords:
        return None
    unknown = keywords.keys() - set(_features.Features._fields)
    if unknown:
        raise TypeError(f"unexpected keyword argument {min(unknown)!r}")
    return _features.of(**keywords)


def _need_seed(dropout_p, seed):
    if dropout_p and seed is None:
        raise InvalidArgumentError("seed is None; dropout needs the same seed in both passes")
