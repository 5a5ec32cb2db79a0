"""Appending new keys and values to a K/V cache of torch tensors.

Wrong lengths and tables that the host can read are refused. The kernel skips sequences with other
wrong ones, so no call waits for the device. Knows nothing of attention, which calls the function
that writes.
"""

import operator

import torch

from . import _torch_launch
from ._errors import InvalidArgumentError


def plan(q, k_cache, v_cache, k, v, cache_seqlens, block_table):
    """(numbers of keys that the sequences use, function that writes the new keys, or None).

    Arguments as for `flash_attn_with_kvcache`. Nothing is written before the function is called,
    not even the numbers of keys.
    """
    return _plan(("q", q), k_cache, v_cache, k, v, cache_seqlens, block_table)


def append(k_cache, v_cache, k, v, cache_seqlens, block_table):
    """`flashtune.kv_append`."""
    for name, tensor in (("v_cache", v_cache), ("k", k), ("v", v)):
        _torch_launch.expect_array(name, tensor, "k_cache")
    used, write = _plan(("k", k), k_cache, v_cache, k, v, cache_seqlens, block_table)
    _expect_alike(k, k_cache, v_cache, block_table)
    write()
    return used


def _plan(like, k_cache, v_cache, k, v, cache_seqlens, block_table):
    """`plan`. `like`, a name and a tensor, gives the number of sequences and the device."""
    if not like[1].dim() == k_cache.dim() == v_cache.dim() == 4:
        given = (like, ("k_cache", k_cache), ("v_cache", v_cache))
        name, tensor = next((name, tensor) for name, tensor in given if tensor.dim() != 4)
        raise InvalidArgumentError(f"{name} has shape {tuple(tensor.shape)}; it must be (batch or pages, seqlen, heads, dim)")
    num_pages, capacity, *_ = k_cache.shape
    if block_table is not None:
        page_size, capacity = capacity, capacity * _pages(block_table, like)
        if num_pages == 0 or page_size == 0:
            found = tuple(k_cache.shape)
            raise InvalidArgumentError(f"k_cache has shape {found}; with block_table it must have pages, and pages must have keys")
    if k is None and v is None:
        return _seqlens(cache_seqlens, like, capacity, 0), None
    _expect_new(like, k_cache, v_cache, k, v, cache_seqlens, capacity)
    seqlens = _seqlens(cache_seqlens, like, capacity, k.shape[1])
    if block_table is not None and _is_on_host(block_table):
        _refuse_missing_pages(block_table, seqlens + k.shape[1], k_cache)
    used = torch.empty_like(seqlens, memory_format=torch.contiguous_format)
    return used, lambda: _torch_launch.kv_append(k_cache, v_cache, k, v, seqlens, block_table, used)


def _is_on_host(given):
    """Whether the host can read it: an int, or a tensor in host memory."""
    return not isinstance(given, torch.Tensor) or given.device.type == "cpu"


def is_on_device(cache_seqlens):
    """Whether `plan` reads no lengths of a call without new keys.

    There are none, or a GPU has them.
    """
    return cache_seqlens is None or not _is_on_host(cache_seqlens)


def _seqlens(given, like, capacity, seqlen_new):
    """int32 (batch) on the device of `like`, or None."""
    if given is None:
        return None
    whose, q = like
    most = capacity - seqlen_new
    if not isinstance(given, torch.Tensor):
        try:
            length = operator.index(given)
        except TypeError:
            raise InvalidArgumentError(f"cache_seqlens is {given!r}; it must be an int or an int32 tensor (batch)") from None
        if not 0 <= length <= most:
            raise _past_the_cache(f"cache_seqlens is {length}", capacity, seqlen_new)
        return torch.full((q.shape[0],), length, dtype=torch.int32, device=q.device)
    _expect_int32("cache_seqlens", given, q)
    found, expected = given.shape, (q.shape[0],)
    if found != expected:
        raise InvalidArgumentError(f"cache_seqlens has shape {tuple(found)}; it must be {expected}, one for each sequence of {whose}")
    if _is_on_host(given):
        for b in ((given < 0) | (given > most)).nonzero()[:1, 0].tolist():
            raise _past_the_cache(f"cache_seqlens[{b}] is {given[b]}", capacity, seqlen_new)
    return given


def _past_the_cache(found, capacity, seqlen_new):
    needed = f"with {seqlen_new} new keys it must be" if seqlen_new else "it must be"
    reason = f"since the cache holds {capacity} keys of a sequence"
    return InvalidArgumentError(f"{found}; {needed} from 0 to {capacity - seqlen_new}, {reason}")


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


def _expect_new(like, k_cache, v_cache, k, v, cache_seqlens, capacity):
    whose, q = like
    for name, tensor in (("k", k), ("v", v)):
        if not isinstance(tensor, torch.Tensor):
            raise InvalidArgumentError(f"{name} is {tensor!r}; k, v and cache_seqlens must be given together, k and v as tensors")
    if cache_seqlens is None:
        raise InvalidArgumentError("cache_seqlens is None; k, v and cache_seqlens must be given together")
    for name, new, cache in (("k", k, k_cache), ("v", v, v_cache)):
        expected = (len(q), "seqlen_new" if new is k else k.shape[1], *cache.shape[2:])
        found = tuple(new.shape)
        if len(found) != 4 or any(size != wanted for size, wanted in zip(found, expected) if wanted != "seqlen_new"):
            sizes = ", ".join(map(str, expected))
            raise InvalidArgumentError(f"{name} has shape {found}; it must be ({sizes}), as {whose} and {name}_cache are")
        if new.dtype != cache.dtype or new.device != cache.device:
            wanted = f"{cache.dtype} on {cache.device}, as its cache is"
            raise InvalidArgumentError(f"{name} is {new.dtype} on {new.device}; it must be {wanted}")
        # Attention would read a copy of such a cache, without the new keys; with a stride of 0
        # several keys would go to one place.
        strides = [stride for stride, size in zip(cache.stride(), cache.shape) if size > 1]
        if cache.stride(-1) != 1 or 0 in strides:
            found = cache.stride()
            raise InvalidArgumentError(f"{name}_cache has strides {found}; to be written, the last must be 1 and none may be 0")
    if k.shape[1] > capacity:
        raise InvalidArgumentError(f"k has {k.shape[1]} new keys of a sequence; the cache holds {capacity} keys of one")


def _expect_alike(k, k_cache, v_cache, block_table):
    """The checks that attention makes on its own tensors."""
    expected = (len(k) if block_table is None else len(k_cache), *k_cache.shape[1:3])
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
    is_used = torch.arange(block_table.shape[1]) * page_size < lengths[:, None]
    is_missing = (block_table < 0) | (block_table >= num_pages)
    for b, i in (is_used & is_missing).nonzero()[:1].tolist():
        found = f"block_table[{b}][{i}] is {block_table[b, i]}"
        raise InvalidArgumentError(f"{found}; it must be below {num_pages}, the cache's pages, and not negative")
