"""`kv_append` on NumPy arrays. test_kvcache.py has the same for torch tensors."""

import numpy as np
import pytest
from test_int4 import packed

import flashtune
from flashtune import InvalidArgumentError

BATCH, ROWS, HEADS, DIM, NEW = 3, 24, 2, 32, 3
LENGTHS = np.array([0, 5, 21], np.int32)


def arrays(dtype=np.float16, seed=0):
    """(k_cache, v_cache, k, v)"""
    random = np.random.default_rng(seed)
    return [random.standard_normal((BATCH, rows, HEADS, DIM)).astype(dtype) for rows in (ROWS, ROWS, NEW, NEW)]


def expected(cache, new, lengths=LENGTHS, counts=(NEW,) * BATCH):
    cache = cache.copy()
    for b, (length, count) in enumerate(zip(lengths, counts)):
        cache[b, length : length + count] = new[b, :count]
    return cache


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_new_keys_go_behind_those_of_the_cache_and_are_seen(dtype):
    k_cache, v_cache, k, v = arrays(dtype)
    wanted = expected(k_cache, k), expected(v_cache, v)
    used = flashtune.kv_append(k_cache, v_cache, k, v, LENGTHS)
    np.testing.assert_array_equal(used, LENGTHS + NEW)
    assert used.dtype == np.int32 and LENGTHS.tolist() == [0, 5, 21]
    np.testing.assert_array_equal(k_cache, wanted[0])
    np.testing.assert_array_equal(v_cache, wanted[1])
    q = np.random.default_rng(1).standard_normal((BATCH, 1, 2 * HEADS, DIM)).astype(dtype)
    out = flashtune.attention_kvcache(q, k_cache, v_cache, seqused_k=used)
    for b, length in enumerate(used):
        alone = flashtune.attention(q[b : b + 1], k_cache[b : b + 1, :length].copy(), v_cache[b : b + 1, :length].copy())
        np.testing.assert_allclose(out[b : b + 1].astype(float), alone.astype(float), atol=2e-3)


def test_new_keys_go_to_the_pages_of_the_table():
    k_cache, v_cache, k, v = arrays()
    wanted = expected(k_cache, k), expected(v_cache, v)
    order = np.random.default_rng(2).permutation(BATCH * 3 + 2)
    table = np.asfortranarray(order[: BATCH * 3].reshape(BATCH, 3).astype(np.int32))  # not contiguous
    pages = [np.full((BATCH * 3 + 2, 8, HEADS, DIM), np.nan, np.float16) for _ in range(2)]
    for page, cache in zip(pages, (k_cache, v_cache)):
        page[table] = cache.reshape(BATCH, 3, 8, HEADS, DIM)
    used = flashtune.kv_append(*pages, k, v, LENGTHS, block_table=table)
    np.testing.assert_array_equal(used, LENGTHS + NEW)
    for page, of_sequences in zip(pages, wanted):
        np.testing.assert_array_equal(page[table].reshape(BATCH, ROWS, HEADS, DIM), of_sequences)
        assert np.isnan(page[order[BATCH * 3 :]]).all()


def test_pages_of_older_keys_may_be_gone():
    pages = [np.zeros((4, 8, HEADS, DIM), np.float16) for _ in range(2)]
    _, _, k, v = arrays()
    k, v = k[:1, :2], v[:1, :2]
    table, lengths = np.array([[-1, -1, 3]], np.int32), np.array([17], np.int32)
    flashtune.kv_append(*pages, k, v, lengths, block_table=table)
    np.testing.assert_array_equal(pages[0][3, 1:3], k[0])
    with pytest.raises(flashtune.FlashtuneError, match=r"block_table\[0\]\[1\] is -1"):
        flashtune.kv_append(*pages, k, v, lengths - 2, block_table=table)


