"""The flash-attn 2.8 functions for training, prefill and decoding.

Names, arguments and defaults are those of flash-attn, so its users change one import:
    from flashtune.flash_attn_interface import flash_attn_func
An argument that flashtune does not support yet raises NotImplementedError with the argument's name.
No argument is ignored.
"""

import operator

import torch
from torch.autograd import forward_ad

from . import _attention, _call, _features, _kvcache, _torch, _torch_autograd, _torch_drafts, _torch_launch, _torch_recorded
from ._errors import InvalidArgumentError, UnsupportedError, shown
from ._torch_arguments import is_observed
from ._torch_drafts import CACHED, DENSE, FORWARD, PACKED

_FLOAT32 = torch.float32

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]


def flash_attn_func(
    q,
    k,
    v,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
    q_descale=None,
    k_descale=None,
    v_descale=None,
):
    """Attention of q (batch, seqlen, heads, dim) over k and v (batch, seqlen_k, heads_kv, dim).

    causal aligns the mask to the bottom right corner. window_size is (left, right) in keys, where
    -1 means all keys on that side; causal hides the keys after the diagonal whatever `right` is.
    alibi_slopes is fp32 (heads) or (batch, heads). deterministic gives the gradients the same bits
    in every run. return_attn_probs returns (out, softmax_lse, None): flashtune never forms the
    matrix of probabilities, which flash-attn returns for its own tests.

    k and v may have 8 bits (float8_e4m3fn, float8_e5m2, int8), and q too may be float8_e4m3fn,
    which gives a bfloat16 result. The descales are their fp32 factors, as FlashAttention-3 names
    them: (batch, heads_kv), or as `flashtune.attention_kvcache` takes them. Such a call has no
    gradient.
    """
    options = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    descales = q_descale, k_descale, v_descale
    call = DENSE, None, None, q, k, v, *options, descales
    repeated = _repeat(call, return_attn_probs, options, None, descales)
    if repeated is not None:
        return repeated
    _expect_tensors(q=q, k=k, v=v)
    return _attend(q, k, v, options, descales=descales, call=call)


def flash_attn_kvpacked_func(
    q,
    kv,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
):
    """`flash_attn_func` with k and v in one tensor, (batch, seqlen_k, 2, heads_kv, dim).

    Their gradients have the same layout.
    """
    _expect_tensors(q=q, kv=kv)
    _expect_packed("kv", kv, 2, "batch, seqlen")
    options = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    return _attend_packed(q, kv, options)


def flash_attn_qkvpacked_func(
    qkv,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
):
    """`flash_attn_func` with q, k and v in one tensor, (batch, seqlen, 3, heads, dim).

    Their gradients have the same layout.
    """
    _expect_tensors(qkv=qkv)
    _expect_packed("qkv", qkv, 3, "batch, seqlen")
    options = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    return _attend_packed(None, qkv, options)


def flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
    block_table=None,
    seqused_k=None,
    q_descale=None,
    k_descale=None,
    v_descale=None,
):
    """`flash_attn_func` for sequences packed end to end.

    q is (total_q, heads, dim); k and v are (total_k, heads_kv, dim). cu_seqlens_q and cu_seqlens_k
    are int32 (batch + 1), the row at which each sequence begins. max_seqlen_q and max_seqlen_k are
    upper bounds of the lengths. softmax_lse is (heads, total_q).

    seqused_k is int32 (batch): how many of its keys each sequence uses, from the first. None: all.

    With block_table, k and v are pages, (num_pages, page_size, heads_kv, dim), and seqused_k, or
    else cu_seqlens_k, gives only the lengths. Pages support neither gradients nor dropout. The
    descales are those of `flash_attn_func`.
    """
    options = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    descales = q_descale, k_descale, v_descale
    lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_k
    call = PACKED, None, None, q, k, v, *options, lengths, block_table, descales
    repeated = _repeat(call, return_attn_probs, options if block_table is None else None, lengths, descales)
    if repeated is not None:
        return repeated
    _expect_tensors(q=q, k=k, v=v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    if block_table is not None:
        if dropout_p:
            raise UnsupportedError(f"dropout_p is {dropout_p} and block_table is given; dropout_p must be 0 with pages")
        _call.flag("deterministic", deterministic)
        longest_q, longest_k = _features.bound("max_seqlen_q", max_seqlen_q), _features.bound("max_seqlen_k", max_seqlen_k)
        causal, return_lse = _call.flag("causal", causal), _call.flag("return_attn_probs", return_attn_probs)
        result = _attention.attention_kvcache(
            q, k, v, block_table=block_table, seqused_k=cu_seqlens_k.diff() if seqused_k is None else seqused_k, max_seqlen_k=longest_k,
            cu_seqlens_q=cu_seqlens_q, max_seqlen_q=longest_q, causal=causal, softmax_scale=softmax_scale,
            return_lse=return_lse, window=_window(window_size, causal), softcap=softcap, alibi_slopes=alibi_slopes,
            q_descale=q_descale, k_descale=k_descale, v_descale=v_descale,
        )  # fmt: skip
        return (*result, None) if return_lse else result
    lengths = *_lengths(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k), seqused_k
    return _attend(q, k, v, options, lengths, descales, call)


def flash_attn_varlen_kvpacked_func(
    q,
    kv,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
):
    """`flash_attn_varlen_func` with k and v in one tensor, (total_k, 2, heads_kv, dim).

    Their gradients have the same layout.
    """
    _expect_tensors(q=q, kv=kv, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    _expect_packed("kv", kv, 2, "total")
    lengths = _lengths(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    options = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    return _attend_packed(q, kv, options, lengths)


def flash_attn_varlen_qkvpacked_func(
    qkv,
    cu_seqlens,
    max_seqlen,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
):
    """`flash_attn_varlen_func` with q, k and v in one tensor, (total, 3, heads, dim).

    Their gradients have the same layout.
    """
    _expect_tensors(qkv=qkv, cu_seqlens=cu_seqlens)
    _expect_packed("qkv", qkv, 3, "total")
    longest = _features.bound("max_seqlen", max_seqlen)
    lengths = _lengths(cu_seqlens, cu_seqlens, longest, longest)
    options = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    return _attend_packed(None, qkv, options, lengths)


def flash_attn_with_kvcache(
    q,
    k_cache,
    v_cache,
    k=None,
    v=None,
    rotary_cos=None,
    rotary_sin=None,
    cache_seqlens=None,
    cache_batch_idx=None,
    cache_leftpad=None,
    block_table=None,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    rotary_interleaved=True,
    alibi_slopes=None,
    num_splits=0,
    return_softmax_lse=False,
    q_descale=None,
    k_descale=None,
    v_descale=None,
):
    """Attention of q (batch, seqlen_q, heads, dim) over a K/V cache.

    k_cache and v_cache are (batch, seqlen_cache, heads_kv, dim), and each sequence uses its first
    cache_seqlens keys. With block_table they are pages of any size, (num_pages, page_size,
    heads_kv, dim). cache_seqlens is an int or int32 (batch).

    k and v (batch, seqlen_new, heads_kv, dim) are first written into the cache behind
    cache_seqlens, and the queries see them like the other keys. causal aligns to the bottom right
    corner of each sequence. The call does not wait for the device and has no gradient.

    rotary_cos and rotary_sin (rows, rotary_dim / 2), in q's dtype or fp32, rotate the first
    rotary_dim columns of k and q by their positions. Key i of k has position cache_seqlens + i, and
    so has query i with causal or a window; otherwise all queries have position cache_seqlens.
    rotary_interleaved combines columns 2i and 2i + 1, else i and i + rotary_dim / 2. The tables
    need a row for each key that the cache holds for a sequence. q itself stays as it is.

    cache_batch_idx is int32 (batch): the entry of the cache that holds each sequence's keys.
    cache_leftpad is int32 (batch): the rows before each sequence's first key, which cache_seqlens
    counts too. Neither goes with block_table. num_splits is the most parts that the keys are split
    into; 0 leaves it to the config.

    Caches may have 8 bits, with descales as for `flash_attn_func`. k and v then have 16 bits, and
    they are divided by k_descale and v_descale as they are written.

    All checks come before the cache is written. Caches that share memory are refused, and so are
    new keys that share memory with a cache. The values of lengths and tables on a GPU are not
    checked. If there a length is negative, leaves no room for the new keys, or its block_table has
    no page for them, the sequence gets none of its new keys and attends to the keys that it had. So
    does a sequence whose cache_batch_idx names no entry, and it attends to the last entry.
    """
    if torch.compiler.is_dynamo_compiling():
        from ._torch_untraced import untraced

        return untraced(
            flash_attn_with_kvcache, q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, cache_seqlens, cache_batch_idx,
            cache_leftpad, block_table, softmax_scale, causal, window_size, softcap, rotary_interleaved, alibi_slopes,
            num_splits, return_softmax_lse, q_descale, k_descale, v_descale,
        )  # fmt: skip
    call = None
    if k is v is rotary_cos is rotary_sin is None:
        # Tensors in the order of Features.
        options = alibi_slopes, cache_seqlens, block_table, cache_batch_idx, cache_leftpad, softmax_scale, causal, window_size, softcap
        descales = q_descale, k_descale, v_descale
        call = CACHED, None, None, q, k_cache, v_cache, *options, rotary_interleaved, num_splits, return_softmax_lse, descales
        repeated = _torch_drafts.repeat(*call)
        if repeated is not None:
            return repeated if return_softmax_lse else repeated[0]
    _expect_tensors(q=q, k_cache=k_cache, v_cache=v_cache)
    causal, return_lse = _call.flag("causal", causal), _call.flag("return_softmax_lse", return_softmax_lse)
    opts, window = _call.options(causal, softmax_scale, 0.0), _window(window_size, causal)
    rotary = None
    if not (rotary_cos is rotary_sin is None):
        interleaved, has_positions = _call.flag("rotary_interleaved", rotary_interleaved), causal or window is not None
        rotary = _kvcache.rotary_of(rotary_cos, rotary_sin, interleaved, not has_positions)
    if k is v is rotary is None and _kvcache.is_on_device(cache_seqlens) and k_cache.numel():
        # Only shapes are checked, so an earlier call of the same form has checked them.
        features = _features.of(
            window=window, softcap=softcap, alibi_slopes=alibi_slopes, seqused_k=cache_seqlens, block_table=block_table,
            cache_batch_idx=cache_batch_idx, leftpad_k=cache_leftpad, num_splits=num_splits, q_descale=q_descale,
            k_descale=k_descale, v_descale=v_descale,
        )  # fmt: skip
        repeated = _torch_launch.repeat_forward(q, k_cache, v_cache, opts, None, features, return_lse)
        if repeated is not None:
            if call is not None:
                _torch_drafts.alias(call, (FORWARD, None, None, q, k_cache, v_cache, None, opts, features, return_lse))
            return repeated if return_lse else repeated[0]
    if cache_leftpad is not None and block_table is not None:
        raise InvalidArgumentError("cache_leftpad and block_table are both given; with pages leave cache_leftpad out")
    q, seqused_k, write = _kvcache.plan(
        q, k_cache, v_cache, k, v, cache_seqlens, block_table, cache_batch_idx, cache_leftpad, rotary,
        _kvcache.Descales(k_descale, v_descale),
    )  # fmt: skip
    features = _features.of(
        window=window, softcap=softcap, alibi_slopes=alibi_slopes, seqused_k=seqused_k, block_table=block_table,
        cache_batch_idx=cache_batch_idx, leftpad_k=cache_leftpad, num_splits=num_splits, q_descale=q_descale,
        k_descale=k_descale, v_descale=v_descale,
    )  # fmt: skip
    out, lse = _torch.attention_forward(q, k_cache, v_cache, opts, None, features, write, return_lse)
    return (out, lse) if return_lse else out


def _attend(q, k, v, options, lengths=None, descales=(None, None, None), call=None):
    """Attention. `_repeat` serves later calls of the form of `call`, if that is given."""
    opts, features, return_attn_probs = _taken(options, lengths, descales)
    result = _torch.attention(q, k, v, opts, None, return_attn_probs, features)
    if call is not None and not is_observed(q) and not opts[2]:
        if not _learns(call):
            _torch_drafts.alias(call, (FORWARD, None, None, q, k, v, None, opts, features, return_attn_probs))
        elif _may_be_recorded(options, lengths, descales):
            _torch_recorded.know(q, k, v, options, lengths, opts, features)
    return (*result, None) if return_attn_probs else result


def _may_be_recorded(options, lengths, descales):
    """Whether `_torch_recorded` takes a call: only lengths are tensors, and no mask is drawn.

    With a list or an array among its options a call has no form, so no draft is looked for.
    """
    dropout_p, softmax_scale, _, window_size, softcap, alibi_slopes, _, _ = options
    are_numbers = type(dropout_p) is float and type(softcap) is float and (softmax_scale is None or type(softmax_scale) is float)
    if type(window_size) is not tuple or (lengths is not None and not type(lengths[2]) is type(lengths[3]) is int):
        return False
    has_used = lengths is not None and lengths[4] is not None
    has_no_descales = all(descale is None for descale in descales)
    return are_numbers and dropout_p == 0 and alibi_slopes is None and has_no_descales and not has_used


def _learns(call):
    _, _, _, q, k, v, *_ = call
    learns = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    return learns or forward_ad._current_level >= 0


def _repeat(call, return_attn_probs, options, lengths, descales):
    """The result of a call whose form has a draft; else None."""
    if is_observed(call[3]):
        return None
    try:
        learns = _learns(call)
    except AttributeError:
        return None  # The checks say which is no tensor.
    if learns:
        return _record(call, return_attn_probs, options, lengths, descales)
    repeated = _torch_drafts.repeat(*call)
    if repeated is None:
        return None
    return (*repeated, None) if return_attn_probs else repeated[0]


def _record(call, return_attn_probs, options, lengths, descales):
    """`_repeat` where autograd records the call. Calls over pages have no options here."""
    if options is None or forward_ad._current_level >= 0 or not _may_be_recorded(options, lengths, descales):
        return None
    try:
        result = _torch_recorded.attend(*call[3:6], options, lengths, _taken)
    except _torch_recorded.Unknown:
        return None
    return (*result, None) if return_attn_probs else result


def _attend_packed(q, packed, options, lengths=None):
    opts, features, return_attn_probs = _taken(options, lengths)
    if is_observed(packed):
        # Autograd joins the gradients of the slices.
        q, k, v = packed.unbind(-3) if q is None else (q, *packed.unbind(-3))
        result = _torch.attention(q, k, v, opts, None, return_attn_probs, features)
        return (*result, None) if return_attn_probs else result
    seed = _torch.resolve_seed(None, opts[2], packed)
    result = _torch_autograd.packed_attention(q, packed, opts, seed, return_attn_probs, features)
    return (*result, None) if return_attn_probs else result


def _taken(options, lengths, descales=(None, None, None)):
    """(opts, features, return_attn_probs) from flash-attn's arguments, in their order.

    lengths: (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k), then perhaps seqused_k; or
    None.
    """
    dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs = options
    return_attn_probs = _call.flag("return_attn_probs", return_attn_probs)
    causal, deterministic = _call.flag("causal", causal), _call.flag("deterministic", deterministic)
    opts = _call.options(causal, softmax_scale, dropout_p, deterministic)
    window = _window(window_size, causal)
    of_eight = dict(zip(("q_descale", "k_descale", "v_descale"), descales))
    if lengths is None:
        return opts, _features.of(window=window, softcap=softcap, alibi_slopes=alibi_slopes, **of_eight), return_attn_probs
    features = _features.of(
        window=window, softcap=softcap, alibi_slopes=alibi_slopes, cu_seqlens_q=lengths[0], cu_seqlens_k=lengths[1],
        max_seqlen_q=lengths[2], max_seqlen_k=lengths[3], seqused_k=lengths[4] if len(lengths) > 4 else None,
        **of_eight,
    )  # fmt: skip
    return opts, features, return_attn_probs


def _lengths(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k):
    """The fields of Features that say where packed sequences lie."""
    longest_q, longest_k = _features.bound("max_seqlen_q", max_seqlen_q), _features.bound("max_seqlen_k", max_seqlen_k)
    return cu_seqlens_q, cu_seqlens_k, longest_q, longest_k


def _window(window_size, causal):
    """(left, right) as `_features.of` takes it, or None for all keys."""
    try:
        left, right = window_size
        left, right = max(-1, operator.index(left)), max(-1, operator.index(right))
    except (TypeError, ValueError):
        raise InvalidArgumentError(
            f"window_size is {shown(window_size)}; it must be (left, right), numbers of keys, with -1 for all of that side"
        ) from None
    right = -1 if causal else right
    return None if left == right == -1 else (left, right)


def _expect_tensors(**tensors):
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} is a {type(tensor).__name__}; it must be a torch tensor")
        if tensor.dtype is _FLOAT32 and tensor.is_cuda:
            raise UnsupportedError(f"{name} is {tensor.dtype}; it must be 16-bit here; flashtune.attention also takes fp32")


def _expect_packed(name, tensor, count, rows):
    expected = f"({rows}, {count}, heads, dim)"
    if tensor.dim() != expected.count(",") + 1 or tensor.shape[-3] != count:
        raise InvalidArgumentError(f"{name} has shape {tuple(tensor.shape)}; it must be {expected}")
