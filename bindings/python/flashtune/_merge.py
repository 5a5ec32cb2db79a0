"""Merging partial results: shapes are checked against each other and params are packed.

Knows shapes and strides; the array library's module knows the arrays.
"""

import ctypes
import struct

from . import _call, _structs
from ._errors import InvalidArgumentError, shown

_BYTES = ctypes.sizeof(_structs.MergeParams)
_pack = _structs.packer(_structs.MergeParams._fields_).pack


def parts(name, given, lib):
    """The arrays of a non-empty sequence as a list, checked to be stackable."""
    try:
        arrays = list(given)
    except TypeError:
        raise InvalidArgumentError(f"{name} is {shown(given)}; it must be a sequence of at least one array, or a stack") from None
    for i, array in enumerate(arrays):
        lib.expect_array(f"{name}[{i}]", array, "outs[0]")
        if tuple(array.shape) != tuple(arrays[0].shape) or array.dtype != arrays[0].dtype:
            found, first = (f"{x.dtype} of shape {tuple(x.shape)}" for x in (array, arrays[0]))
            raise InvalidArgumentError(f"{name}[{i}] is {found}; it must be {first}, as {name}[0] is")
    return arrays


def shapes(outs, lses):
    """((batch, seqlen, heads, dim), shape of an lse) from the shapes of the stacked partials."""
    expected = "(partials, batch, seqlen, heads, dim), or (partials, total, heads, dim) for packed sequences"
    if len(outs) not in (4, 5):
        raise InvalidArgumentError(f"outs has shape {tuple(outs)}; it must be {expected}")
    partials, *shape = outs
    batch, seqlen, heads, dim = shape if len(shape) == 4 else (1, *shape)
    of_lse = (batch, heads, seqlen) if len(shape) == 4 else (heads, seqlen)
    _call.expect_shape("lses", lses, (partials, *of_lse))
    return (batch, seqlen, heads, dim), of_lse


def pack(dtype, partial_dtype, sizes, outs, lses, out, lse):
    """Packed `flashtune_merge_params`.

    outs is (partials, address, stride_partial, stride_batch, stride_seqlen, stride_head), lses
    (address, stride_partial), out like any tensor, and lse an address.
    """
    partials, address, stride_partial, *strides = outs
    batch, seqlen, heads, dim = sizes
    try:
        return _pack(
            _BYTES, dtype, partial_dtype, partials, batch, seqlen, heads, dim, address, *strides, stride_partial, *lses, *out, lse
        )
    except struct.error as error:
        raise InvalidArgumentError(f"outs has sizes or strides that the library does not take: {error}") from None
