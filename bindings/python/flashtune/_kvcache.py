"""Appending new keys and values to a K/V cache of torch tensors.

Wrong lengths and tables that the host can read are refused. The kernel skips sequences with other
wrong ones, so no call waits for the device. Knows nothing of attention, which calls the function
that writes.
"""

import operator
from typing import Any, NamedTuple

import torch

from . import _eight, _torch_launch
from ._errors import InvalidArgumentError, shown


class Rotary(NamedTuple):
    """A rotation as the caller gave it."""

    cos: Any
    sin: Any
    interleaved: bool
    q_at_one_position: bool


class Descales(NamedTuple):
    """The scales of caches of 8 bits as the caller gave them."""

    k: Any = None
    v: Any = None
    computes: Any = False
    int4_group: Any = None


def _quantised(descales, k_cache, v_cache, batch):
    """The argument of `_torch_launch.kv_append` for caches of 8 bits and int4; None for others."""
    if descales.computes is not True and descales.computes is not False:
        raise InvalidArgumentError(f"computes_descale is {descales.computes!r}; it must be False or True")
    if not _torch_launch.is_eight(k_cache):
        reason = "the caches have not 8 bits" if descales.int4_group is None else "rows of int4 hold their scales"
        for name, given in (("k_descale", descales.k), ("v_descale", descales.v), ("computes_descale", descales.computes or None)):
            if given is not None:
                raise InvalidArgumentError(f"{name} is given; {reason}, so it must be left out")
        return None if descales.int4_group is None else (_eight.int4_number(descales.int4_group), False, None, None, False)
    found, of_keys = [], []
    for name, given, cache in (("k_descale", descales.k, k_cache), ("v_descale", descales.v, v_cache)):
        scales, *_ = _torch_launch.scales(name, 1.0 if given is None else given, cache)
        rows, heads = tuple(cache.shape[:-1]), cache.shape[2]
        shape = tuple(scales.shape)
        if shape != rows and (descales.computes or scales.numel() != 1 and shape != (batch, heads)):
            allowed = rows if descales.computes else f"a number, {(batch, heads)} or {rows}"
            raise InvalidArgumentError(f"{name} has shape {shape}; it must be {allowed}")
        found.append(scales)
        of_keys.append(shape == rows)
    if of_keys[0] != of_keys[1] and 1 not in (found[0].numel(), found[1].numel()):
        raise InvalidArgumentError("k_descale and v_descale have scales of different numbers of keys; both must have as many")
    return _torch_launch.EIGHT[k_cache.dtype], descales.computes, *found, any(of_keys)


def rotary_of(cos, sin, interleaved, q_at_one_position):
    """The Rotary, or None without tables."""
    for name, flag in (("rotary_interleaved", interleaved), ("q_at_one_position", q_at_one_position)):
        if flag is not True and flag is not False:
            raise InvalidArgumentError(f"{name} is {flag!r}; it must be False or True")
    if cos is sin is None:
        return None
    for name, table in (("rotary_cos", cos), ("rotary_sin", sin)):
        if not isinstance(table, torch.Tensor):
            raise InvalidArgumentError(f"{name} is {shown(table)}; rotary_cos and rotary_sin must be given together, as tensors")
    return Rotary(cos, sin, interleaved, q_at_one_position)


def plan(
    q, k_cache, v_cache, k, v, cache_seqlens, block_table, cache_batch_idx=None, cache_leftpad=None, rotary=None,
    descales=Descales(),
):  # fmt: skip
    """(q to attend with, numbers of keys that the sequences use, function that writes, or None).

    Arguments as for `flash_attn_with_kvcache`. The function writes the new keys and, with a
    rotation, the q to attend with. Nothing is written before it is called, not even the numbers of
    keys.
    """
    if rotary is not None and k is v is None:
        raise InvalidArgumentError("rotary_cos is given without k and v; only new keys and their queries are rotated")
    call = _plan(
        ("q", q), k_cache, v_cache, k, v, cache_seqlens, block_table, cache_batch_idx, rotary=rotary, q=q, descales=descales
    )
    if cache_leftpad is not None:
        _expect_leftpad(cache_leftpad, q, call, cache_seqlens, 0 if k is None else k.shape[1])
    return call.q, call.used, call.write


