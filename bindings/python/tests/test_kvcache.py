"""flash-attn's decoding call on torch tensors, against plain attention over each sequence's keys.

The rest of the cache holds NaN. The same tests run on the CPU and on a GPU.
"""

import flashtune
import pytest
import torch
from flashtune import _torch_launch
from flashtune import flash_attn_interface as interface
from judge import assert_close
from oracle_torch import plain, random
from test_torch import DEVICES, NARROW_DEVICES, working_dtype

BATCH, HEADS, HEADS_KV, DIM, CACHED = 3, 8, 2, 64, 160
SEQLENS = [101, 0, 144]
SLOPES = torch.tensor([0.5, 0.25, 0.1, 0.05, 0.03, 0.02, 0.01, 0.0])


class Cache:
    """A cache of SEQLENS keys for each sequence, contiguous or in pages of `page_size`.

    The rest is NaN.
    """

    def __init__(self, page_size, dtype, device):
        self.page_size = page_size
        rows = random(*[(BATCH, CACHED, HEADS_KV, DIM)] * 2, dtype=dtype, device=device, seed=5)
        self.seqlens = torch.tensor(SEQLENS, dtype=torch.int32, device=device)
        for b, length in enumerate(SEQLENS):
            for x in rows:
                x[b, length:] = torch.nan
        self.table = None
        self.k, self.v = rows
        if page_size is not None:
            pages = -(-CACHED // page_size)
            order = torch.randperm(BATCH * pages + 1, generator=torch.Generator().manual_seed(3))
            self.table = order[: BATCH * pages].view(BATCH, pages).to(device, torch.int32)
            self.k, self.v = (self._in_pages(x, len(order)) for x in rows)

    def _in_pages(self, rows, num_pages):
        padded = torch.nn.functional.pad(rows, (0, 0, 0, 0, 0, -CACHED % self.page_size), value=torch.nan)
        cache = padded.new_full((num_pages, self.page_size, HEADS_KV, DIM), torch.nan)
        cache[self.table.long()] = padded.view(BATCH, -1, self.page_size, HEADS_KV, DIM)
        return cache

    def keys(self, b, length):
        """(k, v) of one sequence, contiguous."""
        if self.table is None:
            return [x[b : b + 1, :length] for x in (self.k, self.v)]
        return [x[self.table[b].long()].flatten(0, 1)[None, :length] for x in (self.k, self.v)]


def assert_attends(out, q, cache, lengths, **options):
    dtype = str(q.dtype).removeprefix("torch.")
    for b, length in enumerate(lengths):
        one = q[b : b + 1], *cache.keys(b, length)
        naive, exact = plain(*one, **options), plain(*(x.double() for x in one), **options)
        assert_close(f"out of {b}", *(x.double().cpu().numpy() for x in (out[b : b + 1], naive, exact)), dtype)


def assert_same(out, expected):
    """Compares results that different kernels may have made. Rounded weights change a whole row."""
    tolerance = 1e-5 if out.dtype == torch.float32 else 0.03
    torch.testing.assert_close(out, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("page_size", [None, 1, 16, 100])
@pytest.mark.parametrize("seqlen_q", [1, 5])
@pytest.mark.parametrize("device, dtype", NARROW_DEVICES)
def test_decoding_sees_the_keys_of_each_sequence(device, dtype, seqlen_q, page_size):
    cache = Cache(page_size, dtype, device)
    (q,) = random((BATCH, seqlen_q, HEADS, DIM), dtype=dtype, device=device)
    out, lse = interface.flash_attn_with_kvcache(
        q, cache.k, cache.v, cache_seqlens=cache.seqlens, block_table=cache.table, causal=True, return_softmax_lse=True
    )
    assert lse.shape == (BATCH, HEADS, seqlen_q) and torch.isneginf(lse[1]).all()
    assert_attends(out, q, cache, SEQLENS, causal=True)


@pytest.mark.parametrize(
    "options, meaning",
    [
        (dict(window_size=(40, 0)), dict(window=(40, 0))),
        (dict(window_size=(30, 5), causal=True), dict(window=(30, -1), causal=True)),
        (dict(softcap=1.5, softmax_scale=0.2), dict(softcap=1.5, softmax_scale=0.2)),
        (dict(alibi_slopes=SLOPES), dict(alibi_slopes=SLOPES)),
    ],
    ids=str,
)
@pytest.mark.parametrize("device", DEVICES)
def test_options_mean_the_same_as_in_flash_attn(device, options, meaning):
    dtype = working_dtype(device)
    cache = Cache(16, dtype, device)
    (q,) = random((BATCH, 2, HEADS, DIM), dtype=dtype, device=device)
    options, meaning = (
        {name: value.to(device) if name == "alibi_slopes" else value for name, value in some.items()} for some in (options, meaning)
    )
    arguments = dict(cache_seqlens=cache.seqlens, block_table=cache.table)
    assert_attends(interface.flash_attn_with_kvcache(q, cache.k, cache.v, **arguments, **options), q, cache, SEQLENS, **meaning)


@pytest.mark.parametrize("page_size", [None, 16, 100])
@pytest.mark.parametrize("device", DEVICES)
def test_new_keys_go_behind_those_of_the_cache_and_are_seen(device, page_size):
    dtype = working_dtype(device)
    cache = Cache(page_size, dtype, device)
    q, k, v = random((BATCH, 3, HEADS, DIM), *[(BATCH, 3, HEADS_KV, DIM)] * 2, dtype=dtype, device=device)
    before = [x.clone() for x in (cache.k, cache.v)]
    out = interface.flash_attn_with_kvcache(
        q, cache.k, cache.v, k, v, cache_seqlens=cache.seqlens, block_table=cache.table, causal=True
    )
    lengths = [length + 3 for length in SEQLENS]
    for b, length in enumerate(lengths):
        for rows, new in zip(cache.keys(b, length), (k, v)):
            assert torch.equal(rows[0, -3:], new[b])
    # The rest of the cache is unchanged.
    for now, then in zip((cache.k, cache.v), before):
        assert (now.isnan() != then.isnan()).any((-1, -2)).sum() == BATCH * 3
    assert_attends(out, q, cache, lengths, causal=True)


@pytest.mark.parametrize("device", DEVICES)
def test_one_length_may_be_an_int_and_none_is_all_of_the_cache(device):
    dtype = working_dtype(device)
    q, k, v = random((BATCH, 1, HEADS, DIM), *[(BATCH, 90, HEADS_KV, DIM)] * 2, dtype=dtype, device=device)
    attend = interface.flash_attn_with_kvcache
    assert_same(attend(q, k, v), interface.flash_attn_func(q, k, v))
    assert_same(attend(q, k, v, cache_seqlens=33), interface.flash_attn_func(q, k[:, :33], v[:, :33]))


@pytest.mark.parametrize("device", DEVICES)
def test_varlen_calls_read_pages(device):
    dtype = working_dtype(device)
    cache = Cache(16, dtype, device)
    begins_q = torch.tensor([0, 4, 5, 9], dtype=torch.int32, device=device)
    begins_k = torch.tensor([0, 101, 101, 245], dtype=torch.int32, device=device)
    (q,) = random((9, HEADS, DIM), dtype=dtype, device=device)
    out = interface.flash_attn_varlen_func(q, cache.k, cache.v, begins_q, begins_k, 4, 144, causal=True, block_table=cache.table)
    for b, length in enumerate(SEQLENS):
        rows = slice(int(begins_q[b]), int(begins_q[b + 1]))
        alone = interface.flash_attn_func(q[None, rows], *cache.keys(b, length), causal=True)[0]
        assert_same(out[rows], alone)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (dict(k=(BATCH, 1, 2, 8)), "v is None; k, v and cache_seqlens must be given together"),
        (dict(k=(BATCH, 1, 2, 8), v=(BATCH, 1, 2, 8)), "cache_seqlens is None"),
        (dict(k=(BATCH, 1, 2, 8), v=(BATCH, 2, 2, 8), cache_seqlens=4), r"v has shape .*; it must be \(3, 1, 2, 8\)"),
        (dict(k=(BATCH, 1, 1, 8), v=(BATCH, 1, 2, 8), cache_seqlens=4), r"k has shape .*; it must be \(3, seqlen_new, 2, 8\)"),
        (dict(k=(BATCH, 2, 8), v=(BATCH, 1, 2, 8), cache_seqlens=4), r"k has shape .*; it must be \(3, seqlen_new, 2, 8\)"),
        (dict(k=(1, 1, 2, 8), v=(1, 1, 2, 8), cache_seqlens=4), r"k has shape .*; it must be \(3, seqlen_new, 2, 8\)"),
    ],
)
def test_new_keys_that_do_not_fit_are_refused(arguments, message):
    q, cache = torch.ones(BATCH, 1, 2, 8), torch.ones(BATCH, 16, 2, 8)
    arguments = {name: torch.ones(value) if isinstance(value, tuple) else value for name, value in arguments.items()}
    with pytest.raises(ValueError, match=message):
        interface.flash_attn_with_kvcache(q, cache, cache, **arguments)


