"""Features: additions to softmax(scale * q k^T) v, such as windows, caps, biases and varlen.

This module turns the caller's arguments into the features part of a params struct. It knows shapes
and leaves the arrays to the module of their library, `lib`: `expect_array` checks that an array is
the library's, `vector` and `scores` return what can be packed, and `longest` reads lengths where
the host can. Without features there is no Features object, and this module is not used.
"""

import operator
import struct
from typing import Any, NamedTuple

from . import _call, _structs
from ._errors import InvalidArgumentError, shown

NO_SCORES = (0, 0, 0, 0, 0)
"""An absent tensor of scores: an address, then strides of batch, head, seqlen_q and seqlen_k."""

_pack = _structs.packer(_structs.FEATURES).pack
_pack_pages = _structs.packer(_structs.PAGES).pack
_pack_key_starts = _structs.packer(_structs.KEY_STARTS).pack
_pack_gradients = _structs.packer(_structs.FEATURE_GRADIENTS).pack


LENGTHS = ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k")
"""The arrays that give the lengths of sequences."""


class Features(NamedTuple):
    """The features as the caller gave them; None for each that is missing."""

    window: Any = None
    softcap: float = 0.0
    alibi_slopes: Any = None
    bias: Any = None
    mask: Any = None
    sinks: Any = None
    mask_bits: Any = None
    block_mask: Any = None
    cu_seqlens_q: Any = None
    cu_seqlens_k: Any = None
    seqused_q: Any = None
    seqused_k: Any = None
    max_seqlen_q: Any = None
    max_seqlen_k: Any = None
    block_table: Any = None
    cache_batch_idx: Any = None
    leftpad_k: Any = None
    num_splits: int = 0
    q_descale: Any = None
    k_descale: Any = None
    v_descale: Any = None
    int4_group: Any = None

    def has_lengths(self):
        return any(getattr(self, name) is not None for name in LENGTHS)

    def has_key_starts(self):
        return self.cache_batch_idx is not None or self.leftpad_k is not None


def of(
    *, window=None, softcap=0.0, alibi_slopes=None, bias=None, mask=None, sinks=None, mask_bits=None, block_mask=None,
    cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None, seqused_k=None, max_seqlen_q=None, max_seqlen_k=None,
    block_table=None, cache_batch_idx=None, leftpad_k=None, num_splits=0, q_descale=None, k_descale=None, v_descale=None,
    int4_group=None,
):  # fmt: skip
    """Features by the names of their fields, or None if all are off."""
    if mask is not None and mask_bits is not None:
        raise InvalidArgumentError("mask and mask_bits are both given; a mask has bytes or bits, so give one of the two")
    if window is not None:
        window = _window(window)
    if type(softcap) is not float or softcap != 0:
        softcap = _softcap(softcap)
    if type(num_splits) is not int or num_splits != 0:
        num_splits = _splits(num_splits)
    if softcap == 0 and num_splits == 0 and (
        window is alibi_slopes is bias is mask is sinks is mask_bits is block_mask is cu_seqlens_q is cu_seqlens_k
        is seqused_q is seqused_k is max_seqlen_q is max_seqlen_k is block_table is cache_batch_idx is leftpad_k is q_descale is k_descale is v_descale
        is int4_group is None
    ):  # fmt: skip
        return None
    return Features(
        window, softcap, alibi_slopes, bias, mask, sinks, mask_bits, block_mask, cu_seqlens_q, cu_seqlens_k,
        seqused_q, seqused_k, max_seqlen_q, max_seqlen_k, block_table, cache_batch_idx, leftpad_k, num_splits, q_descale,
        k_descale, v_descale, int4_group,
    )  # fmt: skip


def _splits(num_splits):
    try:
        number = -1 if isinstance(num_splits, bool) else operator.index(num_splits)
    except TypeError:
        number = -1
    if not 0 <= number < 1 << 31:
        raise InvalidArgumentError(
            f"num_splits is {shown(num_splits)}; it must be 0 for the config's choice, or the most parts that the keys are split into"
        )
    return number