def append(
    k_cache, v_cache, k, v, cache_seqlens, block_table, cache_batch_idx=None, seqused_new=None, in_place=False, rotary=None,
    q=None, descales=Descales(),
):  # fmt: skip
    """`flashtune.kv_append`."""
    if torch.compiler.is_dynamo_compiling():
        from ._torch_untraced import untraced

        return untraced(
            append, k_cache, v_cache, k, v, cache_seqlens, block_table, cache_batch_idx, seqused_new, in_place, rotary, q, descales
        )  # fmt: skip
    for name, tensor in (("v_cache", v_cache), ("k", k), ("v", v)):
        _torch_launch.expect_array(name, tensor, "k_cache")
    if q is not None and rotary is None:
        raise InvalidArgumentError("q is given without rotary_cos and rotary_sin; without a rotation leave it out")
    if q is not None:
        _torch_launch.expect_array("q", q, "k_cache")
    if in_place is not True and in_place is not False:
        raise InvalidArgumentError(f"in_place is {in_place!r}; it must be False or True")
    if in_place:
        _expect_advancing(cache_seqlens)
    call = _plan(
        ("k", k), k_cache, v_cache, k, v, cache_seqlens, block_table, cache_batch_idx, seqused_new, in_place, rotary, q, descales
    )
    _expect_alike(k, k_cache, v_cache, block_table, cache_batch_idx)
    call.write()
    return call.used if q is None else (call.used, call.q)


class _Call(NamedTuple):
    q: Any
    used: Any
    write: Any
    capacity: int


def _plan(
    like, k_cache, v_cache, k, v, cache_seqlens, block_table, cache_batch_idx=None, seqused_new=None, in_place=False,
    rotary=None, q=None, descales=Descales(),
):  # fmt: skip
    """`plan`. `like`, a name and a tensor, gives the number of sequences and the device."""
    cos, sin, *_ = rotary or (None, None)
    for name, tensor in (
        like, ("k_cache", k_cache), ("v_cache", v_cache), ("k", k), ("v", v), ("q", q), ("cache_seqlens", cache_seqlens),
        ("block_table", block_table), ("cache_batch_idx", cache_batch_idx), ("seqused_new", seqused_new), ("rotary_cos", cos),
        ("rotary_sin", sin),
    ):  # fmt: skip
        if isinstance(tensor, torch.Tensor):
            _torch_launch.refuse_layout(name, tensor)
    if not like[1].dim() == k_cache.dim() == v_cache.dim() == 4:
        given = (like, ("k_cache", k_cache), ("v_cache", v_cache))
        name, tensor = next((name, tensor) for name, tensor in given if tensor.dim() != 4)
        raise InvalidArgumentError(f"{name} has shape {tuple(tensor.shape)}; it must be (batch or pages, seqlen, heads, dim)")
    num_pages, capacity, *_ = k_cache.shape
    if block_table is not None:
        if cache_batch_idx is not None:
            raise InvalidArgumentError("cache_batch_idx and block_table are both given; a table names the pages of each sequence already")
        page_size, capacity = capacity, capacity * _pages(block_table, like)
        if num_pages == 0 or page_size == 0:
            found = tuple(k_cache.shape)
            raise InvalidArgumentError(f"k_cache has shape {found}; with block_table it must have pages, and pages must have keys")
    room = _Room(capacity, block_table is not None)
    if cache_batch_idx is not None:
        _expect_entries(cache_batch_idx, like, num_pages)
    if k is None and v is None:
        return _Call(q, _seqlens(cache_seqlens, like, room, 0), None, capacity)
    _expect_new(like, k_cache, v_cache, k, v, cache_seqlens, capacity, descales.int4_group)
    count = k.shape[1]
    if seqused_new is not None:
        _expect_vector("seqused_new", seqused_new, like)
        if _is_on_host(seqused_new):
            count = seqused_new.clamp(0, count)
    seqlens = _seqlens(cache_seqlens, like, room, count)
    if block_table is not None and _is_on_host(block_table):
        _refuse_missing_pages(block_table, seqlens + count, k_cache)
    q_rotated, turned = q, None
    if rotary is not None:
        like_cache = k if _torch_launch.is_quantised(k_cache) else k_cache
        q_rotated, turned = _rotation(rotary, q, k, like_cache, capacity)
    used = seqlens if in_place else torch.empty_like(seqlens, memory_format=torch.contiguous_format)
    slots = None if cache_batch_idx is seqused_new is None and not in_place else (seqused_new, cache_batch_idx)
    tensors = k_cache, v_cache, k, v, seqlens, block_table, used
    eight = _quantised(descales, k_cache, v_cache, len(k))
    if slots is turned is eight is None:
        return _Call(q, used, lambda: _torch_launch.kv_append(*tensors), capacity)
    return _Call(q_rotated, used, lambda: _torch_launch.kv_append(*tensors, slots, turned, eight), capacity)


