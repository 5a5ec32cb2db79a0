"""Writing new keys and values behind those that a cache of torch tensors holds, by indices on the cache's own device.

What the host can see of lengths and tables is refused where it is wrong; the rest is left out by the indices themselves,
so that nothing waits for the device. Knows nothing of attention, which decides when the cache is written.
"""

import operator

import torch

from ._errors import InvalidArgumentError


def plan(q, k_cache, v_cache, k, v, cache_seqlens, block_table):
    """(how many keys each sequence uses, the function that writes the new ones into the cache), the latter None without new ones.
    Arguments as of `flash_attn_with_kvcache`; nothing is written before the function is called."""
    for name, tensor in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache)):
        if tensor.dim() != 4:
            raise InvalidArgumentError(f"{name} has shape {tuple(tensor.shape)}; it must be (batch or pages, seqlen, heads, dim)")
    capacity = k_cache.shape[1] if block_table is None else _pages(block_table, q) * k_cache.shape[1]
    if k is None and v is None:
        return _seqlens(cache_seqlens, q, capacity, 0), None
    _expect_new(q, k_cache, v_cache, k, v, cache_seqlens, capacity)
    seqlens = _seqlens(cache_seqlens, q, capacity, k.shape[1])
    if block_table is not None and _is_seen(block_table):
        _refuse_missing_pages(block_table, seqlens + k.shape[1], k_cache)
    if _is_seen(cache_seqlens) and (block_table is None or _is_seen(block_table)):
        used, places = seqlens + k.shape[1], (*_rows(seqlens, block_table, k.shape[1], k_cache), None, None)
    else:
        used, *places = _places(seqlens, block_table, k.shape[1], k_cache)
    return used, lambda: _write((k_cache, k), (v_cache, v), *places)


def _is_seen(given):
    """Whether the host has looked at it: lengths as an int, or a tensor of its own memory."""
    return not isinstance(given, torch.Tensor) or given.device.type == "cpu"


def _seqlens(given, q, capacity, seqlen_new):
    """int32 (batch) on q's device, or None."""
    if given is None:
        return None
    most = capacity - seqlen_new
    needed = f"with {seqlen_new} new keys it must be from 0 to {most}" if seqlen_new else f"it must be from 0 to {most}"
    reason = f"{needed}, since the cache holds {capacity} keys of a sequence"
    if not isinstance(given, torch.Tensor):
        try:
            length = operator.index(given)
        except TypeError:
            raise InvalidArgumentError(f"cache_seqlens is {given!r}; it must be an int or an int32 tensor (batch)") from None
        if not 0 <= length <= most:
            raise InvalidArgumentError(f"cache_seqlens is {length}; {reason}")
        return torch.full((q.shape[0],), length, dtype=torch.int32, device=q.device)
    _expect_int32("cache_seqlens", given, q)
    if tuple(given.shape) != (q.shape[0],):
        found = tuple(given.shape)
        raise InvalidArgumentError(f"cache_seqlens has shape {found}; it must be {(q.shape[0],)}, one for each sequence of q")
    if _is_seen(given):
        for b in ((given < 0) | (given > most)).nonzero()[:1, 0].tolist():
            raise InvalidArgumentError(f"cache_seqlens[{b}] is {given[b]}; {reason}")
    return given


def _pages(block_table, q):
    """How many of a sequence."""
    if not isinstance(block_table, torch.Tensor):
        raise TypeError(f"block_table is a {type(block_table).__name__}; it must be a torch tensor, as q is")
    _expect_int32("block_table", block_table, q)
    if block_table.dim() != 2 or len(block_table) != len(q):
        found = tuple(block_table.shape)
        raise InvalidArgumentError(f"block_table has shape {found}; it must be ({len(q)}, pages), a row for each sequence of q")
    return block_table.shape[1]


def _expect_int32(name, tensor, q):
    if tensor.dtype != torch.int32 or tensor.device != q.device:
        raise InvalidArgumentError(f"{name} is {tensor.dtype} on {tensor.device}; it must be torch.int32 on {q.device}")


def _expect_new(q, k_cache, v_cache, k, v, cache_seqlens, capacity):
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
            raise InvalidArgumentError(f"{name} has shape {found}; it must be ({sizes}), as q and {name}_cache are")
        if new.dtype != cache.dtype or new.device != cache.device:
            wanted = f"{cache.dtype} on {cache.device}, as its cache is"
            raise InvalidArgumentError(f"{name} is {new.dtype} on {new.device}; it must be {wanted}")
        # Of anything else attention would read a copy that lacks the new keys, or several would go to one place.
        strides = [stride for stride, size in zip(cache.stride(), cache.shape) if size > 1]
        if cache.stride(-1) != 1 or 0 in strides:
            found = cache.stride()
            raise InvalidArgumentError(f"{name}_cache has strides {found}; to be written to the last must be 1 and none 0")
    if k.shape[1] > capacity:
        raise InvalidArgumentError(f"k has {k.shape[1]} new keys of a sequence; the cache holds {capacity} keys of one")


def _refuse_missing_pages(block_table, lengths, k_cache):
    num_pages, page_size = k_cache.shape[:2]
    is_used = torch.arange(block_table.shape[1]) * page_size < lengths[:, None]
    is_missing = (block_table < 0) | (block_table >= num_pages)
    for b, i in (is_used & is_missing).nonzero()[:1].tolist():
        found = f"block_table[{b}][{i}] is {block_table[b, i]}"
        raise InvalidArgumentError(f"{found}; it must be below {num_pages}, the cache's pages, and not negative")


def _rows(seqlens, block_table, seqlen_new, k_cache):
    """(entries, rows) of the cache, where the keys behind so many go."""
    positions = seqlens.long()[:, None] + torch.arange(seqlen_new, device=seqlens.device)
    if block_table is None:
        return torch.arange(len(seqlens), device=seqlens.device)[:, None], positions
    if not positions.numel():
        return positions, positions
    page_size = k_cache.shape[1]
    return block_table.gather(1, positions // page_size).long(), positions % page_size


def _places(seqlens, block_table, seqlen_new, k_cache):
    """(keys used, entries and rows of the cache, whose new keys go there, whether those fit) of what nobody has looked at. A
    sequence that has no room for its new keys, or no page, gets none."""
    capacity = k_cache.shape[1] * (1 if block_table is None else block_table.shape[1])
    before = seqlens.clamp(0, capacity - seqlen_new)
    fits = before == seqlens
    entries, rows = _rows(before, block_table, seqlen_new, k_cache)
    source = None
    if block_table is not None and rows.numel():
        fits &= ((entries >= 0) & (entries < len(k_cache))).all(1)
        # The pages of one that has no room may be another's, whose new keys must not meet old ones there: it writes the same keys
        # to the same place as the first that has room, if any.
        source = torch.where(fits, torch.arange(len(seqlens), device=seqlens.device), fits.int().argmax())
        entries, rows = entries.clamp(0, max(0, len(k_cache) - 1))[source], rows[source]
    used = torch.where(fits, seqlens + seqlen_new, seqlens.clamp(0, capacity))
    return used, entries, rows, source, fits if source is None else fits[source]


def _write(keys, values, entries, rows, source, fits):
    """keys and values are pairs of the cache and what is new. fits is None where all do."""
    with torch.no_grad():
        for cache, new in (keys, values):
            new = new if source is None else new[source]
            # What does not fit leaves what is there.
            cache[entries, rows] = new if fits is None else torch.where(fits[:, None, None, None], new, cache[entries, rows])