def ints(*values, dtype=torch.int32):
    return torch.tensor(values, dtype=dtype)


IN_A_ROW = [
    (dict(cache_seqlens=ints(4, -2, 4)), r"cache_seqlens\[1\] is -2; with 2 new keys it must be from 0 to 14"),
    (dict(cache_seqlens=ints(4, 4, 15)), r"cache_seqlens\[2\] is 15; with 2 new keys it must be from 0 to 14, .* holds 16"),
    (dict(cache_seqlens=-1), "cache_seqlens is -1; with 2 new keys"),
    (dict(cache_seqlens=2**40), "cache_seqlens is 1099511627776; with 2 new keys"),
    (dict(cache_seqlens=4.0), "cache_seqlens is 4.0; it must be an int or an int32 tensor"),
    (dict(cache_seqlens=ints(4, 4)), "cache_seqlens has shape"),
    (dict(cache_seqlens=ints(4, 4, 4, dtype=torch.int64)), "cache_seqlens is torch.int64"),
    (dict(cache_seqlens=ints(4, 4, 4, dtype=torch.float32)), "cache_seqlens is torch.float32"),
    (dict(softcap=float("nan")), "softcap is nan"),
    (dict(softcap=-1.0), "softcap is -1"),
    (dict(softmax_scale=float("nan")), "softmax_scale is"),
    (dict(softmax_scale=0), "softmax_scale is 0"),
    (dict(window_size=(-1, 2**40)), "window_right is"),
    (dict(alibi_slopes=torch.ones(5)), "alibi_slopes has shape"),
    (dict(q=torch.ones(BATCH, 2, 8)), "q has shape"),
    (dict(q=torch.ones(BATCH, 1, 2, 8).half()), "k is torch.float32"),
    (dict(q=torch.ones(BATCH, 1, 3, 8)), "num_heads_q is 3"),
    (dict(v_cache=torch.zeros(BATCH, 15, 2, 8)), "v has shape"),
    (dict(k_cache=torch.zeros(BATCH, 1, 2, 8)), "k has 2 new keys of a sequence; the cache holds 1"),
    (dict(k_cache=torch.zeros(BATCH, 16, 8, 2).mT), "k_cache has strides"),
    (dict(v_cache=torch.zeros(1, 16, 2, 8).expand(BATCH, -1, -1, -1)), "v_cache has strides"),
]
IN_PAGES = [
    (dict(block_table=torch.zeros(BATCH, 4)), "block_table is torch.float32"),
    (dict(block_table=torch.zeros(BATCH, 4).long()), "block_table is torch.int64"),
    (dict(block_table=torch.zeros(1, 4).int()), "block_table has shape"),
    (dict(block_table=ints([0, 1], [2, 3], [4, 6])), r"block_table\[2\]\[1\] is 6; it must be below 6"),
    (dict(block_table=ints([0, 1], [-1, 3], [4, 5])), r"block_table\[1\]\[0\] is -1; it must be below 6"),
    (dict(block_table=ints([0, 1], [2, 3], [4, 5]), cache_seqlens=ints(4, 7, 6)), r"cache_seqlens\[1\] is 7; .* from 0 to 6"),
]