class _Room(NamedTuple):
    """The keys that the cache holds for a sequence, and whether its pages decide that."""

    keys: int
    is_paged: bool

    def __str__(self):
        return f"a row of block_table has pages for {self.keys} keys" if self.is_paged else f"the cache holds {self.keys} keys of a sequence"


def _rotation(rotary, q, k, k_cache, capacity):
    """(tensor for the rotated q or None, the arguments of `_torch_launch.kv_append`)"""
    for name, table in (("rotary_cos", rotary.cos), ("rotary_sin", rotary.sin)):
        if table.dtype not in (k_cache.dtype, torch.float32) or table.device != k_cache.device:
            wanted = f"{k_cache.dtype}, as the cache is, or torch.float32, on {k_cache.device}"
            raise InvalidArgumentError(f"{name} is {table.dtype} on {table.device}; it must be {wanted}")
        found, dim = tuple(table.shape), k.shape[-1]
        if len(found) != 2 or found[0] < capacity or not 0 < 2 * found[1] <= dim:
            expected = f"at least {capacity} rows, the keys of a sequence that the cache holds, and 1 to {dim // 2} columns"
            raise InvalidArgumentError(f"{name} has shape {found}; it must have {expected}")
    if rotary.sin.shape != rotary.cos.shape or rotary.sin.dtype != rotary.cos.dtype:
        of_sin, of_cos = (f"{x.dtype} of shape {tuple(x.shape)}" for x in (rotary.sin, rotary.cos))
        raise InvalidArgumentError(f"rotary_sin is {of_sin}; it must be {of_cos}, as rotary_cos is")
    if q is None:
        q = k.new_empty((len(k), 0, 0, k.shape[-1]))
    if q.dim() != 4 or len(q) != len(k) or q.shape[-1] != k.shape[-1]:
        raise InvalidArgumentError(f"q has shape {tuple(q.shape)}; it must be ({len(k)}, seqlen_q, heads, {k.shape[-1]}), as k is")
    if q.dtype != k_cache.dtype or q.device != k_cache.device:
        wanted = f"{k_cache.dtype} on {k_cache.device}, as the cache is"
        raise InvalidArgumentError(f"q is {q.dtype} on {q.device}; it must be {wanted}")
    q_rotated = q.new_empty(q.shape)
    return q_rotated, (rotary.cos, rotary.sin, rotary.interleaved, q, q_rotated, rotary.q_at_one_position)


def _expect_vector(name, tensor, like):
    whose, q = like
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} is a {type(tensor).__name__}; it must be a torch tensor, as {whose} is")
    _expect_int32(name, tensor, q)
    if tensor.shape != (len(q),):
        raise InvalidArgumentError(f"{name} has shape {tuple(tensor.shape)}; it must be ({len(q)},), one for each sequence of {whose}")


