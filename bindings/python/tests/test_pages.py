"""The paged K/V cache on NumPy arrays, against the oracle on contiguous keys.

Rows without a key hold NaN.
"""

import flashtune
import numpy as np
import pytest
from flashtune import InvalidArgumentError
from judge import assert_close
from oracle import attention

SEQLENS = [37, 0, 16, 90]
HEADS, HEADS_KV, DIM = 4, 2, 24


def cache(page_size, seqlens=SEQLENS, seed=0):
    """(keys and values of each sequence, pages of both, block table)"""
    random = np.random.default_rng(seed)
    rows = [[random.standard_normal((n, HEADS_KV, DIM), np.float32) for n in seqlens] for _ in range(2)]
    counts = [-(-n // page_size) for n in seqlens]
    order = random.permutation(sum(counts) + 2).astype(np.int32)
    pages = np.full((2, len(order), page_size, HEADS_KV, DIM), np.nan, np.float32)
    table = np.full((len(seqlens), max(counts)), -1, np.int32)
    for b, (count, n) in enumerate(zip(counts, seqlens)):
        table[b, :count], order = order[:count], order[count:]
        for which in range(2):
            for key in range(n):
                pages[which, table[b, key // page_size], key % page_size] = rows[which][b][key]
    return rows, pages, table


@pytest.mark.parametrize("page_size", [1, 7, 16, 100])
@pytest.mark.parametrize("seqlen_q, options", [(1, {}), (3, dict(causal=True)), (5, dict(causal=True, window=(20, None), softcap=2.0))])
def test_pages_hold_the_keys_of_each_sequence(page_size, seqlen_q, options):
    (keys, values), (k, v), table = cache(page_size)
    q = np.random.default_rng(1).standard_normal((len(SEQLENS), seqlen_q, HEADS, DIM), np.float32)
    used = np.array(SEQLENS, np.int32)
    out, lse = flashtune.attention_kvcache(q, k, v, block_table=table, seqused_k=used, return_lse=True, **options)
    for b in range(len(SEQLENS)):
        one = (q[b : b + 1], keys[b][None], values[b][None])
        exact, naive = attention(*one, **options), attention(*one, rounded_to=np.float32, **options)
        assert_close(f"out of {b}", out[b].astype(np.float64), naive.out[0], exact.out[0], "float32")
        np.testing.assert_allclose(lse[b], exact.lse[0], atol=1e-5)
    again, _ = flashtune.attention_forward(q, k, v, block_table=table, seqused_k=used, **options)
    assert np.array_equal(again, out)


def test_without_lengths_all_of_the_pages_are_used():
    _, (k, v), table = cache(16, seqlens=[48, 48])
    q = np.random.default_rng(2).standard_normal((2, 1, HEADS, DIM), np.float32)
    gathered = (x[table].reshape(2, 48, HEADS_KV, DIM) for x in (k, v))
    np.testing.assert_array_equal(flashtune.attention_kvcache(q, k, v, block_table=table), flashtune.attention(q, *gathered))


def test_a_cache_without_pages_is_padded_sequences():
    random = np.random.default_rng(3)
    q, k, v = (random.standard_normal((2, n, h, DIM), np.float32) for n, h in ((1, HEADS), (30, HEADS_KV), (30, HEADS_KV)))
    used = np.array([30, 11], np.int32)
    k[1, 11:] = v[1, 11:] = np.nan
    out = flashtune.attention_kvcache(q, k, v, seqused_k=used, causal=True)
    np.testing.assert_array_equal(out, flashtune.attention_varlen(q, k, v, seqused_k=used, causal=True))
    np.testing.assert_allclose(out[1], flashtune.attention(q[1:], k[1:, :11], v[1:, :11])[0], atol=1e-6)


def test_plans_are_prepared_for_pages():
    _, (k, v), table = cache(16)
    q = np.zeros((len(SEQLENS), 1, HEADS, DIM), np.float32)
    assert flashtune.plan_info(q, k, v, block_table=table)["kernel"] == "flashtune_cpu_forward"


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(block_table=np.zeros(3, np.int32)), "block_table has shape (3,); it must be (batch, pages)"),
        (dict(block_table=np.zeros((4, 6), np.int64)), "block_table is int64; it must be int32"),
        (dict(block_table=np.zeros((3, 6), np.int32)), "they must agree"),
        (dict(block_table=np.full((4, 6), 99, np.int32)), "block_table[0][0] is 99"),
        (dict(max_seqlen_k=97), "max_seqlen_k is 97; it must be at most 96"),
        (dict(max_seqlen_k=30), "seqused_k[0] is 37"),
        (dict(max_seqlen_k=36.5), "max_seqlen_k is 36.5; it must be an int"),
    ],
    ids=str,
)
def test_a_wrong_table_is_named(change, message):
    _, (k, v), table = cache(16)
    q = np.zeros((len(SEQLENS), 1, HEADS, DIM), np.float32)
    with pytest.raises(InvalidArgumentError) as caught:
        flashtune.attention_kvcache(q, k, v, **{"block_table": table, "seqused_k": np.array(SEQLENS, np.int32), **change})
    assert message in str(caught.value)


@pytest.mark.parametrize("name", ["block_table", "cache_batch_idx", "leftpad_k", "q_descale", "k_descale", "v_descale"])
def test_there_is_no_backward_pass_over_caches(name):
    _, (k, v), table = cache(16)
    q = np.zeros((len(SEQLENS), 1, HEADS, DIM), np.float32)
    with pytest.raises(NotImplementedError, match=f"{name} is given"):
        flashtune.attention_backward(q, q, k, v, q, np.zeros((len(SEQLENS), HEADS, 1)), **{name: table})


@pytest.mark.parametrize("paged", [False, True], ids=["contiguous", "paged"])
def test_a_batch_invariant_sequence_has_the_same_bits_alone_and_in_a_batch(paged):
    generator = np.random.default_rng(8)
    q = generator.standard_normal((4, 2, 4, 16), np.float32)
    k, v = (generator.standard_normal((4, 96, 2, 16), np.float32) for _ in range(2))
    used = np.array([96, 5, 0, 61], np.int32)
    cache, table = (k, v), None
    if paged:
        cache, table = [x.reshape(-1, 16, 2, 16) for x in (k, v)], np.arange(24, dtype=np.int32).reshape(4, 6)
    options = dict(causal=True, batch_invariant=True, return_lse=True)
    out, lse = flashtune.attention_kvcache(q, *cache, block_table=table, seqused_k=used, **options)
    for b, length in enumerate(used):
        of_one = cache if paged else [x[b : b + 1, : max(length, 1)] for x in cache]
        table_of_one = table[b : b + 1] if paged else None
        alone = flashtune.attention_kvcache(q[b : b + 1], *of_one, block_table=table_of_one, seqused_k=used[b : b + 1], **options)
        np.testing.assert_array_equal(alone[0][0], out[b])
        np.testing.assert_array_equal(alone[1][0], lse[b])