@pytest.mark.parametrize("arguments, message", IN_A_ROW + IN_PAGES)
def test_refused_calls_leave_the_cache_unchanged(arguments, message):
    cache = (6, 4, 2, 8) if "block_table" in arguments else (BATCH, 16, 2, 8)
    arguments = {
        **dict(q=torch.ones(BATCH, 1, 2, 8), k_cache=torch.zeros(cache), v_cache=torch.zeros(cache)),
        **dict(k=torch.ones(BATCH, 2, 2, 8), v=torch.ones(BATCH, 2, 2, 8), cache_seqlens=ints(4, 0, 5)),
        **arguments,
    }
    with pytest.raises(ValueError, match=message):
        interface.flash_attn_with_kvcache(**arguments)
    assert not arguments["k_cache"].any() and not arguments["v_cache"].any()


def test_the_default_device_does_not_matter():
    cache, new, lengths = torch.zeros(2, 6, 4, 2, 8), torch.ones(3, 2, 2, 8), ints(1, 3, 6)
    table = ints([0, 1], [2, 3], [4, 5])
    with torch.device("meta"):
        used = flashtune.kv_append(cache[0], cache[1], new, new, lengths, block_table=table)
    assert used.tolist() == [3, 5, 8]


def test_pages_past_a_sequences_length_are_not_checked():
    q, k, v = (torch.ones(2, 1, 2, 8) for _ in range(3))
    cache = torch.zeros(2, 4, 2, 8)
    table = ints([0, -1], [1, 99])
    out = interface.flash_attn_with_kvcache(q, cache, cache.clone(), k, v, cache_seqlens=ints(0, 0), block_table=table)
    assert torch.equal(out, torch.ones_like(out)) and cache[:, 0].all() and not cache[:, 1:].any()