def _expect_entries(cache_batch_idx, like, entries):
    _expect_vector("cache_batch_idx", cache_batch_idx, like)
    if _is_on_host(cache_batch_idx):
        for b in ((cache_batch_idx < 0) | (cache_batch_idx >= entries)).nonzero()[:1, 0].tolist():
            found = f"cache_batch_idx[{b}] is {cache_batch_idx[b]}"
            raise InvalidArgumentError(f"{found}; it must be below {entries}, the cache's entries, and not negative")


def _expect_leftpad(cache_leftpad, q, call, cache_seqlens, seqlen_new):
    if isinstance(cache_leftpad, torch.Tensor):
        _torch_launch.refuse_layout("cache_leftpad", cache_leftpad)
    _expect_vector("cache_leftpad", cache_leftpad, ("q", q))
    if not (_is_on_host(cache_leftpad) and _is_on_host(cache_seqlens)):
        return
    length = call.capacity if cache_seqlens is None else cache_seqlens + seqlen_new
    for b in ((cache_leftpad < 0) | (cache_leftpad > length)).nonzero()[:1, 0].tolist():
        of_b = int(length[b]) if isinstance(length, torch.Tensor) else length
        found = f"cache_leftpad[{b}] is {cache_leftpad[b]}"
        raise InvalidArgumentError(f"{found}; it must be from 0 to {of_b}, the rows of its entry that the sequence uses")


def _expect_advancing(cache_seqlens):
    if not isinstance(cache_seqlens, torch.Tensor) or not cache_seqlens.is_contiguous():
        raise InvalidArgumentError(f"cache_seqlens is {shown(cache_seqlens)}; with in_place it must be a contiguous tensor")


def _is_on_host(given):
    """Whether the host can read it: an int, or a tensor in host memory."""
    return not isinstance(given, torch.Tensor) or given.device.type == "cpu"


def is_on_device(cache_seqlens):
    """Whether `plan` reads no lengths of a call without new keys.

    There are none, or a GPU has them.
    """
    return cache_seqlens is None or not _is_on_host(cache_seqlens)


def _seqlens(given, like, room, seqlen_new):
    """int32 (batch) on the device of `like`, or None. seqlen_new may be a number for each."""
    if given is None:
        return None
    whose, q = like
    most = room.keys - seqlen_new
    if not isinstance(given, torch.Tensor):
        try:
            length = operator.index(given)
        except TypeError:
            raise InvalidArgumentError(f"cache_seqlens is {shown(given)}; it must be an int or an int32 tensor (batch)") from None
        # The smallest of no numbers is the whole room.
        least = most if not isinstance(most, torch.Tensor) else int(most.min()) if len(most) else room.keys
        if not 0 <= length <= least:
            raise _past_the_cache(f"cache_seqlens is {length}", room, least)
        return torch.full((q.shape[0],), length, dtype=torch.int32, device=q.device)
    _expect_int32("cache_seqlens", given, q)
    found, expected = given.shape, (q.shape[0],)
    if found != expected:
        raise InvalidArgumentError(f"cache_seqlens has shape {tuple(found)}; it must be {expected}, one for each sequence of {whose}")
    if _is_on_host(given):
        for b in ((given < 0) | (given > most)).nonzero()[:1, 0].tolist():
            of_b = int(most[b]) if isinstance(most, torch.Tensor) else most
            raise _past_the_cache(f"cache_seqlens[{b}] is {given[b]}", room, of_b)
    return given


def _past_the_cache(found, room, most):
    needed = f"with {room.keys - most} new keys it must be" if most != room.keys else "it must be"
    return InvalidArgumentError(f"{found}; {needed} from 0 to {most}, since {room}")


def _pages(block_table, like):
    """The number of pages of each sequence."""
    whose, q = like
    if not isinstance(block_table, torch.Tensor):
        raise TypeError(f"block_table is a {type(block_table).__name__}; it must be a torch tensor, as {whose} is")
    _expect_int32("block_table", block_table, q)
    found, batch = block_table.shape, q.shape[0]
    if len(found) != 2 or found[0] != batch:
        expected = f"({batch}, pages), a row for each sequence of {whose}"
        raise InvalidArgumentError(f"block_table has shape {tuple(found)}; it must be {expected}")
    return found[1]


