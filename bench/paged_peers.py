"""The attention implementations over pages that bench/paged_prefill.py compares. Each takes the
queries and the cache of a problem and makes a call without arguments, which returns out. The last
query sees the last key. A peer that this machine lacks raises ImportError.
"""

import torch

WORKSPACE_BYTES = 256 << 20


def _fa3(q, cache):
    from flash_attn_interface import flash_attn_with_kvcache

    return lambda: flash_attn_with_kvcache(
        q, cache.k, cache.v, cache_seqlens=cache.lengths, page_table=cache.table, causal=True
    )


def _flashinfer(q, cache):
    """FlashInfer plans on the host from the lengths. The plan is made here, and is not timed."""
    import flashinfer

    batch, queries, heads, dim = q.shape
    page_size, heads_kv = cache.k.shape[1:3]
    sequences = torch.arange(batch + 1, dtype=torch.int32, device=q.device)
    last = (cache.lengths - 1) % page_size + 1
    workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=q.device)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
    wrapper.plan(
        sequences * queries, sequences * cache.table.shape[1], cache.table.flatten(), last,
        heads, heads_kv, dim, page_size, causal=True, q_data_type=q.dtype,
    )  # fmt: skip
    rows = q.reshape(-1, heads, dim)
    return lambda: wrapper.run(rows, (cache.k, cache.v)).view(q.shape)


PEERS = {"fa3": _fa3, "flashinfer": _flashinfer}
