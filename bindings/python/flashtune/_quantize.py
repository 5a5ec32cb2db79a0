"""Quantising arrays to 8 bits and rotating them: sizes of the scales, and packed params.

Knows shapes and strides; the array library's module knows the arrays.
"""

import ctypes
import operator

from . import _structs
from ._eight import SCALE_BLOCK
from ._errors import InvalidArgumentError, shown

_BYTES = ctypes.sizeof(_structs.QuantizeParams)
_pack = _structs.packer(_structs.QuantizeParams._fields_).pack


def expect_rows(shape):
    """Refuses x of another shape than (batch, seqlen, heads, dim)."""
    if len(shape) != 4:
        raise InvalidArgumentError(f"x has shape {tuple(shape)}; it must be (batch, seqlen, heads, dim)")


def shape_of_scales(shape, keys_per_descale, heads_per_descale):
    """The shape of the scales of (batch, seqlen, heads, dim), and their (batch, blocks, groups)."""
    expect_rows(shape)
    if keys_per_descale not in (0, 1, SCALE_BLOCK):
        raise InvalidArgumentError(f"keys_per_descale is {shown(keys_per_descale)}; it must be 0, 1 or {SCALE_BLOCK}")
    batch, seqlen, heads, _ = shape
    try:
        group = operator.index(heads_per_descale)
    except TypeError:
        group = 0
    if group < 1 or heads % group:
        raise InvalidArgumentError(f"heads_per_descale is {shown(heads_per_descale)}; it must divide {heads}, the heads of x")
    blocks = 1 if keys_per_descale == 0 else -(-seqlen // keys_per_descale)
    full = (batch, blocks, heads // group)
    return (full if keys_per_descale else (batch, heads // group)), full


def _seed(name, seed):
    """The seed of a rotation as an int."""
    try:
        number = operator.index(seed)
    except TypeError:
        number = -1
    if not 0 <= number < 2**64:
        raise InvalidArgumentError(f"{name} is {shown(seed)}; it must be an int from 0 to 2**64 - 1")
    return number


def rotation(seed, name="rotation_seed"):
    """The fields of a rotation by this seed; None: of no rotation."""
    return (_structs.ROTATION_NONE, 0, 0) if seed is None else (_structs.ROTATION_HADAMARD, 0, _seed(name, seed))


def pack(dtype, out_dtype, shape, x, out, descale, keys_per_descale, heads_per_descale, computes, rotation_seed):
    """Packed `flashtune_quantize_params`.

    Tensors are (address, strides of batch, seqlen and head).
    """
    return _pack(
        _BYTES, dtype, out_dtype, *shape, *x, *out, *descale, keys_per_descale, heads_per_descale, computes, 0,
        *rotation(rotation_seed),
    )  # fmt: skip


def pack_rotation(dtype, shape, x, out, seed):
    """Packed `flashtune_quantize_params` of a call that only rotates. Tensors are as in `pack`."""
    return pack(dtype, dtype, shape, x, out, (0, 0, 0, 0), 0, 0, 0, _seed("seed", seed))
