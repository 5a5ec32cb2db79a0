"""8-bit q, k and v, and int4 k and v: the types, and the part of a forward pass's params for them.

Scales may be numbers or arrays. An array's shape says what shares an element; a dim of size 1 is
shared. Knows no array library: the caller's module gives addresses and strides.
"""

import operator
from typing import NamedTuple

from . import _structs
from ._errors import InvalidArgumentError, shown

NUMBERS = {"float8_e4m3fn": _structs.DTYPE_E4M3, "float8_e5m2": _structs.DTYPE_E5M2, "int8": _structs.DTYPE_INT8}
"""The numbers of the 8-bit dtypes by their names in torch and in ml_dtypes."""

_INT4 = {32: _structs.DTYPE_INT4_GROUP32, 64: _structs.DTYPE_INT4_GROUP64}

_pack = _structs.packer(_structs.EIGHT_BITS).pack
NONE = bytes(_structs.packer(_structs.EIGHT_BITS).size)
_NULL = (0, 0, 0, 0)
SCALE_BLOCK = 128
"""Keys of a block that shares a scale."""


def int4_row_bytes(dim, group=32):
    """Bytes of a row of int4 k or v with `dim` columns.

    A cache is a uint8 array whose last dim has so many. FLASHTUNE_DTYPE_INT4_GROUP32 in flashtune.h
    has the layout.

    dim: a multiple of the group.
    group: 32 or 64, the neighbouring columns that share a scale and a zero.
    """
    int4_number(group)
    try:
        columns = operator.index(dim)
    except TypeError:
        columns = 0
    if not 0 < columns <= 512 or columns % group:
        raise InvalidArgumentError(
            f"dim is {shown(dim)}; it must be a multiple of the {group} columns that share a scale, up to 512"
        )
    return -(-(columns // 2 + columns // group * 4) // 16) * 16


def int4_number(group):
    """The dtype's number in the C header."""
    try:
        number = _INT4.get(operator.index(group))
    except TypeError:
        number = None
    if number is None:
        raise InvalidArgumentError(f"int4_group is {shown(group)}; it must be 32 or 64, the columns that share a scale")
    return number


def int4_columns(name, shape, group):
    """The shape of int4 rows with columns in place of bytes."""
    int4_number(group)
    for dim in range(group, 513, group):
        if shape[-1:] == (int4_row_bytes(dim, group),):
            return (*shape[:-1], dim)
    raise InvalidArgumentError(
        f"{name} has shape {tuple(shape)}; with int4_group {group} its last dim must be int4_row_bytes(dim, {group}), such as {int4_row_bytes(128, group)} for 128 columns"
    )


def key_shapes(k, v, features):
    """The shapes of k and v, with columns in place of the bytes of int4 rows."""
    if features is None or features.int4_group is None:
        return k.shape, v.shape
    return [int4_columns(name, x.shape, features.int4_group) for name, x in (("k", k), ("v", v))]


def has_scales(features):
    return features is not None and not (features.q_descale is features.k_descale is features.v_descale is None)


class Scales(NamedTuple):
    """The scales of a call, which must live until the launch."""

    keys_per_descale: int
    arrays: dict
    """For q_descale, k_descale and v_descale the array and its shape (entries, rows, heads)."""


NO_SCALES = Scales(0, {})


def pack(features, q_number, kv_number, out_number, dims, k_shape, lib, q):
    """(packed part, its Scales).

    Numbers are those of the C header; kv_number and out_number are 0 where they are q's. k_shape is
    k's. `lib.scales` takes a name, what the caller gave, and q.
    """
    is_fp8 = q_number == _structs.DTYPE_E4M3
    is_int4 = kv_number in _INT4.values()
    has_keys = (is_fp8 or kv_number != 0) and not is_int4
    names = ("q_descale", "k_descale", "v_descale")
    used = [name for name, is_used in zip(names, (is_fp8, has_keys, has_keys)) if is_used]
    for name in names:
        if name not in used and features is not None and getattr(features, name) is not None:
            reason = "rows of int4 hold their scales" if is_int4 and name != "q_descale" else f"{name[0]} has not 8 bits"
            raise InvalidArgumentError(f"{name} is given; it must be None, since {reason}")
    if is_int4:
        return _pack(kv_number, 0, *_NULL, *_NULL, *_NULL, 0), NO_SCALES
    if not has_keys:
        return NONE, NO_SCALES
    of_heads, blocks = (dims[0], dims[2]), -(-dims[4] // SCALE_BLOCK)
    of_keys = tuple(k_shape[:-1])
    # With as many packed keys as sequences, scales of two dims are those of sequences.
    of_keys = (1, *of_keys) if of_keys == of_heads else of_keys
    of_rows = {of_heads: 0, (dims[0], blocks, dims[2]): SCALE_BLOCK, of_keys: 1}
    found = {}
    for name in used:
        given = getattr(features, name, None)
        scales = lib.scales(name, 1.0 if given is None else given, q)
        found[name] = _place(name, *scales, {of_heads: 0} if name == "q_descale" else of_rows)
    keys_per_descale = _keys_per_descale(found)
    refs = [field for name in names for field in (found[name][1] if name in found else _NULL)]
    arrays = {name: (array, shape) for name, (array, _, shape, _) in found.items()}
    return _pack(kv_number, out_number, *refs, keys_per_descale), Scales(keys_per_descale, arrays)


def _place(name, array, address, shape, strides, allowed):
    """(array, its ref, its shape (entries, rows, heads), keys_per_descale or None for one scale).

    allowed: keys_per_descale by shape.
    """
    if all(size == 1 for size in shape):
        return array, (address, 0, 0, 0), (1, 1, 1), None
    keys = next((keys for wanted, keys in allowed.items() if _broadcasts(shape, wanted)), None)
    if keys is None:
        choices = " or ".join(map(str, allowed))
        raise InvalidArgumentError(f"{name} has shape {tuple(shape)}; it must be a number, {choices}, or 1 where a scale is shared")
    shape, strides = list(shape), [0 if size == 1 else stride for size, stride in zip(shape, strides)]
    if len(shape) == 2:
        # (entries, heads) with a scale for all rows, or (rows, heads) of packed rows in one entry.
        at = 1 if keys == 0 else 0
        shape.insert(at, 1)
        strides.insert(at, 0)
    return array, (address, *strides), tuple(shape), keys


def _keys_per_descale(found):
    """The number of the struct, by what `_place` returned for each name."""
    of_rows = {name: keys for name, (*_, keys) in found.items() if keys}
    if len(set(of_rows.values())) > 1:
        raise InvalidArgumentError("k_descale and v_descale have scales of different numbers of keys; both must have as many")
    # A scale of whole sequences stands for all keys of a block, but not beside scales of each key.
    for name, (*_, keys) in found.items():
        if name != "q_descale" and keys == 0 and 1 in of_rows.values():
            raise InvalidArgumentError(f"{name} has a scale for each sequence; beside scales of each key it must be a number or have one for each key")
    return next(iter(of_rows.values()), 0)


def _broadcasts(shape, wanted):
    return len(shape) == len(wanted) and all(size in (1, other) for size, other in zip(shape, wanted))