def _softcap(softcap):
    softcap = _call.number("softcap", softcap, "a number and not negative (0 means none)")
    if softcap < 0:
        raise InvalidArgumentError(f"softcap is {softcap}; it must not be negative (0 means none)")
    if softcap != 0:
        _call.factor("softcap", softcap, "0 means none")
    return softcap


def _window(window):
    """(left, right), with -1 for all keys; None where both are."""
    try:
        left, right = (-1 if side is None else side if isinstance(side, int) else operator.index(side) for side in window)
    except (TypeError, ValueError):
        left = right = -2
    if min(left, right) < -1:
        raise InvalidArgumentError(
            f"window is {shown(window)}; it must be (left, right), numbers of keys, with None or -1 for all of that side"
        )
    return None if left == right == -1 else (left, right)


def sizes(features, q, k, v, lib, array):
    """The seven sizes of the params. `array` is q; lengths must share its library and device."""
    if features is None or not (features.has_lengths() or features.block_table is not None or features.has_key_starts()):
        if features is not None:
            _refuse_bound("q", features.max_seqlen_q)
            _refuse_bound("k", features.max_seqlen_k)
        return _call.sizes(q, k, v)
    for name in (*LENGTHS, "cache_batch_idx", "leftpad_k"):
        if getattr(features, name) is not None:
            lib.expect_array(name, getattr(features, name))
    if features.has_key_starts():
        _refuse_other_places(features)
    cu_seqlens_q, cu_seqlens_k, block_table = features.cu_seqlens_q, features.cu_seqlens_k, features.block_table
    batch_q, rows_q, num_heads_q, head_dim = _rows("q", q, cu_seqlens_q)
    batch_k, rows_k, num_heads_kv, head_dim_k = _rows("k", k, cu_seqlens_k)
    batch_v, rows_v, num_heads_v, head_dim_v = _rows("v", v, cu_seqlens_k)
    if head_dim_k != head_dim:
        raise InvalidArgumentError(f"k has shape {tuple(k)}; its dim must be that of q, {tuple(q)}")
    if batch_v != batch_k or rows_v != rows_k or num_heads_v != num_heads_kv:
        raise InvalidArgumentError(f"v has shape {tuple(v)}; all sizes except dim must be those of k, {tuple(k)}")
    batches = [
        ("cu_seqlens_q", _sequences("cu_seqlens_q", cu_seqlens_q, 1)),
        ("cu_seqlens_k", _sequences("cu_seqlens_k", cu_seqlens_k, 1)),
        ("seqused_q", _sequences("seqused_q", features.seqused_q)),
        ("seqused_k", _sequences("seqused_k", features.seqused_k)),
        ("q", batch_q),
        ("cache_batch_idx", _sequences("cache_batch_idx", features.cache_batch_idx)),
        ("leftpad_k", _sequences("leftpad_k", features.leftpad_k)),
    ]
    if block_table is not None:
        batches.append(("block_table", _expect_table(block_table, cu_seqlens_k, lib)))
    elif features.cache_batch_idx is None:
        batches.append(("k", batch_k))
    batches = [(name, batch) for name, batch in batches if batch is not None]
    first, batch_size = batches[0]
    for name, batch in batches:
        if batch != batch_size:
            raise InvalidArgumentError(f"{name} is of {batch} sequences and {first} of {batch_size}; they must agree")
    seqlen_q = _longest("q", features.max_seqlen_q, cu_seqlens_q, rows_q, lib, array)
    if block_table is None:
        seqlen_k = _longest("k", features.max_seqlen_k, cu_seqlens_k, rows_k, lib, array)
    else:
        seqlen_k = _longest_in_pages(features.max_seqlen_k, block_table, rows_k)
    return batch_size, num_heads_q, num_heads_kv, seqlen_q, seqlen_k, head_dim, head_dim_v


def _refuse_other_places(features):
    """cache_batch_idx and leftpad_k say where keys lie, as do cu_seqlens_k and block_table."""
    name = "leftpad_k" if features.cache_batch_idx is None else "cache_batch_idx"
    for other in ("cu_seqlens_k", "block_table"):
        if getattr(features, other) is not None:
            raise InvalidArgumentError(f"{name} and {other} are both given; each says where the keys of a sequence lie, so give one")


