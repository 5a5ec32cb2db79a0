"""More of flash-attn's decoding call: rotation, entries by index, left padding, limits of splits.

Expected values are plain attention over each sequence's keys, rotated in fp64. Every other row of
the cache holds NaN. The same tests run on the CPU and on a GPU.
"""

import random as python_random

import flashtune
import pytest
import torch
from flashtune import _kvcache
from flashtune import flash_attn_interface as interface
from judge import assert_close
from oracle_torch import plain, random
from test_torch import DEVICES, NARROW_DEVICES, working_dtype

BATCH, HEADS, HEADS_KV, DIM, CACHED = 3, 4, 2, 32, 60
SEQLENS = [23, 5, 50]
ENTRIES = [4, 0, 2]
LEFTPAD = [7, 0, 50]


def int32(values, device):
    return torch.tensor(values, dtype=torch.int32, device=device)


def tables(rows, rotary_dim, dtype, device):
    """(cos, sin), rounded to dtype."""
    speeds = 10_000.0 ** (-torch.arange(rotary_dim // 2, dtype=torch.float64) * 2 / rotary_dim)
    angles = torch.arange(rows, dtype=torch.float64)[:, None] * speeds
    return [x.to(device, dtype) for x in (angles.cos(), angles.sin())]


def rotated(x, positions, cos, sin, interleaved):
    """x (seqlen, heads, dim) in fp64, turned by the rows of the tables at these positions."""
    x, half = x.double().clone(), cos.shape[1]
    c, s = (table.double()[positions][:, None] for table in (cos, sin))
    first, second = (slice(0, 2 * half, 2), slice(1, 2 * half, 2)) if interleaved else (slice(half), slice(half, 2 * half))
    a, b = x[..., first].clone(), x[..., second].clone()
    x[..., first], x[..., second] = a * c - b * s, a * s + b * c
    return x


class Slots:
    """A cache of more entries than sequences, each with its keys behind some padding."""

    def __init__(self, dtype, device, by_index, padded, seed=5):
        self.entries = ENTRIES if by_index else list(range(BATCH))
        self.leftpad = LEFTPAD if padded else [0] * BATCH
        count = max(self.entries) + 2 if by_index else BATCH
        self.k, self.v = random(*[(count, CACHED, HEADS_KV, DIM)] * 2, dtype=dtype, device=device, seed=seed)
        for entry in range(count):
            used = dict(zip(self.entries, zip(self.leftpad, SEQLENS))).get(entry, (0, 0))
            for x in (self.k, self.v):
                x[entry, : used[0]] = torch.nan
                x[entry, used[1] :] = torch.nan
        self.arguments = dict(cache_seqlens=int32(SEQLENS, device))
        if by_index:
            self.arguments["cache_batch_idx"] = int32(ENTRIES, device)
        if padded:
            self.arguments["cache_leftpad"] = int32(LEFTPAD, device)

    def keys(self, b, length):
        return [x[self.entries[b], self.leftpad[b] : length] for x in (self.k, self.v)]


def assert_attends(out, q, keys, b, **options):
    """`q` (seqlen, heads, dim) and `keys` in fp64."""
    dtype = out.dtype
    exact = plain(q[None], *(x[None] for x in keys), **options)
    naive = plain(q[None].to(dtype), *(x[None].to(dtype) for x in keys), **options)
    assert_close(f"out of {b}", *(x.double().cpu().numpy() for x in (out[None], naive, exact)), str(dtype).removeprefix("torch."))


def combinations():
    choose = python_random.Random(3)
    for at in range(16):
        yield dict(
            seqlen_q=choose.choice([1, 1, 2, 9]), seqlen_new=choose.choice([1, 2, 9]), causal=choose.choice([True, False]),
            window_size=choose.choice([(-1, -1), (-1, -1), (12, 0)]), rotary_dim=choose.choice([None, 32, 16, 10]),
            interleaved=choose.choice([True, False]), fp32_tables=choose.choice([True, False]), by_index=choose.choice([True, False]),
            padded=choose.choice([True, False]), num_splits=choose.choice([0, 1, 3]), softcap=choose.choice([0.0, 0.0, 3.0]), seed=at,
        )  # fmt: skip


@pytest.mark.parametrize("how", list(combinations()), ids=lambda how: str(how["seed"]))
@pytest.mark.parametrize("device, dtype", NARROW_DEVICES)
def test_combined_options_agree_with_plain_attention(device, dtype, how):
    cache = Slots(dtype, device, how["by_index"], how["padded"], how["seed"])
    new = how["seqlen_new"]
    shapes = (BATCH, how["seqlen_q"], HEADS, DIM), *[(BATCH, new, HEADS_KV, DIM)] * 2
    q, k, v = random(*shapes, dtype=dtype, device=device, seed=how["seed"])
    given, before = [x.clone() for x in (q, k, v)], [x.clone() for x in (cache.k, cache.v)]
    has_positions = how["causal"] or how["window_size"] != (-1, -1)
    arguments = dict(causal=how["causal"], window_size=how["window_size"], softcap=how["softcap"], num_splits=how["num_splits"])
    cos = sin = None
    if how["rotary_dim"]:
        cos, sin = tables(CACHED + 3, how["rotary_dim"], torch.float32 if how["fp32_tables"] else dtype, device)
        arguments.update(rotary_cos=cos, rotary_sin=sin, rotary_interleaved=how["interleaved"])
    for _ in range(2):
        # The second call may repeat the first, and overwrites the same rows.
        out = interface.flash_attn_with_kvcache(q, cache.k, cache.v, k, v, **cache.arguments, **arguments)
    assert all(torch.equal(now, then) for now, then in zip((q, k, v), given))

    step = torch.finfo(dtype).eps
    window = None if how["window_size"] == (-1, -1) else (12, -1 if how["causal"] else 0)
    for b, length in enumerate(SEQLENS):
        rows = torch.arange(length, length + new, device=device)
        queries, of_q = q[b].double(), torch.arange(how["seqlen_q"], device=device) * has_positions + length
        turned = k[b].double()
        if cos is not None:
            turned = rotated(k[b], rows, cos, sin, how["interleaved"])
            queries = rotated(q[b], of_q.clamp(max=len(cos) - 1), cos, sin, how["interleaved"])
        in_cache = cache.k[cache.entries[b], length : length + new]
        torch.testing.assert_close(in_cache.double(), turned, atol=step, rtol=step)
        assert torch.equal(cache.v[cache.entries[b], length : length + new], v[b])
        keys = [x.double() for x in cache.keys(b, length + new)]
        assert_attends(out[b], queries.to(dtype).double(), keys, b, causal=how["causal"], window=window, softcap=how["softcap"])
    changed = [(now.isnan() != then.isnan()).any((-1, -2)).sum() for now, then in zip((cache.k, cache.v), before)]
    assert changed == [BATCH * new] * 2


@pytest.mark.parametrize("device", DEVICES)
def test_padding_without_lengths_hides_the_first_rows(device):
    dtype = working_dtype(device)
    q, k, v = random((BATCH, 2, HEADS, DIM), *[(BATCH, CACHED, HEADS_KV, DIM)] * 2, dtype=dtype, device=device)
    for b, padding in enumerate(LEFTPAD):
        for x in (k, v):
            x[b, :padding] = torch.nan
    out = interface.flash_attn_with_kvcache(q, k, v, cache_leftpad=int32(LEFTPAD, device), causal=True)
    for b, padding in enumerate(LEFTPAD):
        assert_attends(out[b], q[b].double(), [x[b, padding:].double() for x in (k, v)], b, causal=True)


@pytest.mark.parametrize("device", DEVICES)
def test_a_repeated_call_takes_entries_padding_and_splits_of_its_own(device, monkeypatch):
    # As on a GPU, where no lengths are read. Then a call without new keys repeats an earlier one.
    monkeypatch.setattr(_kvcache, "_is_on_host", lambda given: not isinstance(given, torch.Tensor))
    cache = Slots(torch.bfloat16, device, True, True)
    (q,) = random((BATCH, 2, HEADS, DIM), dtype=torch.bfloat16, device=device)
    attend = interface.flash_attn_with_kvcache
    first = attend(q, cache.k, cache.v, **cache.arguments, causal=True)
    swapped = {name: x.flip(0) for name, x in cache.arguments.items()}
    for _ in range(2):
        assert torch.equal(attend(q.flip(0), cache.k, cache.v, **swapped, causal=True), first.flip(0))
        assert torch.equal(attend(q, cache.k, cache.v, **cache.arguments, causal=True), first)
        assert_close_to(attend(q, cache.k, cache.v, **cache.arguments, causal=True, num_splits=1), first)
        # Without padding the rows before the first key are seen, which hold NaN.
        unpadded = {name: x for name, x in cache.arguments.items() if name != "cache_leftpad"}
        assert attend(q, cache.k, cache.v, **unpadded, causal=True)[0].isnan().any()


def assert_close_to(out, expected):
    torch.testing.assert_close(out, expected, atol=0.03, rtol=0.03)


@pytest.mark.parametrize("page_size", [None, 16])
@pytest.mark.parametrize("device", DEVICES)
def test_steps_advance_in_place_while_a_slot_is_idle(device, page_size):
    dtype = working_dtype(device)
    pages = -(-CACHED // (page_size or CACHED))
    shape = (BATCH * pages, page_size or CACHED, HEADS_KV, DIM)
    k_cache, v_cache = (torch.full(shape, torch.nan, dtype=dtype, device=device) for _ in range(2))
    table = None if page_size is None else int32([[b * pages + i for i in range(pages)] for b in range(BATCH)], device)
    cos, sin = tables(pages * (page_size or CACHED), 16, torch.float32, device)
    lengths, counts = int32([0, 3, 9], device), [[2, 1, 0], [0, 2, 0], [1, 0, 2]]
    address = lengths.data_ptr()
    for step, count in enumerate(counts):
        q, k, v = random((BATCH, 2, HEADS, DIM), *[(BATCH, 2, HEADS_KV, DIM)] * 2, dtype=dtype, device=device, seed=step)
        before = lengths.tolist()
        used, turned = flashtune.kv_append(
            k_cache, v_cache, k, v, lengths, block_table=table, seqused_new=int32(count, device), in_place=True,
            rotary_cos=cos, rotary_sin=sin, rotary_interleaved=False, q=q,
        )  # fmt: skip
        assert used is lengths and lengths.data_ptr() == address
        assert lengths.tolist() == [length + of_b for length, of_b in zip(before, count)]
        for b, length in enumerate(before):
            positions = torch.arange(length, length + 2, device=device)
            rows = k_cache.view(BATCH, -1, HEADS_KV, DIM)[b, length : length + 2]
            expected = [rotated(x[b], positions, cos, sin, False) for x in (k, q)]
            error = torch.finfo(dtype).eps
            torch.testing.assert_close(rows[: count[b]].double(), expected[0][: count[b]], atol=error, rtol=error)
            torch.testing.assert_close(turned[b].double(), expected[1], atol=error, rtol=error)
            assert rows[count[b] :].isnan().all()


@pytest.mark.parametrize("device", DEVICES)
def test_varlen_calls_take_the_number_of_used_keys(device):
    dtype = working_dtype(device)
    begins_q, begins_k = int32([0, 4, 5, 9], device), int32([0, 40, 40, 90], device)
    used = [33, 0, 50]
    q, k, v = random((9, HEADS, DIM), *[(90, HEADS_KV, DIM)] * 2, dtype=dtype, device=device)
    k[33:40] = v[33:40] = torch.nan
    attend = interface.flash_attn_varlen_func
    out = attend(q, k, v, begins_q, begins_k, 4, 50, causal=True, seqused_k=int32(used, device))
    for b, length in enumerate(used):
        of_b = slice(begins_q[b], begins_q[b + 1])
        keys = [x[begins_k[b] : begins_k[b] + length].double() for x in (k, v)]
        assert_attends(out[of_b], q[of_b].double(), keys, b, causal=True)
    pages = [torch.nn.functional.pad(x.nan_to_num(), (0, 0, 0, 0, 0, 6)).view(6, 16, HEADS_KV, DIM) for x in (k, v)]
    table = int32([[0, 1, 2, 0], [0, 0, 0, 0], [1, 2, 3, 4]], device)
    paged = attend(q, *pages, begins_q, begins_k, 4, 50, seqused_k=int32([30, 0, 50], device), block_table=table)
    assert_attends(paged[5:9], q[5:9].double(), [x.flatten(0, 1)[16:66].double() for x in pages], 2)
    assert_attends(paged[:4], q[:4].double(), [x.flatten(0, 1)[:30].double() for x in pages], 0)


WRONG = [
    (dict(rotary_cos=torch.ones(CACHED, 16)), "rotary_cos and rotary_sin must be given together"),
    (dict(rotary=(CACHED - 1, 16)), f"it must have at least {CACHED} rows"),
    (dict(rotary=(CACHED, 17)), "and 1 to 16 columns"),
    (dict(rotary=(CACHED, 0)), "and 1 to 16 columns"),
    (dict(rotary=(CACHED, 16), rotary_sin=torch.ones(CACHED, 15)), "rotary_sin is torch.float32 of shape (60, 15)"),
    (dict(rotary=(CACHED, 16), rotary_sin=torch.ones(CACHED, 16).half()), "rotary_sin is torch.float16"),
    (dict(rotary=(CACHED, 16), rotary_interleaved=1), "rotary_interleaved is 1"),
    (dict(rotary=(CACHED, 16), k=None, v=None), "rotary_cos is given without k and v"),
    (dict(cache_leftpad=[8, 0, 53]), "cache_leftpad[2] is 53; it must be from 0 to 52"),
    (dict(cache_leftpad=[8, -1, 0]), "cache_leftpad[1] is -1"),
    (dict(cache_leftpad=[8, 1]), "cache_leftpad has shape (2,)"),
    (dict(cache_leftpad=[0.5, 1, 2]), "cache_leftpad is torch.float32"),
    (dict(cache_batch_idx=[0, 1, 3]), "cache_batch_idx[2] is 3; it must be below 3"),
    (dict(cache_batch_idx=[-1, 1, 2]), "cache_batch_idx[0] is -1"),
    (dict(cache_batch_idx=[0, 1]), "cache_batch_idx has shape (2,)"),
    (dict(cache_batch_idx=[0, 1, 2], block_table=[[0], [1], [2]]), "cache_batch_idx and block_table are both given"),
    (dict(cache_leftpad=[0, 1, 2], block_table=[[0], [1], [2]]), "cache_leftpad and block_table are both given"),
    (dict(cache_seqlens=[59, 0, 0], block_table=[[0], [1], [2]]), "since a row of block_table has pages for 60 keys"),
    (dict(num_splits=-1), "num_splits is -1"),
    (dict(num_splits=2.5), "num_splits is 2.5"),
]


@pytest.mark.parametrize("change, message", WRONG, ids=[message for _, message in WRONG])
def test_wrong_options_are_refused_before_the_cache_is_written(change, message):
    q, k, v = random((BATCH, 1, HEADS, DIM), *[(BATCH, 2, HEADS_KV, DIM)] * 2, dtype=torch.float32, device="cpu")
    k_cache, v_cache = random(*[(BATCH, CACHED, HEADS_KV, DIM)] * 2, dtype=torch.float32, device="cpu", seed=1)
    before = [x.clone() for x in (k_cache, v_cache)]
    arguments = dict(q=q, k=k, v=v, cache_seqlens=int32(SEQLENS, "cpu"))
    change = {name: torch.tensor(value) if isinstance(value, list) else value for name, value in change.items()}
    change = {name: value.int() if getattr(value, "dtype", None) == torch.int64 else value for name, value in change.items()}
    if "rotary" in change:
        change = dict(rotary_cos=torch.ones(change["rotary"]), rotary_sin=torch.ones(change["rotary"])) | change
        del change["rotary"]
    with pytest.raises(flashtune.InvalidArgumentError) as error:
        interface.flash_attn_with_kvcache(k_cache=k_cache, v_cache=v_cache, **(arguments | change))
    assert message in str(error.value)
    assert all(torch.equal(now, then) for now, then in zip((k_cache, v_cache), before))