def _expect_int32(name, tensor, q):
    if tensor.dtype is not torch.int32 or tensor.device != q.device:
        raise InvalidArgumentError(f"{name} is {tensor.dtype} on {tensor.device}; it must be torch.int32 on {q.device}")


def _expect_new(like, k_cache, v_cache, k, v, cache_seqlens, capacity, int4_group):
    whose, q = like
    for name, tensor in (("k", k), ("v", v)):
        if not isinstance(tensor, torch.Tensor):
            raise InvalidArgumentError(f"{name} is {shown(tensor)}; k, v and cache_seqlens must be given together, k and v as tensors")
    if cache_seqlens is None:
        raise InvalidArgumentError("cache_seqlens is None; k, v and cache_seqlens must be given together")
    for name, new, cache in (("k", k, k_cache), ("v", v, v_cache)):
        if (cache.dtype is torch.uint8) != (int4_group is not None):
            found = f"{name}_cache is {cache.dtype} and int4_group {int4_group!r}"
            raise InvalidArgumentError(f"{found}; int4_group goes with caches of torch.uint8, and these with it")
        shape = cache.shape if int4_group is None else _eight.int4_columns(f"{name}_cache", cache.shape, int4_group)
        expected = (len(q), "seqlen_new" if new is k else k.shape[1], *shape[2:])
        found = tuple(new.shape)
        if len(found) != 4 or any(size != wanted for size, wanted in zip(found, expected) if wanted != "seqlen_new"):
            sizes = ", ".join(map(str, expected))
            raise InvalidArgumentError(f"{name} has shape {found}; it must be ({sizes}), as {whose} and {name}_cache are")
        dtype = k.dtype if _torch_launch.is_quantised(cache) else cache.dtype
        if new.dtype != dtype or new.device != cache.device:
            wanted = f"{dtype} on {cache.device}, as {'k' if dtype != cache.dtype else 'its cache'} is"
            raise InvalidArgumentError(f"{name} is {new.dtype} on {new.device}; it must be {wanted}")
        # Attention would read a copy of such a cache, without the new keys; with a stride of 0
        # several keys would go to one place.
        strides = [stride for stride, size in zip(cache.stride(), cache.shape) if size > 1]
        if cache.stride(-1) != 1 or 0 in strides:
            found = cache.stride()
            raise InvalidArgumentError(f"{name}_cache has strides {found}; to be written, the last must be 1 and none may be 0")
    if k.shape[1] > capacity:
        raise InvalidArgumentError(f"k has {k.shape[1]} new keys of a sequence; the cache holds {capacity} keys of one")


def _expect_alike(k, k_cache, v_cache, block_table, cache_batch_idx):
    """The checks that attention makes on its own tensors."""
    is_named = block_table is not None or cache_batch_idx is not None
    expected = (len(k_cache) if is_named else len(k), *k_cache.shape[1:3])
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        found = tuple(cache.shape)
        if found[:3] != expected:
            sizes = ", ".join(map(str, expected))
            raise InvalidArgumentError(f"{name} has shape {found}; it must be ({sizes}, dim), as k and k_cache are")
    if v_cache.dtype != k_cache.dtype or v_cache.device != k_cache.device:
        wanted = f"{k_cache.dtype} on {k_cache.device}, as k_cache is"
        raise InvalidArgumentError(f"v_cache is {v_cache.dtype} on {v_cache.device}; it must be {wanted}")


def _refuse_missing_pages(block_table, lengths, k_cache):
    num_pages, page_size = k_cache.shape[:2]
    is_used = torch.arange(block_table.shape[1], device=block_table.device) * page_size < lengths[:, None]
    is_missing = (block_table < 0) | (block_table >= num_pages)
    for b, i in (is_used & is_missing).nonzero()[:1].tolist():
        found = f"block_table[{b}][{i}] is {block_table[b, i]}"
        raise InvalidArgumentError(f"{found}; it must be below {num_pages}, the cache's pages, and not negative")