def test_slots_append_their_own_counts_in_place():
    k_cache, v_cache, k, v = arrays()
    counts, entries = np.array([1, 0, 9], np.int32), np.array([2, 0, 1], np.int32)
    lengths = LENGTHS.copy()
    wanted = k_cache.copy()
    wanted[2, 0], wanted[1, 21:24] = k[0, 0], k[2]
    used = flashtune.kv_append(
        k_cache, v_cache, k, v, lengths, cache_batch_idx=entries, seqused_new=counts, in_place=True
    )
    assert used is lengths and lengths.tolist() == [1, 5, 24]
    np.testing.assert_array_equal(k_cache, wanted)


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("at_one_position", [True, False])
def test_keys_and_queries_turn_by_the_angles_of_their_positions(interleaved, at_one_position):
    k_cache, v_cache, k, v = arrays(np.float32)
    q = np.random.default_rng(3).standard_normal((BATCH, 2, 4, DIM)).astype(np.float32)
    angles = np.outer(np.arange(ROWS), 100.0 ** -(np.arange(8) / 8)).astype(np.float32)

    def turned(x, positions):
        first, second = (slice(0, 16, 2), slice(1, 16, 2)) if interleaved else (slice(0, 8), slice(8, 16))
        cos, sin = (f(angles[positions])[:, :, None] for f in (np.cos, np.sin))
        out = x.copy()
        out[..., first], out[..., second] = x[..., first] * cos - x[..., second] * sin, x[..., first] * sin + x[..., second] * cos
        return out

    wanted = expected(k_cache, turned(k, LENGTHS[:, None] + np.arange(NEW))), expected(v_cache, v)
    used, rotated = flashtune.kv_append(
        k_cache, v_cache, k, v, LENGTHS, rotary_cos=np.cos(angles), rotary_sin=np.sin(angles), rotary_interleaved=interleaved,
        q=q, q_at_one_position=at_one_position,
    )  # fmt: skip
    np.testing.assert_allclose(k_cache, wanted[0], atol=1e-5)
    np.testing.assert_array_equal(v_cache, wanted[1])
    steps = 0 * np.arange(2) if at_one_position else np.arange(2)
    np.testing.assert_allclose(rotated, turned(q, LENGTHS[:, None] + steps), atol=1e-5)
    again = flashtune.kv_append(k_cache, v_cache, k, v, LENGTHS, rotary_cos=np.cos(angles), rotary_sin=np.sin(angles))
    np.testing.assert_array_equal(again, used)


def test_keys_are_quantised_by_given_and_by_computed_scales():
    _, _, k, v = arrays()
    caches = [np.zeros((BATCH, ROWS, HEADS, DIM), np.int8) for _ in range(2)]
    flashtune.kv_append(*caches, k, v, LENGTHS, k_descale=0.05, v_descale=np.full((BATCH, HEADS), 0.1, np.float32))
    for cache, new, scale in zip(caches, (k, v), (0.05, 0.1)):
        wanted = np.clip(np.rint(new.astype(np.float32) * np.float32(1 / np.float32(scale))), -127, 127)
        for b, length in enumerate(LENGTHS):
            # A product that rounds to a tie may go to either neighbour.
            assert np.abs(cache[b, length : length + NEW] - wanted[b]).max() <= 1
            assert not cache[b, length + NEW :].any()
    scales = [np.zeros((BATCH, ROWS, HEADS), np.float32) for _ in range(2)]
    used = flashtune.kv_append(*caches, k, v, LENGTHS, k_descale=scales[0], v_descale=scales[1], computes_descale=True)
    for b, length in enumerate(LENGTHS):
        np.testing.assert_allclose(scales[0][b, length : length + NEW], np.abs(k[b].astype(np.float32)).max(-1) / 127, rtol=1e-6)
        values = caches[0][b, length : length + NEW] * scales[0][b, length : length + NEW, :, None]
        np.testing.assert_allclose(values, k[b], atol=np.abs(k).max() / 127)
    assert used.tolist() == (LENGTHS + NEW).tolist()


@pytest.mark.parametrize("group", [32, 64])
def test_rows_of_int4_stand_for_what_was_appended(group):
    random = np.random.default_rng(4)
    k, v = (random.standard_normal((BATCH, 12, HEADS, 64)).astype(np.float16) for _ in range(2))
    caches = [np.full((BATCH, ROWS, HEADS, flashtune.int4_row_bytes(64, group)), 255, np.uint8) for _ in range(2)]
    used = flashtune.kv_append(*caches, k, v, 2, int4_group=group)
    assert used.tolist() == [14] * BATCH
    end = 32 + 64 // group * 4
    for cache, new in zip(caches, (k, v)):
        wanted = packed(new.astype(np.float32), group)[0]
        assert (cache[:, 2:14, :, :end] != wanted[..., :end]).mean() < 0.01
        assert (cache[:, :2] == 255).all() and (cache[:, 14:] == 255).all()
    q = random.standard_normal((BATCH, 1, 4, 64)).astype(np.float16)
    parts = [np.ascontiguousarray(cache[:, 2:14]) for cache in caches]
    got, exact = flashtune.attention_kvcache(q, *parts, int4_group=group), flashtune.attention_kvcache(q, k, v)
    difference = (got.astype(float) - exact).ravel()
    assert np.linalg.norm(difference) < 0.2 * np.linalg.norm(exact.astype(float))


def test_new_keys_may_be_the_caches_own():
    k_cache, v_cache, *_ = arrays()
    wanted = expected(k_cache, k_cache[:, 1:4].copy(), [2] * BATCH)
    flashtune.kv_append(k_cache, v_cache, k_cache[:, 1:4], v_cache[:, 1:4], 2)
    np.testing.assert_array_equal(k_cache, wanted)


