"""One call in the form of the C library: shapes are checked and params are packed.

Knows shapes, strides and addresses, but not the array library. The C library checks the problem
itself (ranges, head ratios, layouts, devices). This module checks only what a params struct cannot
express.
"""

import ctypes
import operator
import struct
import sys

from . import _block_mask, _eight, _structs
from ._errors import InvalidArgumentError, shown

DTYPES = {"float16": _structs.DTYPE_FP16, "bfloat16": _structs.DTYPE_BF16, "float32": _structs.DTYPE_FP32}
WORKSPACE_ALIGNMENT = 256
"""The alignment in bytes that the library needs of a workspace."""
NULL = (0, 0, 0, 0)
NO_SEED = (0, 0, 0, 0)
"""(seed, offset, seed address, offset address). A nonzero address replaces the value."""

_CAUSAL = {
    False: _structs.CAUSAL_NONE,
    True: _structs.CAUSAL_BOTTOM_RIGHT,
    "bottom-right": _structs.CAUSAL_BOTTOM_RIGHT,
    "top-left": _structs.CAUSAL_TOP_LEFT,
}
_FORWARD_BYTES = ctypes.sizeof(_structs.ForwardParams)
_BACKWARD_BYTES = ctypes.sizeof(_structs.BackwardParams)
_KV_APPEND_BYTES = ctypes.sizeof(_structs.KvAppendParams)
_pack_forward = _structs.packer(_structs.PROBLEM).pack
_pack_backward = _structs.packer(_structs.PROBLEM + _structs.GRADIENTS).pack
NO_FEATURES = bytes(_structs.packer(_structs.FEATURES).size)
NO_PAGES = bytes(_structs.packer(_structs.PAGES).size)
NO_KEY_STARTS = bytes(_structs.packer(_structs.KEY_STARTS).size)
_pack_kv_append = _structs.packer(_structs.KV_APPEND).pack
_pack_kv_slots = _structs.packer(_structs.KV_SLOTS).pack
_pack_kv_rotary = _structs.packer(_structs.KV_ROTARY).pack
_pack_kv_eight = _structs.packer(_structs.KV_EIGHT).pack
NO_SLOTS = bytes(_structs.packer(_structs.KV_SLOTS).size)
NO_ROTARY = bytes(_structs.packer(_structs.KV_ROTARY).size)
NO_EIGHT = bytes(_structs.packer(_structs.KV_EIGHT).size)
_pack_batch = _structs.packer(_structs.BATCH).pack
NO_FEATURE_GRADIENTS = bytes(_structs.packer(_structs.FEATURE_GRADIENTS).size)


def options(causal, softmax_scale, dropout_p, deterministic=False, batch_invariant=False):
    """(causal number, scale, p, deterministic, batch_invariant) as in the params.

    A scale of None becomes 0, which stands for 1/sqrt(head_dim) in the struct.
    """
    try:
        causal_number = _CAUSAL[causal]
    except (KeyError, TypeError):
        allowed = 'False, True, "bottom-right" or "top-left"'
        raise InvalidArgumentError(f"causal is {causal!r}; it must be {allowed}") from None
    softmax_scale = 0.0 if softmax_scale is None else factor("softmax_scale", softmax_scale, "None means 1/sqrt(head_dim)")
    expected = "the probability of dropping, in [0, 1)"
    dropout_p = dropout_p if type(dropout_p) is float else number("dropout_p", dropout_p, expected)
    if not 0 <= dropout_p < 1:
        raise InvalidArgumentError(f"dropout_p is {dropout_p!r}; it must be {expected}")
    # The library rounds p to a 65536th, at most this one. In fp32 a larger p may be 1.
    if dropout_p > 65535 / 65536:
        dropout_p = 65535 / 65536
    if deterministic is batch_invariant is False:
        return causal_number, softmax_scale, dropout_p, 0, 0
    for name, flag in (("deterministic", deterministic), ("batch_invariant", batch_invariant)):
        if not isinstance(flag, (bool, int)) or flag not in (0, 1):
            raise InvalidArgumentError(f"{name} is {flag!r}; it must be False or True")
    return causal_number, softmax_scale, dropout_p, int(deterministic), int(batch_invariant)


def flag(name, value):
    """Refuses other types, since bool() would take them for something else: "top-left" is True."""
    if value is True or value is False:
        return value
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.bool_):
        return bool(value)
    raise InvalidArgumentError(f"{name} is {shown(value)}; it must be False or True")


def number(name, value, expected):
    """The float of a single number; text is refused."""
    if not isinstance(value, (str, bytes)):
        try:
            return float(value)
        except (TypeError, ValueError, RuntimeError, OverflowError):
            pass
    raise InvalidArgumentError(f"{name} is {shown(value)}; it must be {expected}")


def factor(name, value, nothing):
    """A float in the C header's range of softmax_scale and softcap.

    A value outside could round to 0 in fp32, and 0 stands for `nothing`.
    """
    if type(value) is float and 2.0**-100 <= abs(value) <= 2.0**100:
        return value
    expected = f"a number whose magnitude is from 2**-100 to 2**100 ({nothing})"
    value = number(name, value, expected)
    if not 2.0**-100 <= abs(value) <= 2.0**100:
        raise InvalidArgumentError(f"{name} is {shown(value)}; it must be {expected}")
    return value


def scale(name, value, kind):
    """The float of one scale of 8-bit numbers, which is finite and above 0 in fp32 too.

    A GPU does not check its scales.
    """
    expected = f"a number that is finite and above 0 in fp32, or a {kind}"
    value = number(name, value, expected)
    try:
        (rounded,) = struct.unpack("f", struct.pack("f", value))
    except OverflowError:
        rounded = 0
    if not 0 < rounded < float("inf"):
        raise InvalidArgumentError(f"{name} is {shown(value)}; it must be {expected}")
    return value