def append_unseen(cache, new, seqlens, table):
    """Appends keys of one head and dim with lengths and tables that the host does not check."""
    used = torch.full_like(seqlens, -9)
    _torch_launch.kv_append(cache, cache.clone(), new, new, seqlens, table, used)
    return used


@pytest.mark.parametrize("device", DEVICES)
def test_unchecked_lengths_without_room_write_nothing(device):
    cache, new = torch.zeros(4, 5, 1, 1, device=device), torch.tensor([[1.0, 2.0]] * 4, device=device)[..., None, None]
    used = append_unseen(cache, new, ints(-1, 3, 4, 2**31 - 1).to(device), None)
    assert used.tolist() == [0, 5, 4, 5]
    assert cache[..., 0, 0].tolist() == [[0] * 5, [0, 0, 0, 1, 2], [0] * 5, [0] * 5]


@pytest.mark.parametrize("device", DEVICES)
def test_unchecked_missing_pages_write_nothing_and_undo_no_other_write(device):
    # Only the third of six sequences has room, and the first two name its pages.
    table = ints([0, 1], [0, 1], [0, 1], [7, 1], [0, -1], [2**31 - 1, 0]).to(device)
    seqlens = ints(-3, 3, 1, 0, 1, 0).to(device)
    new = torch.arange(1.0, 13, device=device).view(6, 2, 1, 1)
    cache = torch.zeros(3, 2, 1, 1, device=device)
    used = append_unseen(cache, new, seqlens, table)
    assert used.tolist() == [0, 3, 3, 0, 1, 0]
    assert cache.flatten().tolist() == [0, 5, 6, 0, 0, 0]
    # If no sequence has room, the cache is unchanged.
    before = cache.clone()
    append_unseen(cache, new, seqlens - 4, table)
    assert torch.equal(cache, before)


@pytest.mark.parametrize("page_size", [None, 16])
@pytest.mark.parametrize("device, dtype", NARROW_DEVICES)
def test_a_cache_can_be_written_by_itself(device, dtype, page_size):
    cache, separate = (Cache(page_size, dtype, device) for _ in range(2))
    q, k, v = random((BATCH, 3, HEADS, DIM), *[(BATCH, HEADS_KV, 3, DIM)] * 2, dtype=dtype, device=device)
    k, v = k.transpose(1, 2), v.transpose(1, 2)
    out = interface.flash_attn_with_kvcache(
        q, cache.k, cache.v, k, v, cache_seqlens=cache.seqlens, block_table=cache.table, causal=True
    )
    used = flashtune.kv_append(separate.k, separate.v, k, v, separate.seqlens, block_table=separate.table)
    assert used.dtype == torch.int32 and used.tolist() == [length + 3 for length in SEQLENS]
    for written, other in zip((separate.k, separate.v), (cache.k, cache.v)):
        assert torch.equal(written.nan_to_num(), other.nan_to_num())
    attended = flashtune.attention_kvcache(q, separate.k, separate.v, seqused_k=used, block_table=separate.table, causal=True)
    assert torch.equal(attended, out)