TABLE = np.arange(BATCH, dtype=np.int32)[:, None]
COS = np.ones((ROWS, 8), np.float32)


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(cache_seqlens=22), r"cache_seqlens is 22; it must be from 0 to 21"),
        (dict(cache_seqlens=np.array([0, -1, 0], np.int32)), r"cache_seqlens\[1\] is -1; it must be from 0 to 21"),
        (dict(cache_seqlens=LENGTHS.astype(np.int64)), r"cache_seqlens is int64 of shape \(3,\); it must be int32"),
        (dict(cache_seqlens=1.0), r"cache_seqlens is 1.0; it must be an int or an int32 array"),
        (dict(cache_seqlens=1, in_place=True), r"cache_seqlens is 1; with in_place it must be a contiguous array"),
        (dict(cache_seqlens=np.zeros(6, np.int32)[::2], in_place=True), "cache_seqlens must be a contiguous array that may be written"),
        (dict(in_place=1), "in_place is 1; it must be False or True"),
        (dict(k=np.zeros((BATCH, NEW, HEADS, 16), np.float16)), r"k has shape \(3, 3, 2, 16\); it must be \(3, 3, 2, 32\)"),
        (dict(v=np.zeros((BATCH, 2, HEADS, DIM), np.float16)), r"v has shape \(3, 2, 2, 32\); it must be \(3, 3, 2, 32\)"),
        (dict(v=np.zeros((BATCH, NEW, HEADS, DIM), np.float32)), "v is float32; it must be float16, as its cache is"),
        (dict(v=[1]), "v is a list; it must be a NumPy array, as k_cache is"),
        (dict(k_cache=np.broadcast_to(np.zeros((1, ROWS, HEADS, DIM), np.float16), (BATCH, ROWS, HEADS, DIM))), "k_cache has"),
        (dict(k_cache=np.zeros((2, ROWS, HEADS, DIM), np.float16)), "v_cache is float16 of shape"),
        (dict(block_table=TABLE + 1), r"block_table\[2\]\[0\] is 3; it must be below 3, the cache's pages"),
        (dict(block_table=TABLE[:2]), r"block_table is int32 of shape \(2, 1\); it must be int32 of shape \(3, pages\)"),
        (dict(cache_batch_idx=TABLE[:, 0] - 1), r"cache_batch_idx\[0\] is -1; it must be from 0 to 2"),
        (dict(cache_batch_idx=TABLE[:, 0], block_table=TABLE), "cache_batch_idx and block_table are both given"),
        (dict(seqused_new=np.ones(2, np.int32)), r"seqused_new is int32 of shape \(2,\); it must be int32 of shape \(3,\)"),
        (dict(int4_group=32), "k_cache is float16 and int4_group 32"),
        (dict(k_descale=1.0), "k_descale is given; the caches have not 8 bits"),
        (dict(computes_descale=True), "computes_descale is given; the caches have not 8 bits"),
        (dict(q=np.zeros((BATCH, 1, 2, DIM), np.float16)), "q is given without rotary_cos and rotary_sin"),
        (dict(rotary_cos=COS), "rotary_sin is None; rotary_cos and rotary_sin must be given together"),
        (dict(rotary_cos=COS[:9], rotary_sin=COS[:9]), r"rotary_cos is float32 of shape \(9, 8\); it must be .* at least 24 rows"),
        (dict(rotary_cos=COS, rotary_sin=COS, q=np.zeros((BATCH, 1, 2, 16), np.float16)), r"q is float16 of shape .*; it must be float16"),
    ],
)
def test_refused_calls_leave_the_cache_unchanged(changes, message):
    given = dict(zip(("k_cache", "v_cache", "k", "v"), arrays()), cache_seqlens=LENGTHS)
    given.update(changes)
    before = given["k_cache"].copy(), given["v_cache"].copy()
    with pytest.raises((InvalidArgumentError, TypeError), match=f"^{message}"):
        flashtune.kv_append(**given)
    for cache, kept in zip((given["k_cache"], given["v_cache"]), before):
        np.testing.assert_array_equal(cache, kept)


def test_scales_that_do_not_fit_are_refused():
    _, _, k, v = arrays()
    caches = [np.zeros((BATCH, ROWS, HEADS, DIM), np.int8) for _ in range(2)]
    of_keys = np.ones((BATCH, ROWS, HEADS), np.float32)
    for options, message in (
        (dict(k_descale=np.ones((2, 5), np.float32)), r"k_descale has shape \(2, 5\); it must be a number, \(3, 2\) or \(3, 24, 2\)"),
        (dict(k_descale=of_keys, v_descale=of_keys[:, 0]), "k_descale and v_descale have scales of different numbers of keys"),
        (dict(computes_descale=True), r"k_descale has shape \(\); computed scales need a contiguous float32 array of shape \(3, 24, 2\)"),
        (dict(k_descale=of_keys[::-1], v_descale=of_keys, computes_descale=True), "k_descale has shape .*computed scales need a contiguous"),
    ):
        with pytest.raises(InvalidArgumentError, match=message):
            flashtune.kv_append(*caches, k, v, LENGTHS, **options)
    assert not caches[0].any()
