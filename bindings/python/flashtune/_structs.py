"""The parts in which this package packs the params structs of the C header (`_header.py`).

Both passes begin with the same fields. The features follow. Most calls do not use them, so they are
packed separately: one part for both passes and one for each pass alone.
"""

import struct

from ._header import *  # noqa: F403
from ._header import BackwardParams, ForwardParams, KvAppendParams, c_double, c_float, c_int32, c_int64, c_uint64, c_void_p


def _part(params, first, last):
    """The fields of a struct from `first` to `last`, both included."""
    names = [name for name, _ in params._fields_]
    return params._fields_[names.index(first) : names.index(last) + 1]


PROBLEM = _part(ForwardParams, "struct_size", "lse")
GRADIENTS = _part(BackwardParams, "dout", "reserved")
FEATURES = _part(ForwardParams, "features", "total_k")
FEATURE_GRADIENTS = _part(BackwardParams, "dbias", "dlse")
PAGES = _part(ForwardParams, "block_table", "num_pages")
BATCH = _part(ForwardParams, "batch_invariant", "reserved")
BLOCK_MASK = _part(ForwardParams, "block_mask", "block_mask")
KEY_STARTS = _part(ForwardParams, "cache_batch_idx", "num_splits")
EIGHT_BITS = _part(ForwardParams, "kv_dtype", "keys_per_descale")
KV_APPEND = _part(KvAppendParams, "struct_size", "num_pages")
KV_SLOTS = _part(KvAppendParams, "features", "batch_size_cache")
KV_ROTARY = _part(KvAppendParams, "rotary_dim", "q_rotated")
KV_EIGHT = _part(KvAppendParams, "cache_dtype", "keys_per_descale")

_FORMATS = {c_int32: "i", c_int64: "q", c_uint64: "Q", c_float: "f", c_double: "d", c_void_p: "P"}


def _format(fields):
    return "".join(_FORMATS.get(kind) or _format(kind._fields_) for _, kind in fields)


def packer(fields):
    """A `struct.Struct` of these fields of a params struct. Its size is a multiple of 8.

    One `pack` fills all fields in the time that ctypes takes for three. The bytes that it returns
    belong to one call, so threads share nothing.
    """
    packed = struct.Struct("@" + _format(fields))
    assert packed.size % 8 == 0
    return packed