@pytest.mark.parametrize("page_size", [None, 5])
def test_lengths_and_tables_need_not_be_contiguous(page_size):
    cache, expected = (Cache(page_size, torch.float32, "cpu") for _ in range(2))
    k, v = random(*[(BATCH, 3, HEADS_KV, DIM)] * 2, dtype=torch.float32, device="cpu")
    flashtune.kv_append(expected.k, expected.v, k, v, expected.seqlens, block_table=expected.table)
    strided = torch.stack([cache.seqlens, cache.seqlens + 1], dim=1)[:, 0]
    table = None if page_size is None else cache.table.t().contiguous().t()
    used = flashtune.kv_append(cache.k, cache.v, k, v, strided, block_table=table)
    assert used.tolist() == [length + 3 for length in SEQLENS]
    assert torch.equal(cache.k.nan_to_num(), expected.k.nan_to_num())
    assert torch.equal(cache.v.nan_to_num(), expected.v.nan_to_num())


CACHES = torch.zeros(BATCH, 16, 2, 8), torch.zeros(BATCH, 16, 2, 4)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (dict(k_cache=CACHES[0][:2]), r"k_cache has shape .*; it must be \(3, 16, 2, dim\)"),
        (dict(v_cache=CACHES[1][:2]), r"v_cache has shape .*; it must be \(3, 16, 2, dim\)"),
        (dict(v_cache=CACHES[1][:, :15]), "v_cache has shape"),
        (dict(v_cache=CACHES[1].double(), v=torch.ones(BATCH, 2, 2, 4).double()), "v_cache is torch.float64 on cpu; it must be"),
        (dict(v=torch.ones(BATCH, 2, 1, 4), v_cache=CACHES[1][:, :, :1]), "v_cache has shape"),
        (dict(v=torch.ones(BATCH, 2, 2, 8)), r"v has shape .*; it must be \(3, 2, 2, 4\), as k and v_cache are"),
        (dict(cache_seqlens=ints(4, 0, 15)), r"cache_seqlens\[2\] is 15; with 2 new keys"),
        (dict(cache_seqlens=ints(4, 0)), r"cache_seqlens has shape \(2,\); it must be \(3,\), one for each sequence of k"),
        (dict(block_table=ints([0, 1], [2, 0], [0, -1]), cache_seqlens=15), r"block_table\[2\]\[1\] is -1"),
        (dict(cache_seqlens=None), "cache_seqlens is None"),
    ],
)
def test_a_mismatched_cache_is_refused_unwritten(arguments, message):
    arguments = {
        **dict(k_cache=CACHES[0], v_cache=CACHES[1], k=torch.ones(BATCH, 2, 2, 8), v=torch.ones(BATCH, 2, 2, 4)),
        **dict(cache_seqlens=ints(4, 0, 5)),
        **arguments,
    }
    with pytest.raises(ValueError, match=message):
        flashtune.kv_append(**arguments)
    assert not any(cache.any() for cache in CACHES)


def test_non_tensors_are_refused_by_name():
    cache, new = torch.zeros(1, 4, 1, 8), torch.ones(1, 1, 1, 8)
    with pytest.raises(TypeError, match="k_cache is a list; it must be a NumPy array or a torch tensor"):
        flashtune.kv_append([1.0], cache, new, new, 0)
    with pytest.raises(TypeError, match="v is a float; it must be a torch tensor, as k_cache is"):
        flashtune.kv_append(cache, cache.clone(), new, 1.0, 0)


