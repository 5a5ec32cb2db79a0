"""Runs small problems that reach the edges of every kernel, in fp16, bf16 and fp32, for
scripts/sanitize_on_gpu_host.sh.

Both passes: odd lengths and dims, GQA, masks, dropout, few heads, then each feature by itself.
Forward only: the batch-invariant mode, decoding with and without pages (in fp32 without), writing
into a K/V cache, and merging. Tensors of 8 bits and int4: k and v with their scales beside a 16-bit
q, prompts and decoding; q, k and v in e4m3, on Hopper; quantising and writing into a cache. The
arguments name the parts to run; without arguments all parts run.
"""

import sys

import flashtune
import torch

# batch, heads_q, heads_kv, seqlen_q, seqlen_k, head_dim, head_dim_v, causal, dropout_p
PROBLEMS = [
    (1, 2, 2, 128, 128, 64, 64, False, 0.0),
    (2, 4, 2, 65, 130, 128, 128, True, 0.1),
    (1, 2, 1, 70, 33, 40, 40, "top-left", 0.0),
    (1, 1, 1, 17, 200, 72, 24, True, 0.2),
    (1, 2, 2, 129, 127, 256, 256, True, 0.0),
    (1, 2, 1, 130, 201, 192, 160, True, 0.0),  # columns in three boxes
    (1, 2, 1, 70, 150, 192, 128, False, 0.1),
    (1, 1, 1, 1, 5, 3, 7, False, 0.0),
    (2, 80, 8, 130, 130, 64, 64, True, 0.0),  # more tiles than CTAs
]
# Few heads over many keys: tiles whose keys are split, and CTAs that do more tiles than they have
# slots for. batch, heads_q, heads_kv, seqlen_q, seqlen_k, head_dim, head_dim_v, causal
FEW_HEADS = [
    (1, 3, 3, 3000, 3000, 64, 64, True),
    (1, 3, 3, 3000, 3000, 64, 64, False),
    (1, 5, 5, 2100, 2100, 128, 128, True),
    (1, 4, 1, 1000, 1000, 64, 64, True),
    (2, 20, 20, 600, 154, 128, 128, False),  # few keys beside the queries
]
# The problem of each feature: batch, heads_q, heads_kv, seqlen_q, seqlen_k, head_dim. Lengths are
# odd and take several tiles.
FEATURED = {
    torch.float16: (2, 4, 2, 131, 201, 64),
    torch.bfloat16: (1, 2, 1, 150, 333, 128),
    torch.float32: (1, 2, 1, 131, 201, 72),
}
EIGHT = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)
# q, k and v in e4m3: batch, heads_q, heads_kv, seqlen_q, seqlen_k, head_dim, head_dim_v, and
# whether causal. Head dims have whole and partial boxes, and columns of V past a multiple of 32.
E4M3_PROBLEMS = [
    (1, 2, 1, 200, 333, 64, 64, False),
    (2, 2, 2, 131, 2300, 128, 128, True),  # sums of P V move
    (1, 2, 2, 129, 201, 256, 256, True),
    (1, 1, 1, 70, 150, 192, 80, False),
    (2, 72, 8, 200, 200, 64, 64, True),  # more tiles than CTAs
    (1, 1, 1, 5, 4000, 128, 128, False),  # keys that may be split
]


def tensor(*shape, dtype=torch.float32):
    return torch.randn(shape, device="cuda", dtype=dtype)


def qkv(dtype, batch, heads_q, heads_kv, seqlen_q, seqlen_k, head_dim, head_dim_v):
    shapes = (seqlen_q, heads_q, head_dim), (seqlen_k, heads_kv, head_dim), (seqlen_k, heads_kv, head_dim_v)
    return [tensor(batch, *shape, dtype=dtype).requires_grad_() for shape in shapes]


def int32(*values):
    return torch.tensor(values, dtype=torch.int32, device="cuda")