def _rows(name, shape, cu_seqlens):
    """(batch or None, rows, heads, dim)"""
    if len(shape) != (4 if cu_seqlens is None else 3):
        expected = f"(batch, seqlen, heads, dim), or with cu_seqlens_{name} (total, heads, dim)"
        expected = expected if cu_seqlens is None else "(total, heads, dim), by its cu_seqlens"
        raise InvalidArgumentError(f"{name} has shape {tuple(shape)}; it must be {expected}")
    return tuple(shape) if cu_seqlens is None else (None, *shape)


def _sequences(name, array, more=0):
    """The number of sequences of an array of lengths, which has `more` additional elements."""
    if array is None:
        return None
    shape = tuple(array.shape)
    if len(shape) != 1 or shape[0] < more:
        raise InvalidArgumentError(f"{name} has shape {shape}; it must be {'(batch + 1,)' if more else '(batch,)'}")
    return shape[0] - more


def _longest(side, given, cu_seqlens, rows, lib, array):
    if cu_seqlens is None:
        _refuse_bound(side, given)
        return rows
    return lib.longest(f"cu_seqlens_{side}", cu_seqlens, array) if given is None else bound(f"max_seqlen_{side}", given)


def _expect_table(block_table, cu_seqlens_k, lib):
    """Checks the block table and returns its number of sequences."""
    lib.expect_array("block_table", block_table)
    if cu_seqlens_k is not None:
        raise InvalidArgumentError("block_table and cu_seqlens_k are both given; with pages, give the lengths by seqused_k alone")
    if len(block_table.shape) != 2:
        raise InvalidArgumentError(f"block_table has shape {tuple(block_table.shape)}; it must be (batch, pages)")
    return block_table.shape[0]


def _longest_in_pages(given, block_table, page_size):
    most = block_table.shape[1] * page_size
    longest = most if given is None else bound("max_seqlen_k", given)
    if longest > most:
        pages = f"{block_table.shape[1]} pages of {page_size}"
        raise InvalidArgumentError(f"max_seqlen_k is {given}; it must be at most {most}, what {pages} keys of block_table hold")
    return longest


def bound(name, given):
    try:
        number = operator.index(given)
    except TypeError:
        number = -1
    if not 0 <= number < 1 << 63:
        raise InvalidArgumentError(f"{name} is {shown(given)}; it must be an int that no sequence exceeds")
    return number


def _refuse_bound(side, given):
    if given is not None:
        missing = "cu_seqlens_q" if side == "q" else "cu_seqlens_k or block_table"
        raise InvalidArgumentError(
            f"max_seqlen_{side} is given without {missing}; leave it out, since the shape of {side} gives it"
        )


def lse_shape(features, q, dims):
    """(heads_q, total_q) if q is packed end to end, else (batch, heads_q, seqlen_q)."""
    batch_size, num_heads_q, _, seqlen_q, *_ = dims
    if features is None or features.cu_seqlens_q is None:
        return (batch_size, num_heads_q, seqlen_q)
    return (num_heads_q, q[0])