@pytest.mark.needs_gpu
@pytest.mark.parametrize("page_size", [None, 16])
def test_a_captured_step_writes_behind_the_lengths_of_its_replay(page_size):
    cache = Cache(page_size, torch.bfloat16, "cuda")
    q, k, v = random((BATCH, 1, HEADS, DIM), *[(BATCH, 1, HEADS_KV, DIM)] * 2, dtype=torch.bfloat16, device="cuda")

    def step():
        return interface.flash_attn_with_kvcache(q, cache.k, cache.v, k, v, cache_seqlens=cache.seqlens, block_table=cache.table)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    cache.seqlens += 1
    k.normal_()
    v.normal_()
    graph.replay()
    lengths = [length + 2 for length in SEQLENS]
    for b, length in enumerate(lengths):
        for rows, new in zip(cache.keys(b, length), (k, v)):
            assert torch.equal(rows[0, -1:], new[b])
    assert_attends(out, q, cache, lengths)


@pytest.mark.needs_gpu
@pytest.mark.parametrize("page_size", [None, 16])
def test_on_a_gpu_wrong_lengths_and_pages_neither_fault_nor_wait(page_size):
    cache = Cache(page_size, torch.bfloat16, "cuda")
    q, k, v = random((BATCH, 1, HEADS, DIM), *[(BATCH, 3, HEADS_KV, DIM)] * 2, dtype=torch.bfloat16, device="cuda")
    before = [x.clone() for x in (cache.k, cache.v)]
    seqlens = ints(-5, CACHED, 2**31 - 2).cuda()
    torch.cuda.set_sync_debug_mode("error")
    try:
        interface.flash_attn_with_kvcache(q, cache.k, cache.v, k, v, cache_seqlens=seqlens, block_table=cache.table)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    for now, then in zip((cache.k, cache.v), before):
        torch.testing.assert_close(now, then, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("device", DEVICES)
def test_autograd_notices_that_a_cache_was_written(device):
    dtype = working_dtype(device)
    k_cache, v_cache = random(*[(2, 8, HEADS_KV, DIM)] * 2, dtype=dtype, device=device, seed=1)
    k, v = random(*[(2, 1, HEADS_KV, DIM)] * 2, dtype=dtype, device=device, seed=2)
    weight = torch.ones(DIM, dtype=dtype, device=device, requires_grad=True)
    saved = (k_cache * weight).sum()
    before = k_cache._version, v_cache._version
    flashtune.kv_append(k_cache, v_cache, k, v, 3)
    assert k_cache._version > before[0] and v_cache._version > before[1]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        saved.backward()
    with torch.inference_mode():
        caches = [x.clone() for x in (k_cache, v_cache)]
        flashtune.kv_append(*caches, k, v, 3)
        assert torch.equal(caches[0][:, 3:4], k)


@pytest.mark.parametrize("device", DEVICES)
def test_new_keys_may_be_the_caches_own(device):
    dtype = working_dtype(device)
    k_cache, v_cache = random(*[(2, 8, HEADS_KV, DIM)] * 2, dtype=dtype, device=device, seed=3)
    expected = k_cache[:, 1:3].clone()
    used = flashtune.kv_append(k_cache, v_cache, k_cache[:, 1:3], v_cache[:, :2], 2)
    assert used.tolist() == [4, 4] and torch.equal(k_cache[:, 2:4], expected)
    # Keys and values with the same bytes would be written twice.
    with pytest.raises(flashtune.InvalidArgumentError, match="v_cache"):
        flashtune.kv_append(k_cache, k_cache[..., : DIM // 2], expected, expected[..., : DIM // 2], 2)


def test_sequences_that_share_a_page_leave_whole_rows_there_on_the_cpu():
    k_cache, v_cache = torch.zeros(2, 1, 4, HEADS_KV, DIM).unbind()
    new = torch.arange(1.0, 65).view(64, 1, 1, 1).expand(64, 4, HEADS_KV, DIM)
    flashtune.kv_append(k_cache, v_cache, new, -new, 0, block_table=torch.zeros(64, 1, dtype=torch.int32))
    rows = k_cache.flatten(0, 1)
    assert torch.equal(rows, rows[:, :, :1].expand_as(rows)) and rows.min() >= 1


def test_a_cache_without_pages_is_refused_by_its_shape():
    empty, k = torch.zeros(0, 4, HEADS_KV, DIM), torch.zeros(1, 1, HEADS_KV, DIM)
    with pytest.raises(flashtune.InvalidArgumentError, match=r"k_cache has shape \(0, 4"):
        flashtune.kv_append(empty, empty, k, k, 0, block_table=torch.zeros(1, 1, dtype=torch.int32))
