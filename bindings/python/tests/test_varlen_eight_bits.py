"""Varlen in 8 bits: packed, padded and in pages, with each form of scales."""

import numpy as np
import pytest

import flashtune
from flashtune import InvalidArgumentError

ml_dtypes = pytest.importorskip("ml_dtypes")

HEADS, HEADS_KV, DIM, DIM_V = 4, 2, 32, 48
LENGTHS_Q, LENGTHS_K = [5, 0, 40, 1], [5, 30, 170, 129]
CU_SEQLENS = [np.cumsum([0, *lengths]).astype(np.int32) for lengths in (LENGTHS_Q, LENGTHS_K)]
PACKED = dict(zip(("cu_seqlens_q", "cu_seqlens_k"), CU_SEQLENS))
BATCH, TOTAL_K = len(LENGTHS_K), sum(LENGTHS_K)
E4M3 = ml_dtypes.float8_e4m3fn
SCALES = {
    "none": (),
    "a number": None,
    "of heads": (BATCH, HEADS_KV),
    "of shared heads": (BATCH, 1),
    "of blocks": (BATCH, 2, HEADS_KV),
    "of keys": (TOTAL_K, HEADS_KV),
}


def packed(dtype=E4M3, q_dtype=E4M3):
    random = np.random.default_rng(5)
    shapes = (sum(LENGTHS_Q), HEADS, DIM), (TOTAL_K, HEADS_KV, DIM), (TOTAL_K, HEADS_KV, DIM_V)
    q, k, v = (random.standard_normal(shape, np.float32) for shape in shapes)
    return q.astype(q_dtype), *((30 * x if dtype == np.int8 else x).astype(dtype) for x in (k, v))


def scales(name, seed):
    shape, random = SCALES[name], np.random.default_rng(seed)
    if not shape:
        return None if shape is not None else 0.25 * seed
    return random.uniform(0.5, 1.5, shape).astype(np.float32)


def wide(x, given, b):
    """The rows of sequence b in fp64, times their scales."""
    at = slice(*CU_SEQLENS[1][b : b + 2])
    x = x[at].astype(np.float64)
    if given is None or np.ndim(given) == 0:
        return x * (1 if given is None else given)
    if len(given) == TOTAL_K:
        return x * given[at, :, None]
    return x * (given[b][:, None] if given.ndim == 2 else np.repeat(given[b], 128, 0)[: len(x), :, None])