def sizes(q, k, v):
    """The seven sizes of the params from three (batch, seqlen, heads, dim) shapes."""
    try:
        batch_size, seqlen_q, num_heads_q, head_dim = q
        batch_k, seqlen_k, num_heads_kv, head_dim_k = k
        batch_v, seqlen_v, num_heads_v, head_dim_v = v
    except ValueError:
        for name, shape in (("q", q), ("k", k), ("v", v)):
            if len(shape) != 4:
                message = f"{name} has shape {tuple(shape)}; it must be (batch, seqlen, heads, dim)"
                raise InvalidArgumentError(message) from None
        raise
    if batch_k != batch_size or head_dim_k != head_dim:
        raise InvalidArgumentError(f"k has shape {tuple(k)}; batch and dim must be those of q, {tuple(q)}")
    if batch_v != batch_size or seqlen_v != seqlen_k or num_heads_v != num_heads_kv:
        raise InvalidArgumentError(f"v has shape {tuple(v)}; batch, seqlen and heads must be those of k, {tuple(k)}")
    return batch_size, num_heads_q, num_heads_kv, seqlen_q, seqlen_k, head_dim, head_dim_v


def expect_shape(name, shape, expected):
    if tuple(shape) != expected:
        raise InvalidArgumentError(f"{name} has shape {tuple(shape)}; it must be {expected}")


def integer_seed(seed):
    """(seed, offset) from an int or a pair of ints; None for any other type."""
    parts = seed if isinstance(seed, (tuple, list)) else (seed, 0)
    try:
        pair = tuple(part if isinstance(part, int) else operator.index(part) for part in parts)
    except TypeError:
        return None
    if len(pair) != 2:
        return None
    if all(0 <= part < 1 << 64 for part in pair):
        return pair
    raise InvalidArgumentError(f"seed is {seed}; seed and offset must be from 0 to 2**64 - 1")


def forward(
    dtype, opts, dims, seed, q, k, v, out, lse, features=NO_FEATURES, pages=NO_PAGES, blocks=_block_mask.NONE,
    key_starts=NO_KEY_STARTS, eight_bits=_eight.NONE,
):  # fmt: skip
    """Packed `flashtune_forward_params`.

    Tensors are (address, stride_batch, stride_seqlen, stride_head). Features, pages, the block
    mask, the starts of keys, and types and scales of 8 bits are packed already.
    """
    causal, scale, p, _, batch_invariant = opts  # the forward pass is always deterministic
    try:
        packed = _pack_forward(_FORWARD_BYTES, dtype, causal, *dims, scale, p, *seed, *q, *k, *v, *out, lse)
        return packed + features + pages + _pack_batch(batch_invariant, 0) + blocks + key_starts + eight_bits
    except (struct.error, OverflowError) as error:
        raise _unrepresentable(scale, p, error) from None


def backward(
    dtype, opts, dims, seed, q, k, v, out, lse, dout, dq, dk, dv,
    features=NO_FEATURES, feature_gradients=NO_FEATURE_GRADIENTS, blocks=_block_mask.NONE,
):  # fmt: skip
    """Packed `flashtune_backward_params`."""
    causal, scale, p, deterministic, _ = opts  # only the forward pass has batch_invariant
    try:
        return _pack_backward(
            _BACKWARD_BYTES, dtype, causal, *dims, scale, p, *seed, *q, *k, *v, *out, lse, *dout, *dq, *dk, *dv,
            deterministic, 0,
        ) + features + feature_gradients + blocks  # fmt: skip
    except (struct.error, OverflowError) as error:
        raise _unrepresentable(scale, p, error) from None


def kv_append(dtype, dims, k, v, k_cache, v_cache, seqlens, seqused, pages, slots=NO_SLOTS, rotary=NO_ROTARY, eight=NO_EIGHT):
    """Packed `flashtune_kv_append_params`.

    dims is (batch, heads_kv, seqlen_new, seqlen_cache, head_dim, head_dim_v), and pages is
    (address, stride, page_size, num_pages) or `NULL`. Lengths are addresses. Slots, the rotation
    and a cache of 8 bits are packed already.
    """
    first = _pack_kv_append(_KV_APPEND_BYTES, dtype, 0, *dims, *k, *v, *k_cache, *v_cache, seqlens, seqused, *pages)
    return first + slots + rotary + eight


def kv_slots(seqused_new, cache_batch_idx, batch_size_cache):
    """The part of `kv_append` for slots. Arrays are addresses, and 0 where they are missing."""
    return _pack_kv_slots(_structs.APPEND_SLOTS, seqused_new, cache_batch_idx, batch_size_cache)


def kv_rotary(dim, dtype, interleaved, q_at_one_position, cos, sin, stride, seqlen, q_sizes, q, q_rotated):
    """The part of `kv_append` for a rotation. q_sizes is (seqlen_q, heads_q)."""
    flags = interleaved, q_at_one_position, 0
    return _pack_kv_rotary(dim, dtype, *flags, cos, sin, stride, seqlen, *q_sizes, *q, *q_rotated)


def kv_eight(cache_dtype, computes, k_descale, v_descale, keys_per_descale):
    """The part of `kv_append` for a cache of 8 bits. Scales are like tensors."""
    return _pack_kv_eight(cache_dtype, computes, *k_descale, *v_descale, keys_per_descale)


def _unrepresentable(scale, p, error):
    return InvalidArgumentError(f"softmax_scale {scale!r} and dropout_p {p!r} must be numbers in fp32's range: {error}")
