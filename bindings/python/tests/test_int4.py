"""int4 K/V caches: rows of 4-bit numbers with their scales and zeros."""

import numpy as np
import pytest

import flashtune
from flashtune import InvalidArgumentError, UnsupportedError

BATCH, KEYS, HEADS, HEADS_KV = 2, 70, 4, 2
FORMS = [(64, 32), (128, 32), (128, 64)]


def packed(x, group):
    """(rows of bytes, the numbers that they stand for) of fp32 (..., dim)."""
    dim = x.shape[-1]
    groups = x.reshape(*x.shape[:-1], dim // group, group)
    zeros = groups.min(-1).astype(np.float16)
    scales = ((groups.max(-1) - zeros.astype(np.float32)) / 15).astype(np.float16)
    wide_scales, wide_zeros = (y.astype(np.float64)[..., None] for y in (scales, zeros))
    numbers = np.clip(np.rint((groups - wide_zeros) / wide_scales), 0, 15)
    values = (wide_scales * numbers + wide_zeros).astype(np.float16).reshape(x.shape)
    numbers = numbers.astype(np.uint8).reshape(x.shape)
    # What lies behind the last zero may hold anything.
    rows = np.full((*x.shape[:-1], flashtune.int4_row_bytes(dim, group)), 255, np.uint8)
    rows[..., : dim // 2] = numbers[..., 0::2] | numbers[..., 1::2] << 4
    both = np.stack((scales, zeros), -1).reshape(*x.shape[:-1], -1)
    rows[..., dim // 2 : dim // 2 + dim // group * 4] = both.view(np.uint8)
    return rows, values


def tensors(dim, seed=1):
    random = np.random.default_rng(seed)
    q = random.standard_normal((BATCH, 3, HEADS, dim)).astype(np.float16)
    return q, *(random.standard_normal((BATCH, KEYS, HEADS_KV, dim)).astype(np.float32) for _ in range(2))


@pytest.mark.parametrize("dim, group", FORMS)
def test_the_result_is_that_of_the_numbers(dim, group):
    q, *_ = tensors(dim)
    random = np.random.default_rng(2)
    # Numbers that fp16 holds: scales of 1/4 and zeros of -2.
    numbers = random.integers(0, 16, (2, BATCH, KEYS, HEADS_KV, dim))
    numbers[..., ::group], numbers[..., 1::group] = 0, 15
    (k4, k_values), (v4, v_values) = (packed(x.astype(np.float32) / 4 - 2, group) for x in numbers)
    used = np.array([KEYS, 9], np.int32)
    k4[1, 9:] = v4[1, 9:] = 255  # NaN, in rows of no key
    got = flashtune.attention_kvcache(q, k4, v4, seqused_k=used, int4_group=group)
    np.testing.assert_array_equal(got, flashtune.attention_kvcache(q, k_values, v_values, seqused_k=used))


def test_rows_have_the_bytes_that_the_header_says():
    assert [flashtune.int4_row_bytes(dim) for dim in (32, 64, 128, 256)] == [32, 48, 80, 160]
    assert [flashtune.int4_row_bytes(dim, 64) for dim in (64, 128, 192, 256)] == [48, 80, 112, 144]
    assert flashtune.int4_row_bytes(np.int64(128), np.int32(64)) == 80
    for dim, group, words in (
        (48, 32, "dim is 48"), (96, 64, "dim is 96"), (64, 16, "int4_group is 16"), (64, [], r"int4_group is \[\]"),
        (64, 32.0, "int4_group is 32.0"), (64.0, 32, "dim is 64.0"), ((64,), 32, r"dim is \(64,\)"), (544, 32, "dim is 544; it must be .* up to 512"),
    ):  # fmt: skip
        with pytest.raises(InvalidArgumentError, match=words):
            flashtune.int4_row_bytes(dim, group)


def test_wrong_arguments_get_a_sentence_that_names_them():
    q, k, v = tensors(128)
    k4, v4 = packed(k, 32)[0], packed(v, 32)[0]

    def refused(words, q=q, k=k4, v=v4, **options):
        with pytest.raises(InvalidArgumentError, match=words):
            flashtune.attention_kvcache(q, k, v, **{"int4_group": 32, **options})

    refused("k is uint8; it must be float16", int4_group=None)
    refused("int4_group is 16; it must be 32 or 64", int4_group=16)
    refused("int4_group is {}; it must be 32 or 64", int4_group={})
    refused(r"k has shape \(\); with int4_group 32", k=np.array(1, np.uint8))
    refused("v is float32; it must be uint8 with int4_group", v=v)
    refused("k has shape .*its last dim must be int4_row_bytes", k=k4[..., :70], v=v4[..., :70])
    refused("k has shape .*batch and dim must be those of q", q=q[..., :64])
    refused("k_descale is given; it must be None, since rows of int4 hold", k_descale=1.0)
    refused("q is float32; it must be float16 or bfloat16, since k is uint8", q=q.astype(np.float32))
    bad = k4.copy()
    bad[0, 3, 1, 64:66] = 0
    refused("the scale of k, sequence 0, key 3, head 1 and group 0 is 0", k=bad)


@pytest.mark.parametrize("dim, group", FORMS)
@pytest.mark.parametrize("page_size", [None, 16])
def test_appended_rows_stand_for_what_was_appended(dim, group, page_size):
    torch = pytest.importorskip("torch")
    _, k, v = (torch.from_numpy(x) for x in tensors(dim))
    k, v = k[:, :40].bfloat16(), v[:, :40].bfloat16()
    entries, rows = (12, page_size) if page_size else (BATCH, 80)
    table = torch.randperm(12, dtype=torch.int32)[: BATCH * 5].view(BATCH, 5) if page_size else None
    caches = [torch.full((entries, rows, HEADS_KV, flashtune.int4_row_bytes(dim, group)), 255, dtype=torch.uint8) for _ in range(2)]
    used = flashtune.kv_append(*caches, k, v, 0, block_table=table, int4_group=group)
    assert used.tolist() == [40, 40]
    end = dim // 2 + dim // group * 4
    for cache, new in zip(caches, (k, v)):
        of_sequences = cache[table.long()].flatten(1, 2)[:, :40] if page_size else cache[:, :40]
        wanted = packed(new.float().numpy(), group)[0]
        # A tie may go to either neighbour, where a quotient rounds.
        differ = (of_sequences.numpy()[..., :end] != wanted[..., :end]).mean()
        assert differ < 0.01
    q = torch.randn(BATCH, 1, HEADS, dim, dtype=torch.bfloat16)
    got = flashtune.attention_kvcache(q, *caches, block_table=table, seqused_k=used, int4_group=group)
    exact = flashtune.attention_kvcache(q.float(), k.float(), v.float())
    assert (got.float() - exact).norm() < 0.2 * exact.norm()


def test_appends_refuse_what_does_not_fit():
    torch = pytest.importorskip("torch")
    k = torch.zeros(1, 2, 1, 64, dtype=torch.float16)
    cache = torch.zeros(1, 8, 1, 48, dtype=torch.uint8)
    for words, options, caches in (
        ("k_cache is torch.uint8 and int4_group None", {}, (cache, cache)),
        ("k_cache is torch.float16 and int4_group 32", dict(int4_group=32), (torch.zeros(1, 8, 1, 64, dtype=torch.float16),) * 2),
        ("computes_descale is given; rows of int4 hold their scales", dict(int4_group=32, computes_descale=True), (cache, cache.clone())),
        ("k has shape", dict(int4_group=32), (cache[..., :32], cache.clone()[..., :32])),
    ):
        with pytest.raises(InvalidArgumentError, match=words):
            flashtune.kv_append(*caches, k, k, 0, **options)


def test_uint8_tensors_are_no_int4_without_a_group():
    torch = pytest.importorskip("torch")
    q, k = torch.zeros(1, 2, 1, 64).half(), torch.zeros(1, 2, 1, 64, dtype=torch.uint8)
    for learns in (False, True):
        with pytest.raises(InvalidArgumentError, match="k is torch.uint8; it must be torch.float16, as q is"):
            flashtune.attention(q.clone().requires_grad_(learns), k, k)


def test_a_backward_pass_refuses_int4():
    x, lse = np.zeros((1, 2, 1, 64), np.float16), np.zeros((1, 1, 2), np.float32)
    with pytest.raises(UnsupportedError, match="int4_group is given; the backward pass"):
        flashtune.attention_backward(x, x, x, x, x, lse, int4_group=32)
    with pytest.raises(UnsupportedError, match="int4_group is given; the backward pass"):
        flashtune.plan_info(x, x, x, backward=True, int4_group=32)
