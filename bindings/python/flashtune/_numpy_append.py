"""Appending new keys and values to a K/V cache of NumPy arrays, by the CPU backend.

The host reads all lengths and tables, so wrong ones are refused before anything is written. The
same for torch tensors, on any device, is in `_kvcache`. Knows nothing of attention.
"""

import operator

import numpy as np

from . import _call, _eight, _numpy
from ._context import CPU, context
from ._errors import InvalidArgumentError, shown


def append(
    k_cache, v_cache, k, v, cache_seqlens, block_table, cache_batch_idx, seqused_new, in_place, rotary_cos, rotary_sin,
    rotary_interleaved, q, q_at_one_position, k_descale, v_descale, computes_descale, int4_group,
):  # fmt: skip
    """`flashtune.kv_append`."""
    for name, flag in (
        ("in_place", in_place), ("rotary_interleaved", rotary_interleaved), ("q_at_one_position", q_at_one_position),
        ("computes_descale", computes_descale),
    ):  # fmt: skip
        if flag is not True and flag is not False:
            raise InvalidArgumentError(f"{name} is {flag!r}; it must be False or True")
    caches, new = {"k_cache": k_cache, "v_cache": v_cache}, {"k": k, "v": v}
    number = _number(caches, new, int4_group)
    batch, seqlen_new, heads, dim = k.shape
    capacity, pages, table = _room(k_cache, block_table, cache_batch_idx, batch)
    count = seqlen_new
    if seqused_new is not None:
        count = np.clip(_vector("seqused_new", seqused_new, batch), 0, seqlen_new)
    seqlens = _lengths(cache_seqlens, batch, capacity, count, in_place)
    if table is not None:
        _refuse_missing_pages(table, seqlens, count, k_cache)
    entries = 0
    if cache_batch_idx is not None:
        cache_batch_idx, entries = _vector("cache_batch_idx", cache_batch_idx, batch), len(k_cache)
        _refuse("cache_batch_idx", cache_batch_idx, 0, entries - 1, f"the cache has {entries} entries")
    # The library must not read an array that it writes.
    k, v = (_readable(name, x, caches.values()) for name, x in new.items())
    used = seqlens if in_place else np.empty_like(seqlens)
    more, kept, q_rotated, has_queries = {}, [], None, q is not None
    if in_place or seqused_new is not None or cache_batch_idx is not None:
        counts = None if seqused_new is None else np.ascontiguousarray(seqused_new)
        kept.append(counts)
        addresses = (0 if x is None else x.ctypes.data for x in (counts, cache_batch_idx))
        more["slots"] = _call.kv_slots(*addresses, entries)
    if has_queries and rotary_cos is rotary_sin is None:
        raise InvalidArgumentError("q is given without rotary_cos and rotary_sin; without a rotation leave it out")
    if rotary_cos is not None or rotary_sin is not None:
        q, q_rotated = _queries(q, k)
        tables = _tables(rotary_cos, rotary_sin, k, capacity)
        kept += [q, *tables]
        cos, sin = tables
        more["rotary"] = _call.kv_rotary(
            2 * cos.shape[1], _numpy._number("rotary_cos", cos.dtype), rotary_interleaved, q_at_one_position, cos.ctypes.data,
            sin.ctypes.data, cos.shape[1], len(cos), q.shape[1:3], _numpy._ref(q), _numpy._ref(q_rotated),
        )  # fmt: skip
    descales = {"k_descale": k_descale, "v_descale": v_descale}
    more.update(_quantised(descales, computes_descale, caches, batch, int4_group, kept))
    params = _call.kv_append(
        number, (batch, heads, seqlen_new, capacity, dim, v.shape[-1]), _numpy._ref(k), _numpy._ref(v),
        _numpy._ref(k_cache), _numpy._ref(v_cache), seqlens.ctypes.data, used.ctypes.data, pages, **more,
    )  # fmt: skip
    context(CPU).kv_append(params, None)
    return (used, q_rotated) if has_queries else used