def pack(features, opts, dims, q, k, lib):
    """(packed features, objects to keep until the launch). q and k are the arrays."""
    if features is None:
        return _call.NO_FEATURES, ()
    batch_size, num_heads_q, _, seqlen_q, seqlen_k, *_ = dims
    bits, kept = 0, []

    def vector(name, kind, bit, *shapes):
        nonlocal bits
        array = getattr(features, name)
        if array is None:
            return 0, 0
        bits |= bit
        array, address = lib.vector(name, array, kind, q)
        if tuple(array.shape) not in shapes:
            expected = " or ".join(map(str, shapes))
            raise InvalidArgumentError(f"{name} has shape {tuple(array.shape)}; it must be {expected}")
        kept.append(array)
        return address, array.shape[-1] if len(array.shape) == 2 else 0

    def scores(name, bit, columns):
        nonlocal bits
        array = getattr(features, name)
        if array is None:
            return NO_SCORES
        bits |= bit
        array, ref = lib.scores(name, array, (batch_size, num_heads_q, seqlen_q, columns), q)
        kept.append(array)
        return ref

    alibi = vector("alibi_slopes", "float32", _structs.FEATURE_ALIBI, (num_heads_q,), (batch_size, num_heads_q))
    bias = scores("bias", _structs.FEATURE_BIAS, seqlen_k)
    if features.mask_bits is None:
        mask = scores("mask", _structs.FEATURE_MASK, seqlen_k)
    else:
        mask = scores("mask_bits", _structs.FEATURE_MASK_BITS, (seqlen_k + 7) // 8)
    sinks, _ = vector("sinks", "float32", _structs.FEATURE_SINKS, (num_heads_q,))
    lengths = [
        vector("cu_seqlens_q", "int32", _structs.FEATURE_CU_SEQLENS_Q, (batch_size + 1,)),
        vector("cu_seqlens_k", "int32", _structs.FEATURE_CU_SEQLENS_K, (batch_size + 1,)),
        vector("seqused_q", "int32", _structs.FEATURE_SEQUSED_Q, (batch_size,)),
        vector("seqused_k", "int32", _structs.FEATURE_SEQUSED_K, (batch_size,)),
    ]
    if features.block_table is not None:
        bits |= _structs.FEATURE_PAGED
    if features.cache_batch_idx is not None:
        bits |= _structs.FEATURE_CACHE_BATCH_IDX
    if features.leftpad_k is not None:
        bits |= _structs.FEATURE_LEFTPAD_K
    if features.block_mask is not None:
        bits |= _structs.FEATURE_BLOCK_MASK
    total_q = 0 if features.cu_seqlens_q is None else q.shape[0]
    total_k = 0 if features.cu_seqlens_k is None else k.shape[0]
    number, left, right = _structs.WINDOW_NONE, 0, 0
    if features.window is not None:
        is_top_left = opts[0] == _structs.CAUSAL_TOP_LEFT
        number = _structs.WINDOW_TOP_LEFT if is_top_left else _structs.WINDOW_BOTTOM_RIGHT
        left, right = features.window
    try:
        packed = _pack(
            bits, number, features.softcap, left, right, *alibi, *bias, *mask, sinks,
            *(address for address, _ in lengths), total_q, total_k,
        )  # fmt: skip
    except (struct.error, OverflowError) as error:
        message = f"softcap {features.softcap!r} and window {features.window!r} must be numbers that the library takes: {error}"
        raise InvalidArgumentError(message) from None
    return packed, kept


def pack_pages(features, k, q, lib):
    """(packed pages part of a forward pass, objects to keep until the launch).

    q and k are the arrays.
    """
    if features is None or features.block_table is None:
        return _call.NO_PAGES, ()
    table, address = lib.vector("block_table", features.block_table, "int32", q)
    num_pages, page_size = k.shape[:2]
    return _pack_pages(address, table.shape[1], page_size, num_pages), (table,)


def pack_key_starts(features, k, q, lib):
    """(packed starts of keys and num_splits of a forward pass, objects to keep until the launch).

    q and k are the arrays.
    """
    if features is None or not (features.has_key_starts() or features.num_splits):
        return _call.NO_KEY_STARTS, ()
    names = "cache_batch_idx", "leftpad_k"
    arrays = [(name, getattr(features, name)) for name in names]
    entry, padding = [(None, 0) if array is None else lib.vector(name, array, "int32", q) for name, array in arrays]
    entries = 0 if features.cache_batch_idx is None else k.shape[0]
    return _pack_key_starts(entry[1], padding[1], entries, features.num_splits), (entry[0], padding[0])


def with_gradients(packed, dbias, dsinks, dlse, wants_dbias, wants_dlse):
    """(features, feature gradients) of the backward pass, both packed.

    The features are `packed` with the bits of the wanted gradients added. `dbias` has the form of
    `NO_SCORES`; dsinks and dlse are addresses.
    """
    more = wants_dbias * _structs.FEATURE_DBIAS | wants_dlse * _structs.FEATURE_DLSE
    if more:
        (bits,) = struct.unpack_from("@Q", packed)
        packed = struct.pack("@Q", bits | more) + packed[8:]
    return packed, _pack_gradients(*dbias, dsinks, dlse)
