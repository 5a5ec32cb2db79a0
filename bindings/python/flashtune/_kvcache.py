"""Writing new keys and values behind those that a cache of torch tensors holds, by indices on the cache's own device."""

import torch

from ._errors import InvalidArgumentError


def append(k_cache, v_cache, k, v, cache_seqlens, block_table):
    """The new lengths. As of `flash_attn_with_kvcache`; the host reads nothing of lengths and tables."""
    for name, tensor in (("k", k), ("v", v), ("cache_seqlens", cache_seqlens)):
        if not isinstance(tensor, torch.Tensor):
            raise InvalidArgumentError(f"{name} is {tensor!r}; k, v and cache_seqlens must be given together, as tensors")
    for name, new, cache in (("k", k, k_cache), ("v", v, v_cache)):
        expected = (*k.shape[:2], *cache.shape[2:])
        if tuple(new.shape) != expected or len(expected) != 4:
            raise InvalidArgumentError(f"{name} has shape {tuple(new.shape)}; it must be (batch, seqlen_new, {expected[2:]})")
        if new.dtype != cache.dtype:
            raise InvalidArgumentError(f"{name} is {new.dtype}; it must be {cache.dtype}, as its cache is")
    batch_size, seqlen_new = k.shape[:2]
    if tuple(cache_seqlens.shape) != (batch_size,):
        raise InvalidArgumentError(f"cache_seqlens has shape {tuple(cache_seqlens.shape)}; it must be {(batch_size,)}")
    positions = cache_seqlens.long()[:, None] + torch.arange(seqlen_new, device=k.device)
    if block_table is None:
        entries, rows = torch.arange(batch_size, device=k.device)[:, None], positions
    else:
        page_size = k_cache.shape[1]
        entries, rows = block_table.long().gather(1, positions // page_size), positions % page_size
    with torch.no_grad():
        k_cache[entries, rows] = k
        v_cache[entries, rows] = v
    return cache_seqlens + seqlen_new