def exact(q, k, v, q_descale, k_descale, v_descale, causal):
    outs = []
    for b, rows in enumerate(np.split(q.astype(np.float64), CU_SEQLENS[0][1:-1])):
        keys, values = (np.repeat(wide(*given, b), HEADS // HEADS_KV, 1) for given in ((k, k_descale), (v, v_descale)))
        rows = rows * (1 if q_descale is None else np.repeat(q_descale[b], HEADS // HEADS_KV)[:, None])
        scores = np.einsum("qhd,khd->hqk", rows, keys) / np.sqrt(DIM)
        after = np.arange(len(keys)) - np.arange(len(rows))[:, None] - len(keys) + len(rows)
        scores = np.where(causal & (after > 0), -np.inf, scores)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        outs.append(np.einsum("hqk,khd->qhd", weights / weights.sum(-1, keepdims=True), values))
    return np.concatenate(outs)


def error(actual, expected):
    return np.linalg.norm(actual.astype(np.float64) - expected) / np.linalg.norm(expected)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", SCALES)
def test_packed_sequences_are_right_with_each_form_of_scales(name, causal):
    k_descale, v_descale = scales(name, 1), scales(name, 2)
    q, k, v = packed()
    given = dict(q_descale=scales("of heads", 3), k_descale=k_descale, v_descale=v_descale)
    out, lse = flashtune.attention_varlen(q, k, v, causal=causal, return_lse=True, **PACKED, **given)
    assert out.dtype == ml_dtypes.bfloat16 and lse.shape == (HEADS, len(q)) and lse.dtype == np.float32
    # Weights are rounded to 3 bits of mantissa, and many of them are summed.
    assert error(out, exact(q, k, v, **given, causal=causal)) < 2**-4
    for dtype in (E4M3, ml_dtypes.float8_e5m2, np.int8):
        q, k, v = packed(dtype, np.float16)
        given["q_descale"] = None
        out = flashtune.attention_varlen(q, k, v, causal=causal, **PACKED, **given)
        assert out.dtype == np.float16
        assert error(out, exact(q, k, v, **given, causal=causal)) < 2**-9


def test_a_sequence_equals_the_call_of_that_sequence_alone():
    q, k, v = packed()
    given = {f"{name}_descale": scales("of heads", seed) for seed, name in enumerate("qkv")}
    out = flashtune.attention_varlen(q, k, v, **PACKED, **given)
    for b in (0, 2, 3):
        at_q, at_k = (slice(*offsets[b : b + 2]) for offsets in CU_SEQLENS)
        own = {name: x[b : b + 1] for name, x in given.items()}
        alone = flashtune.attention(q[None, at_q], k[None, at_k], v[None, at_k], **own)
        np.testing.assert_array_equal(out[at_q], alone[0])


def padded(x, rows=170, fill=0):
    """(batch, rows, …) of packed keys; the rows behind a sequence hold `fill`."""
    parts = np.split(x, CU_SEQLENS[1][1:-1])
    filled = np.full((BATCH, rows, *x.shape[1:]), fill, np.float32).astype(x.dtype)
    for entry, part in zip(filled, parts):
        entry[: len(part)] = part
    return filled


@pytest.mark.parametrize("name", SCALES)
def test_padded_keys_equal_packed_ones(name):
    q, k, v = packed()
    given = dict(k_descale=scales(name, 1), v_descale=scales(name, 2))
    expected = flashtune.attention_varlen(q, k, v, causal=True, **PACKED, **given)
    if name == "of keys":
        # The scales of unused rows are not read.
        given = {name: padded(x, fill=1) for name, x in given.items()}
    out = flashtune.attention_varlen(
        q, padded(k, fill=np.nan), padded(v, fill=np.nan), cu_seqlens_q=CU_SEQLENS[0], seqused_k=np.array(LENGTHS_K, np.int32),
        causal=True, **given,
    )  # fmt: skip
    np.testing.assert_array_equal(out, expected)


BAD = [
    (np.ones((BATCH, 3), np.float32), r"has shape \(4, 3\); it must be a number, \(4, 2\)"),
    (np.ones((BATCH + 1, HEADS_KV), np.float32), r"has shape \(5, 2\); it must be a number, \(4, 2\)"),
    (np.ones((0, HEADS_KV), np.float32), "has shape"),
    (np.ones((BATCH, HEADS_KV)), "is float64; it must be float32"),
    (np.ones((BATCH, HEADS_KV), np.float16), "is float16; it must be float32"),
    ([1.0, 2.0], r"is \[1.0, 2.0\]; it must be a number that is finite and above 0 in fp32, or a float32 array"),
    ("1", "is '1'; it must be a number"),
]
BAD_VALUES = [0.0, -1.0, np.inf, -np.inf, np.nan]


@pytest.mark.parametrize("name", ["q_descale", "k_descale", "v_descale"])
def test_scales_that_make_no_sense_are_refused_by_name(name):
    q, k, v = packed()
    for given, words in BAD:
        with pytest.raises(InvalidArgumentError, match=f"{name} {words}"):
            flashtune.attention_varlen(q, k, v, **PACKED, **{name: given})
    for value in BAD_VALUES:
        with pytest.raises(InvalidArgumentError, match=f"{name} is .*; it must be a number that is finite and above 0"):
            flashtune.attention_varlen(q, k, v, **PACKED, **{name: value})
        of_heads = np.ones((BATCH, HEADS_KV), np.float32)
        of_heads[2, 1] = value
        with pytest.raises(InvalidArgumentError, match=f"{name} of sequence 2, key 0 and head 1 is .*; a scale must be finite and above 0"):
            flashtune.attention_varlen(q, k, v, **PACKED, **{name: of_heads})
    wide_inputs = [x.astype(np.float16) for x in (q, k, v)]
    with pytest.raises(InvalidArgumentError, match=f"{name} is given; it must be None, since {name[0]} has not 8 bits"):
        flashtune.attention_varlen(*wide_inputs, **PACKED, **{name: 1.0})


def test_scales_of_different_numbers_of_keys_are_refused():
    q, k, v = packed()
    with pytest.raises(InvalidArgumentError, match="k_descale and v_descale have scales of different numbers of keys"):
        flashtune.attention_varlen(q, k, v, **PACKED, k_descale=scales("of blocks", 1), v_descale=scales("of keys", 2))
    with pytest.raises(InvalidArgumentError, match="v_descale has a scale for each sequence; beside scales of each key"):
        flashtune.attention_varlen(q, k, v, **PACKED, k_descale=scales("of keys", 1), v_descale=scales("of heads", 2))


def of_torch(torch, x):
    if not isinstance(x, np.ndarray):
        return x
    if x.dtype.name.startswith("float8"):
        return torch.from_numpy(x.view(np.uint8)).view(getattr(torch, x.dtype.name))
    return torch.from_numpy(x)


def in_pages(x, size=16):
    """(pages, size, …), and the block table, which gives the pages in reverse order."""
    rows = padded(x, rows=176)
    pages = rows.reshape(-1, size, *x.shape[1:])[::-1].copy()
    return pages, (len(pages) - 1 - np.arange(len(pages), dtype=np.int32)).reshape(BATCH, -1)


@pytest.mark.parametrize("name", SCALES)
def test_torch_and_its_flash_attn_function_agree_with_numpy(name):
    torch = pytest.importorskip("torch")
    from flashtune.flash_attn_interface import flash_attn_varlen_func

    arrays = packed()
    given = dict(q_descale=scales("of heads", 3), k_descale=scales(name, 1), v_descale=scales(name, 2))
    expected = flashtune.attention_varlen(*arrays, causal=True, **PACKED, **given).astype(np.float32)
    q, k, v = (of_torch(torch, x) for x in arrays)
    more = {name: of_torch(torch, x) for name, x in given.items()}
    lengths = {name: of_torch(torch, x) for name, x in PACKED.items()}
    longest = dict(max_seqlen_q=max(LENGTHS_Q), max_seqlen_k=max(LENGTHS_K))
    outs = [
        flashtune.attention_varlen(q, k, v, causal=True, **lengths, **more),
        flash_attn_varlen_func(q, k, v, *lengths.values(), *longest.values(), causal=True, **more),
    ]
    if name == "of heads":
        outs.append(torch.compile(flashtune.attention_varlen, backend="eager")(q, k, v, causal=True, **lengths, **more))
    pages, table = zip(*map(in_pages, arrays[1:]))
    if name == "of keys":
        more |= {name: of_torch(torch, in_pages(given[name])[0]) for name in ("k_descale", "v_descale")}
    used = torch.tensor(LENGTHS_K, dtype=torch.int32)
    for seqused_k in (used, None):
        out = flash_attn_varlen_func(
            q, *(of_torch(torch, x) for x in pages), *lengths.values(), *longest.values(), causal=True,
            block_table=of_torch(torch, table[0]), seqused_k=seqused_k, **more,
        )  # fmt: skip
        outs.append(out)
    for out in outs:
        assert out.dtype is torch.bfloat16
        np.testing.assert_array_equal(out.float().numpy(), expected)


@pytest.mark.needs_gpu
@pytest.mark.parametrize("name", [name for name in SCALES if name != "of keys"])
def test_packed_and_paged_sequences_are_right_on_a_gpu(name):
    torch = pytest.importorskip("torch")
    on_a_gpu_is_right(torch, "cuda", name)


def test_packed_and_paged_sequences_are_right_on_the_cpu_too():
    on_a_gpu_is_right(pytest.importorskip("torch"), "cpu", "of blocks")


def on_a_gpu_is_right(torch, device, name):
    if device == "cuda" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("q in e4m3 needs Hopper")
    arrays = packed()
    given = dict(q_descale=scales("of heads", 3), k_descale=scales(name, 1), v_descale=scales(name, 2))
    expected = exact(*arrays, **given, causal=True)

    def on(x):
        x = of_torch(torch, x)
        return x.to(device) if isinstance(x, torch.Tensor) else x

    q, k, v = map(on, arrays)
    more = {name: on(x) for name, x in (PACKED | given).items()} | dict(max_seqlen_q=max(LENGTHS_Q), causal=True)
    packed_out = flashtune.attention_varlen(q, k, v, max_seqlen_k=max(LENGTHS_K), **more)
    pages, table = zip(*map(in_pages, arrays[1:]))
    more |= dict(block_table=on(table[0]), seqused_k=on(np.array(LENGTHS_K, np.int32)))
    del more["cu_seqlens_k"]
    paged_out = flashtune.attention_kvcache(q, *map(on, pages), **more)
    for out in (packed_out, paged_out):
        assert error(out.float().cpu().numpy(), expected) < 2**-4


def test_torch_refuses_scales_that_make_no_sense_and_gradients():
    torch = pytest.importorskip("torch")
    from flashtune.flash_attn_interface import flash_attn_varlen_func

    q, k, v = (of_torch(torch, x) for x in packed())
    lengths = {name: of_torch(torch, x) for name, x in PACKED.items()}
    longest = max(LENGTHS_Q), max(LENGTHS_K)

    def calls(*tensors, **scales):
        yield lambda: flashtune.attention_varlen(*tensors, **lengths, **scales)
        yield lambda: flash_attn_varlen_func(*tensors, *lengths.values(), *longest, **scales)

    def refused(words, *tensors, kind=InvalidArgumentError, **scales):
        for call in calls(*tensors, **scales):
            with pytest.raises(kind, match=words):
                call()

    ones = torch.ones(BATCH, HEADS_KV)
    for name in ("q_descale", "k_descale", "v_descale"):
        refused(rf"{name} has shape \(4, 3\); it must be a number, \(4, 2\)", q, k, v, **{name: torch.ones(BATCH, 3)})
        refused(f"{name} is torch.float64 on cpu; it must be torch.float32 on cpu", q, k, v, **{name: ones.double()})
        refused(f"{name} is torch.float32 on meta; it must be torch.float32 on cpu", q, k, v, **{name: ones.to("meta")})
        refused(f"{name} is None-like; it must be a number", q, k, v, **{name: _NoneLike()})
        for value in BAD_VALUES:
            refused(f"{name} is .*; it must be a number that is finite and above 0", q, k, v, **{name: value})
            refused(f"{name} of sequence 0, key 0 and head 0 is", q, k, v, **{name: ones * value})
        refused(f"{name} is given; it must be None", q.half(), k.half(), v.half(), **{name: ones})
        compiled = torch.compile(flashtune.attention_varlen, backend="eager")
        with pytest.raises(InvalidArgumentError, match=f"{name} is given; it must be None"):
            compiled(q.half(), k.half(), v.half(), **lengths, max_seqlen_q=longest[0], max_seqlen_k=longest[1], **{name: ones})
    learning = q.half().requires_grad_()
    refused("k has 8 bits, which have no backward pass", learning, k, v, kind=flashtune.UnsupportedError)


class _NoneLike:
    def __repr__(self):
        return "None-like"


def test_scales_of_sequences_come_first_where_there_are_as_many_keys():
    cu_seqlens, heads = np.array([0, 2, 2, 3], np.int32), HEADS_KV
    random = np.random.default_rng(6)
    q, k = (random.standard_normal((3, n, DIM), np.float32).astype(E4M3) for n in (HEADS, heads))
    v = np.ones((3, heads, DIM), np.float32).astype(E4M3)
    of_sequences = np.array([[2.0], [3.0], [4.0]], np.float32).repeat(heads, 1)
    lengths = dict(cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens)
    out = flashtune.attention_varlen(q, k, v, **lengths, v_descale=of_sequences).astype(np.float32)
    assert np.allclose(out, np.array([2.0, 2.0, 4.0])[:, None, None], rtol=0.02)
    out = flashtune.attention_varlen(q, k, v, **lengths, causal=True, v_descale=of_sequences[None]).astype(np.float32)
    assert np.allclose(out[[0, 2]], np.array([2.0, 4.0])[:, None, None], rtol=0.02) and np.all(out[1] > 2.01)