def _number(caches, new, int4_group):
    """The number of k's dtype, after the checks of the arrays."""
    for name, array in (*caches.items(), *new.items()):
        _numpy.expect_array(name, array, "k_cache")
        if array.ndim != 4:
            raise InvalidArgumentError(f"{name} has shape {array.shape}; it must be (batch or pages, seqlen, heads, dim)")
    (k_cache, v_cache), (k, v) = caches.values(), new.values()
    shapes = {name: cache.shape for name, cache in caches.items()}
    for name, cache in caches.items():
        if (cache.dtype == np.uint8) != (int4_group is not None):
            found = f"{name} is {cache.dtype} and int4_group {int4_group!r}"
            raise InvalidArgumentError(f"{found}; int4_group goes with caches of uint8, and these with it")
        if int4_group is not None:
            shapes[name] = _eight.int4_columns(name, cache.shape, int4_group)
        # With a stride of 0 several keys would go to one place.
        strides = [stride for stride, size in zip(cache.strides, cache.shape) if size > 1]
        if not _numpy._expressible(cache) or 0 in strides or not cache.flags.writeable:
            found = f"strides of {cache.strides} bytes" if cache.flags.writeable else "data that must not be written"
            raise InvalidArgumentError(f"{name} has {found}; to be written, its last dim must be contiguous and no stride 0 or negative")
    if v_cache.dtype != k_cache.dtype or v_cache.shape[:3] != k_cache.shape[:3]:
        found, wanted = (f"{x.dtype} of shape {x.shape}" for x in (v_cache, k_cache))
        raise InvalidArgumentError(f"v_cache is {found}; k_cache is {wanted}, and all but the last dim must be the same")
    for name, array in new.items():
        wanted = (*k.shape[:2], *shapes[f"{name}_cache"][2:])
        if array.shape != wanted:
            raise InvalidArgumentError(f"{name} has shape {array.shape}; it must be {wanted}, as k and {name}_cache are")
    is_quantised = int4_group is not None or k_cache.dtype.name in _eight.NUMBERS
    dtype = k.dtype if is_quantised else k_cache.dtype
    for name, array in new.items():
        if array.dtype != dtype:
            raise InvalidArgumentError(f"{name} is {array.dtype}; it must be {dtype}, as {'k' if is_quantised else 'its cache'} is")
    return _numpy._number("k", k.dtype)


def _room(k_cache, block_table, cache_batch_idx, batch):
    """(keys that the cache holds for a sequence, the part of the params for pages, the table)."""
    entries, rows = k_cache.shape[:2]
    if block_table is None:
        if cache_batch_idx is None and entries != batch:
            raise InvalidArgumentError(f"k_cache has shape {k_cache.shape}; its first dim must be {batch}, as k's is")
        return rows, _call.NULL, None
    if cache_batch_idx is not None:
        raise InvalidArgumentError("cache_batch_idx and block_table are both given; a table names the pages of each sequence already")
    if not entries or not rows:
        raise InvalidArgumentError(f"k_cache has shape {k_cache.shape}; with block_table it must have pages, and pages must have keys")
    _numpy.expect_array("block_table", block_table, "k_cache")
    if block_table.dtype != np.int32 or block_table.ndim != 2 or len(block_table) != batch:
        found = f"{block_table.dtype} of shape {block_table.shape}"
        raise InvalidArgumentError(f"block_table is {found}; it must be int32 of shape ({batch}, pages), a row for each sequence of k")
    table = _numpy._contiguous("block_table", block_table)
    return table.shape[1] * rows, (table.ctypes.data, table.shape[1], rows, entries), table


def _vector(name, given, batch):
    """A contiguous int32 array (batch)."""
    _numpy.expect_array(name, given, "k_cache")
    if given.dtype != np.int32 or given.shape != (batch,):
        raise InvalidArgumentError(f"{name} is {given.dtype} of shape {given.shape}; it must be int32 of shape ({batch},)")
    return _numpy._contiguous(name, given)


def _lengths(given, batch, capacity, count, in_place):
    most = capacity - np.broadcast_to(count, batch)
    reason = f"the cache holds {capacity} keys of a sequence, and some are new"
    if isinstance(given, np.ndarray):
        lengths = _vector("cache_seqlens", given, batch)
        if in_place and (lengths is not given or not given.flags.writeable):
            raise InvalidArgumentError("cache_seqlens must be a contiguous array that may be written with in_place")
        _refuse("cache_seqlens", lengths, 0, most, reason)
        return lengths
    try:
        length = operator.index(given)
    except TypeError:
        raise InvalidArgumentError(f"cache_seqlens is {shown(given)}; it must be an int or an int32 array (batch)") from None
    if in_place:
        raise InvalidArgumentError(f"cache_seqlens is {shown(given)}; with in_place it must be a contiguous array")
    if not 0 <= length <= min(most, default=capacity):
        raise InvalidArgumentError(f"cache_seqlens is {length}; it must be from 0 to {min(most, default=capacity)}, since {reason}")
    return np.full(batch, length, np.int32)


def _refuse(name, numbers, least, most, reason):
    """Refuses a number outside of [least, most]; most may be a number for each."""
    most = np.broadcast_to(most, numbers.shape)
    for b in np.flatnonzero((numbers < least) | (numbers > most))[:1]:
        raise InvalidArgumentError(f"{name}[{b}] is {numbers[b]}; it must be from {least} to {most[b]}, since {reason}")