def features(dtype, batch, heads, seqlen_q, seqlen_k):
    """{feature: keyword arguments of flashtune.attention_varlen, or of flashtune.attention for a
    block mask}."""
    # Some rows list no block, and the last blocks are partial.
    size = 64
    blocks, full = (torch.rand(batch, heads, -(-seqlen_q // size), -(-seqlen_k // size), device="cuda") > 0.5 for _ in range(2))
    blocks[:, :, 1], full[:, :, 1] = False, False
    return {
        "window": dict(causal=True, window=(40, 0)),
        "window to both sides": dict(window=(70, 20)),
        "softcap": dict(softcap=15.0),
        "ALiBi": dict(causal=True, alibi_slopes=torch.rand(batch, heads, device="cuda")),
        "bias": dict(bias=tensor(1, heads, seqlen_q, seqlen_k, dtype=dtype)),
        "bias with a gradient": dict(bias=tensor(1, heads, 1, seqlen_k, dtype=dtype).requires_grad_()),
        "mask": dict(mask=torch.rand(batch, 1, seqlen_q, seqlen_k, device="cuda") > 0.3),
        "mask of bits": dict(mask_bits=torch.randint(256, (batch, 1, seqlen_q, -(-seqlen_k // 8)), dtype=torch.uint8, device="cuda")),
        "block mask": dict(causal=True, block_mask=flashtune.block_mask(blocks, block_size=size)),
        "block mask, some full": dict(
            mask=torch.rand(batch, 1, seqlen_q, seqlen_k, device="cuda") > 0.3,
            block_mask=flashtune.block_mask(blocks, full, block_size=size),
        ),
        "sinks": dict(sinks=tensor(heads).requires_grad_()),
        "padded": dict(seqused_q=int32(*[seqlen_q, 3][:batch]), seqused_k=int32(*[0, seqlen_k - 7][-batch:])),
        "deterministic": dict(causal=True, deterministic=True, dropout_p=0.1),
    }


def end_to_end(dtype, heads_q, heads_kv, head_dim):
    """(q, k, v) and keyword arguments of three packed sequences: one has no queries, and unused
    rows follow the last one."""
    shapes = (200, heads_q, head_dim), (333, heads_kv, head_dim), (333, heads_kv, head_dim)
    inputs = [tensor(*shape, dtype=dtype).requires_grad_() for shape in shapes]
    lengths = dict(cu_seqlens_q=int32(0, 131, 131, 199), cu_seqlens_k=int32(0, 201, 240, 330))
    return inputs, dict(causal=True, window=(60, 0), max_seqlen_q=131, max_seqlen_k=201, **lengths)


def both_passes(inputs, used_q=None, used_k=None, **options):
    """Runs both passes. used_q and used_k are the rows of packed sequences; rows behind them are
    not written."""
    attend = flashtune.attention if "block_mask" in options else flashtune.attention_varlen
    out, lse = attend(*inputs, return_lse=True, **options)
    out, lse = out[:used_q], lse[..., :used_q]
    learnt = [x for x in (*inputs, *options.values()) if isinstance(x, torch.Tensor) and x.requires_grad]
    # The LSE gets a gradient too, in the rows that see a key.
    dq, dk, dv, *others = torch.autograd.grad(out.sum() + lse[lse.isfinite()].sum(), learnt)
    torch.cuda.synchronize()
    assert all(x.isfinite().all() for x in (out, dq[:used_q], dk[:used_k], dv[:used_k], *others)), options


def batch_invariant(dtype, head_dim):
    """Runs the batch-invariant mode with many queries, and with one, whose keys are split."""
    for seqlen_q in (131, 1):
        q, k, v = (x.detach() for x in qkv(dtype, 2, 4, 2, seqlen_q, 1100, head_dim, head_dim))
        out, lse = flashtune.attention_forward(q, k, v, causal=True, batch_invariant=True)
        torch.cuda.synchronize()
        assert out.isfinite().all() and lse.isfinite().all()


def decode(dtype, seqlen_q, seqlen_k, page_size):
    """Decodes over enough keys for several splits; with a page_size from pages in random order."""
    batch, heads_q, heads_kv, head_dim = 2, 8, 2, 128
    q = tensor(batch, seqlen_q, heads_q, head_dim, dtype=dtype)
    pages = -(-seqlen_k // page_size) if page_size else 0
    shape = (batch * pages, page_size) if page_size else (batch, seqlen_k)
    k, v = (tensor(*shape, heads_kv, head_dim, dtype=dtype) for _ in range(2))
    lengths = int32(seqlen_k, seqlen_k // 3)
    table = torch.randperm(batch * pages, dtype=torch.int32, device="cuda").view(batch, pages) if page_size else None
    out = flashtune.attention_kvcache(
        q, k, v, block_table=table, seqused_k=lengths, causal=True, softcap=30.0, sinks=tensor(heads_q)
    )
    torch.cuda.synchronize()
    assert out.isfinite().all(), (seqlen_q, page_size)


def merge(dtype):
    q, k, v = (x.detach() for x in qkv(dtype, 2, 4, 2, 5, 300, 72, 72))
    parts = [flashtune.attention_forward(q, k[:, part], v[:, part]) for part in (slice(0, 101), slice(101, 300))]
    out, lse = flashtune.merge(*zip(*parts))
    torch.cuda.synchronize()
    assert out.isfinite().all() and lse.isfinite().all()


def in_pages(tensors, page_size):
    """(tensors in pages, block table) of tensors (batch, keys, …), the pages in random order."""
    batch, keys = tensors[0].shape[:2]
    pages = -(-keys // page_size)
    order = torch.randperm(batch * pages, device="cuda")
    made = []
    for x in tensors:
        rows = torch.zeros(batch, pages * page_size, *x.shape[2:], dtype=x.dtype, device="cuda")
        # Indexing knows no tensors of 8 bits but those of integers.
        rows.view(torch.uint8)[:, :keys] = x.view(torch.uint8)
        pool = torch.empty_like(rows).view(batch * pages, page_size, *x.shape[2:])
        pool.view(torch.uint8)[order] = rows.view_as(pool).view(torch.uint8)
        made.append(pool)
    return made, order.to(torch.int32).view(batch, pages)


def quantised_caches(dtype, to, batch, heads, keys, head_dim, head_dim_v, keys_per_descale):
    """(k, k_descale, v, v_descale); k is rotated."""
    k, v = (tensor(batch, keys, heads, dim, dtype=dtype) for dim in (head_dim, head_dim_v))
    options = dict(keys_per_descale=keys_per_descale)
    return *flashtune.quantize(k, to, rotation_seed=1, **options), *flashtune.quantize(v, to, **options)


def over_eight_bits(dtype, to, seqlen_q, seqlen_k, head_dim, keys_per_descale, page_size):
    """A prompt or a decoding step of a 16-bit q over keys of 8 bits."""
    q = tensor(2, seqlen_q, 4, head_dim, dtype=dtype)
    k, ks, v, vs = quantised_caches(dtype, to, 2, 2, seqlen_k, head_dim, head_dim, keys_per_descale)
    table = None
    if page_size and keys_per_descale == 1:
        (k, v, ks, vs), table = in_pages((k, v, ks, vs), page_size)
    elif page_size:
        (k, v), table = in_pages((k, v), page_size)
    lengths = int32(seqlen_k, seqlen_k // 3)
    out = flashtune.attention_kvcache(q, k, v, block_table=table, seqused_k=lengths, causal=True, k_descale=ks, v_descale=vs)
    torch.cuda.synchronize()
    assert out.isfinite().all(), (to, seqlen_q, head_dim, keys_per_descale, page_size)


def all_of_e4m3(batch, heads_q, heads_kv, seqlen_q, seqlen_k, head_dim, head_dim_v, causal, keys_per_descale, page_size=None, **options):
    q = tensor(batch, seqlen_q, heads_q, head_dim, dtype=torch.bfloat16)
    q, qs = flashtune.quantize(q, torch.float8_e4m3fn, heads_per_descale=heads_q // heads_kv, rotation_seed=1)
    k, ks, v, vs = quantised_caches(torch.bfloat16, q.dtype, batch, heads_kv, seqlen_k, head_dim, head_dim_v, keys_per_descale)
    if page_size:
        (k, v), table = in_pages((k, v), page_size)
        options |= dict(block_table=table, seqused_k=int32(*[seqlen_k, seqlen_k // 3][:batch]))
    out = flashtune.attention_kvcache(q, k, v, causal=causal, q_descale=qs, k_descale=ks, v_descale=vs, **options)
    torch.cuda.synchronize()
    assert out.isfinite().all(), (seqlen_q, seqlen_k, head_dim, options)


def kv_append(dtype, page_size, head_dim, head_dim_v, seqlen_new):
    """Appends at odd lengths: into sequences with room, without room, with a negative length
    and, with pages, without a page for the last key."""
    batch, heads_kv, pages = 5, 3, 50
    rows = page_size * pages if page_size else 40 + 2 * seqlen_new
    shape = (batch * pages, page_size) if page_size else (batch, rows)
    k, v = (tensor(batch, seqlen_new, heads_kv, dim, dtype=dtype) for dim in (head_dim, head_dim_v))
    k_cache, v_cache = (tensor(*shape, heads_kv, dim, dtype=dtype) for dim in (head_dim, head_dim_v))
    room = rows - seqlen_new
    table = None
    if page_size:
        table = torch.randperm(batch * pages, dtype=torch.int32, device="cuda").view(batch, pages)
        table[4, (7 + seqlen_new - 1) // page_size] = batch * pages
    used = flashtune.kv_append(k_cache, v_cache, k, v, int32(0, room, room + 1, -1, 7), block_table=table)
    torch.cuda.synchronize()
    assert used.tolist() == [seqlen_new, rows, room + 1, 0, 7 if page_size else 7 + seqlen_new], (used, page_size)


def plain(dtype):
    for *shape, causal, dropout_p in PROBLEMS:
        both_passes(qkv(dtype, *shape), causal=causal, dropout_p=dropout_p)


def few_heads(dtype):
    if dtype != torch.float32:
        for *shape, causal in FEW_HEADS:
            both_passes(qkv(dtype, *shape), causal=causal)


def featured(dtype):
    batch, heads_q, heads_kv, seqlen_q, seqlen_k, head_dim = FEATURED[dtype]
    for options in features(dtype, batch, heads_q, seqlen_q, seqlen_k).values():
        both_passes(qkv(dtype, *FEATURED[dtype], head_dim), **options)
    inputs, options = end_to_end(dtype, heads_q, heads_kv, head_dim)
    both_passes(inputs, used_q=199, used_k=330, **options)
    batch_invariant(dtype, head_dim)


def one_query(dtype):
    for page_size in (None, 16, 3):
        # GPU kernels take pages of fp16 or bf16 only.
        decode(dtype, 1, 2000, None if dtype == torch.float32 else page_size)
    merge(dtype)
    for page_size in (None, 1, 3, 16):
        for dims in ((128, 128), (40, 24), (33, 7)):
            for seqlen_new in (1, 35):
                kv_append(dtype, page_size, *dims, seqlen_new)


def several_queries(dtype):
    """Decodes enough queries for teams of several warps, which synchronise at named barriers."""
    decode(dtype, 5, 2000, None if dtype == torch.float32 else 64)


def eight_bits(dtype):
    if dtype == torch.float32:
        return
    for to in EIGHT:
        for keys_per_descale in (0, 128, 1):
            over_eight_bits(dtype, to, 1, 700, 128, keys_per_descale, None)
            over_eight_bits(dtype, to, 70, 200, 128, keys_per_descale, None)
            over_eight_bits(dtype, to, 1, 700, 64, keys_per_descale, 16)
            over_eight_bits(dtype, to, 70, 200, 64, keys_per_descale, 16)
        for seqlen, head_dim in ((1, 128), (7, 128), (333, 40)):
            for heads_per_descale in (1, 3):
                flashtune.quantize(tensor(2, seqlen, 6, head_dim, dtype=dtype), to, heads_per_descale=heads_per_descale)
        append_eight_bits(dtype, to)
    for group in (32, 64):
        for seqlen_q, head_dim, page_size in ((1, 128, None), (70, 64, 16), (5, 256, 3)):
            over_int4(dtype, group, seqlen_q, 230, head_dim, page_size)
    torch.cuda.synchronize()


def over_int4(dtype, group, seqlen_q, seqlen_k, head_dim, page_size):
    """A prompt or a decoding step over rows of int4 that `kv_append` writes."""
    q = tensor(2, seqlen_q, 4, head_dim, dtype=dtype)
    new = [tensor(2, seqlen_k, 2, head_dim, dtype=dtype) for _ in range(2)]
    pages = -(-seqlen_k // (page_size or seqlen_k))
    table = torch.randperm(2 * pages, dtype=torch.int32, device="cuda").view(2, pages) if page_size else None
    rows = 2 * pages, page_size or seqlen_k, 2, flashtune.int4_row_bytes(head_dim, group)
    caches = [torch.full(rows, 255, dtype=torch.uint8, device="cuda") for _ in range(2)]
    used = flashtune.kv_append(*caches, *new, int32(0, 0), block_table=table, seqused_new=int32(seqlen_k, seqlen_k // 3), int4_group=group)
    out = flashtune.attention_kvcache(q, *caches, block_table=table, seqused_k=used, causal=True, int4_group=group)
    torch.cuda.synchronize()
    assert out.isfinite().all(), (group, seqlen_q, head_dim, page_size)


def append_eight_bits(dtype, to):
    """Appends 3 keys behind 40, and computes their scales."""
    k, v = (tensor(2, 3, 2, dim, dtype=dtype) for dim in (64, 40))
    k_cache, v_cache = (torch.zeros(2, 60, 2, dim, dtype=to, device="cuda") for dim in (64, 40))
    ks, vs = (torch.ones(2, 60, 2, device="cuda") for _ in range(2))
    used = flashtune.kv_append(k_cache, v_cache, k, v, int32(40, 0), k_descale=ks, v_descale=vs, computes_descale=True)
    torch.cuda.synchronize()
    assert used.tolist() == [43, 3] and (ks[0, 40:43] != 1).all()


def e4m3(dtype):
    """q, k and v in e4m3, whose output is bf16."""
    if dtype != torch.bfloat16 or torch.cuda.get_device_capability() != (9, 0):
        return
    for problem in E4M3_PROBLEMS:
        for keys_per_descale in (0, 128):
            all_of_e4m3(*problem, keys_per_descale)
    small = (2, 2, 1, 70, 200, 64, 64, True)
    all_of_e4m3(*small, 0, page_size=16)
    all_of_e4m3(*small, 128, page_size=64)
    all_of_e4m3(*small, 0, window=(40, 0))
    all_of_e4m3(*small, 0, softcap=15.0, sinks=tensor(2), alibi_slopes=torch.rand(2, 2, device="cuda"))
    all_of_e4m3(*small, 0, seqused_k=int32(200, 3), seqused_q=int32(70, 1))


PARTS = {
    "plain": plain,
    "few-heads": few_heads,
    "features": featured,
    "decode": one_query,
    "decode-teams": several_queries,
    "eight-bits": eight_bits,
    "e4m3": e4m3,
}

for part in sys.argv[1:] or PARTS:
    for dtype in FEATURED:
        PARTS[part](dtype)
    print(f"{part}: done", flush=True)