def _refuse_missing_pages(table, seqlens, count, k_cache):
    """Checks the pages that new keys go to. Pages of older keys may be gone, as behind a window."""
    num_pages, page_size = k_cache.shape[:2]
    first = np.arange(table.shape[1]) * page_size
    begin, end = seqlens[:, None], np.asarray(seqlens + count)[:, None]
    is_written = (first < end) & (first + page_size > begin) & (begin < end)
    for b, i in np.argwhere(is_written & ((table < 0) | (table >= num_pages)))[:1]:
        raise InvalidArgumentError(f"block_table[{b}][{i}] is {table[b, i]}; it must be below {num_pages}, the cache's pages, and not negative")


def _readable(name, array, written):
    """The array, or a copy where the library would write it or strides cannot express it."""
    if any(np.may_share_memory(array, other) for other in written):
        return array.copy()
    return array if _numpy._expressible(array) else _numpy._contiguous(name, array)


def _queries(q, k):
    """(q, room for the rotated q), without heads where there is no q."""
    if q is None:
        q = np.empty((len(k), 0, 0, k.shape[-1]), k.dtype)
    _numpy.expect_array("q", q, "k_cache")
    if q.dtype != k.dtype or q.ndim != 4 or len(q) != len(k) or q.shape[-1] != k.shape[-1]:
        wanted = f"{k.dtype} of shape ({len(k)}, seqlen_q, heads, {k.shape[-1]}), as k is"
        raise InvalidArgumentError(f"q is {q.dtype} of shape {q.shape}; it must be {wanted}")
    return (q if _numpy._expressible(q) else _numpy._contiguous("q", q)), np.empty(q.shape, q.dtype)


def _tables(cos, sin, k, capacity):
    tables, dim = [], k.shape[-1]
    for name, table in (("rotary_cos", cos), ("rotary_sin", sin)):
        if not isinstance(table, np.ndarray):
            raise InvalidArgumentError(f"{name} is {shown(table)}; rotary_cos and rotary_sin must be given together, as arrays")
        is_wide = table.ndim == 2 and len(table) >= capacity and 0 < 2 * table.shape[1] <= dim
        if table.dtype not in (k.dtype, np.float32) or not is_wide or (table.shape, table.dtype) != (cos.shape, cos.dtype):
            wanted = f"{k.dtype} or float32, with at least {capacity} rows and 1 to {dim // 2} columns, and both alike"
            raise InvalidArgumentError(f"{name} is {table.dtype} of shape {table.shape}; it must be {wanted}")
        tables.append(_numpy._contiguous(name, table))
    return tables


def _quantised(descales, computes, caches, batch, int4_group, kept):
    """The part of the params for caches of 8 bits and int4. Adds to `kept` what it refers to."""
    k_cache = caches["k_cache"]
    number = _eight.NUMBERS.get(k_cache.dtype.name)
    if number is None:
        reason = "the caches have not 8 bits" if int4_group is None else "rows of int4 hold their scales"
        for name, given in (*descales.items(), ("computes_descale", computes or None)):
            if given is not None:
                raise InvalidArgumentError(f"{name} is given; {reason}, so it must be left out")
        if int4_group is None:
            return {}
        return {"eight": _call.kv_eight(_eight.int4_number(int4_group), False, _call.NULL, _call.NULL, False)}
    rows, heads = k_cache.shape[:3], k_cache.shape[2]
    refs, of_keys = [], []
    for name, given in descales.items():
        scales, address, shape, strides = _numpy.scales(name, 1.0 if given is None else given, k_cache)
        if computes and (shape != rows or not given.flags.writeable or address != given.ctypes.data):
            raise InvalidArgumentError(f"{name} has shape {shape}; computed scales need a contiguous float32 array of shape {rows} that may be written")
        if shape not in (rows, (batch, heads)) and scales.size != 1:
            raise InvalidArgumentError(f"{name} has shape {shape}; it must be a number, {(batch, heads)} or {rows}")
        kept.append(scales)
        strides = [0 if size == 1 else stride for size, stride in zip(shape, strides)]
        if scales.size == 1 and not computes:
            refs.append((address, 0, 0, 0))
        else:
            of_keys.append(shape == rows)
            refs.append((address, *strides) if shape == rows else (address, strides[0], 0, strides[1]))
    if len(set(of_keys)) > 1:
        raise InvalidArgumentError("k_descale and v_descale have scales of different numbers of keys; both must have as many")
    return {"eight": _call.kv_eight(number, computes, *refs, any(of_keys))}
