"""Features beyond plain attention, and varlen batches, on NumPy arrays by the CPU backend."""

import flashtune
import numpy as np
import oracle
import pytest
from judge import assert_close
from test_numpy import DTYPES, tensors

GENERATOR = np.random.default_rng(7)
F32 = DTYPES[0]


def normal(*shape):
    return GENERATOR.standard_normal(shape).astype(np.float32)


HEADS = 4
SLOPES = np.array([0.5, 0.1, 0.03, 0.0], np.float32)
SINKS = np.array([-1.0, 0.0, 2.0, -np.inf], np.float32)

# Features for scores of (2, 4, 61, 83); tensors of size 1 along a dim broadcast.
# entries.
FEATURES = {
    "window": dict(window=(20, 7)),
    "window to the left": dict(window=(9, None)),
    "window to the right": dict(window=(-1, 5)),
    "causal window": dict(window=(16, None), causal=True),
    "top-left window": dict(window=(16, 0), causal="top-left"),
    "softcap": dict(softcap=1.3),
    "slopes": dict(alibi_slopes=SLOPES),
    "slopes of each batch entry": dict(alibi_slopes=np.abs(normal(2, HEADS)), causal=True),
    "bias": dict(bias=normal(2, HEADS, 61, 83)),
    "bias of keys": dict(bias=normal(1, 1, 1, 83)),
    "bias of heads": dict(bias=normal(1, HEADS, 61, 83), causal=True),
    "mask": dict(mask=GENERATOR.random((2, 1, 61, 83)) < 0.6),
    "mask of keys": dict(mask=GENERATOR.random((2, 1, 1, 83)) < 0.6, dropout_p=0.2),
    "sinks": dict(sinks=SINKS),
    "all": dict(
        window=(30, 11), softcap=2.0, alibi_slopes=SLOPES, bias=normal(2, 1, 61, 83), sinks=SINKS, dropout_p=0.1,
        mask=GENERATOR.random((1, HEADS, 61, 83)) < 0.8,
    ),
}  # fmt: skip

LENGTHS_Q, LENGTHS_K = [13, 0, 61, 30], [40, 17, 83, 0]
CU_SEQLENS = [np.cumsum([0, *lengths]).astype(np.int32) for lengths in (LENGTHS_Q, LENGTHS_K)]
USED = [np.array(lengths, np.int32) for lengths in ([5, 13, 0, 20], [25, 0, 60, 8])]
VARLEN = {
    "both end to end": dict(zip(("cu_seqlens_q", "cu_seqlens_k"), CU_SEQLENS)),
    "queries end to end": dict(cu_seqlens_q=CU_SEQLENS[0]),
    "keys end to end": dict(cu_seqlens_k=CU_SEQLENS[1]),
    "padded": dict(seqused_q=USED[0], seqused_k=USED[1]),
    "keys padded": dict(seqused_k=USED[1]),
    "end to end and partly used": dict(
        cu_seqlens_q=CU_SEQLENS[0], cu_seqlens_k=CU_SEQLENS[1], seqused_q=np.array([13, 0, 50, 1], np.int32)
    ),
}


def judged(actual, exact, naive, dtype):
    for name, value in actual.items():
        values = [x.astype(np.float64) for x in (value, getattr(naive, name), getattr(exact, name))]
        assert_close(name, *values, dtype.name, gradient=name != "out")


def check(q, k, v, dout, dtype, reference=oracle.attention, **options):
    """Judges both passes, with a gradient into lse."""
    if "bias" in options:
        options["bias"] = options["bias"].astype(dtype)
    if "dropout_p" in options:
        options["seed"] = (11, 5)
    out, lse = flashtune.attention_forward(q, k, v, **options)
    dlse = np.random.default_rng(3).standard_normal(lse.shape).astype(np.float32)
    gradients = flashtune.attention_backward(dout, q, k, v, out, lse, dlse=dlse, **options)
    actual = dict(zip(("out", "dq", "dk", "dv", "dbias", "dsinks"), (out, *gradients)))
    actual = {name: value for name, value in actual.items() if value is not None}
    exact = reference(q, k, v, dout, dlse=dlse, **options)
    judged(actual, exact, reference(q, k, v, dout, dlse=dlse, rounded_to=dtype, **options), dtype)
    finite = np.isfinite(exact.lse)
    assert (np.isneginf(lse) == ~finite).all()
    np.testing.assert_allclose(lse[finite], exact.lse[finite], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("name", FEATURES)
def test_each_feature_is_within_the_error_rule_in_both_passes(name, dtype):
    check(*tensors((2, HEADS, 2, 61, 83, 40, 24, False), dtype), dtype, **FEATURES[name])


@pytest.mark.parametrize("features", [{}, dict(causal=True), FEATURES["all"]], ids=["plain", "causal", "all"])
@pytest.mark.parametrize("name", VARLEN)
def test_varlen_sequences_equal_each_sequence_alone(name, features):
    lengths = VARLEN[name]
    batch = len(LENGTHS_Q)
    features = dict(features)
    if "bias" in features:
        features |= dict(bias=normal(batch, 1, 61, 83), mask=GENERATOR.random((batch, HEADS, 1, 83)) < 0.8)
    q, k, v, dout = tensors((batch, HEADS, 2, 61, 83, 32, 32, False), F32)
    if "cu_seqlens_q" in lengths:
        q, dout = (x.reshape(-1, *x.shape[2:])[: sum(LENGTHS_Q) + 3].copy() for x in (q, dout))
        lengths = lengths | dict(max_seqlen_q=61)
    if "cu_seqlens_k" in lengths:
        k, v = (x.reshape(-1, *x.shape[2:])[: sum(LENGTHS_K) + 5].copy() for x in (k, v))
        lengths = lengths | dict(max_seqlen_k=83)
    # Rows that no sequence uses may hold anything.
    for tensor, side in ((q, "q"), (dout, "q"), (k, "k"), (v, "k")):
        used = np.zeros(tensor.shape[:-2], bool)
        for place in oracle._places(tensor, lengths.get(f"cu_seqlens_{side}"), lengths.get(f"seqused_{side}")):
            used[place] = True
        tensor[~used] = np.nan

    def reference(*arrays, max_seqlen_q=None, max_seqlen_k=None, **options):
        return oracle.varlen(*arrays, **options)

    check(q, k, v, dout, F32, reference=reference, **lengths, **features)


def test_max_seqlen_defaults_to_the_longest_sequence():
    q, k, v, _ = (x[0] for x in tensors((1, 2, 2, 50, 50, 16, 16, True), F32))
    begins = np.array([0, 20, 50], np.int32)
    out, lse = flashtune.attention_varlen(q, k, v, cu_seqlens_q=begins, cu_seqlens_k=begins, causal=True, return_lse=True)
    assert lse.shape == (2, 50)
    for start, end in ((0, 20), (20, 50)):
        one = flashtune.attention(*(x[None, start:end] for x in (q, k, v)), causal=True)
        np.testing.assert_array_equal(out[start:end], one[0])


def test_features_that_change_nothing_give_the_plain_result():
    q, k, v, _ = tensors((2, HEADS, 2, 61, 83, 40, 24, False), F32)
    plain = flashtune.attention(q, k, v)
    for neutral in (
        dict(window=(83, 83)),
        dict(softcap=1e6),
        dict(alibi_slopes=np.zeros(HEADS, np.float32)),
        dict(bias=np.zeros((1, 1, 1, 1), np.float32)),
        dict(mask=np.ones((61, 83), bool)),
        dict(sinks=np.full(HEADS, -np.inf, np.float32)),
    ):
        np.testing.assert_allclose(flashtune.attention(q, k, v, **neutral), plain, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("hidden", [dict(mask=np.zeros((1, 83), bool)), dict(bias=np.full((1, 83), -np.inf, np.float32))])
def test_rows_that_see_nothing_give_zeros_or_the_sink(hidden):
    q, k, v, dout = tensors((1, HEADS, 2, 61, 83, 40, 24, False), F32)
    out, lse = flashtune.attention(q, k, v, return_lse=True, **hidden)
    assert (out == 0).all() and np.isneginf(lse).all()
    assert all((x == 0).all() for x in flashtune.attention_backward(dout, q, k, v, out, lse, **hidden) if x is not None)
    out, lse = flashtune.attention(q, k, v, return_lse=True, sinks=SINKS, **hidden)
    assert (out == 0).all() and (lse == SINKS[None, :, None]).all()


@pytest.mark.parametrize("shape", [(2, HEADS, 61, 83), (2, 1, 61, 83), (61, 83), (HEADS, 1, 83), (83,)], ids=str)
def test_a_bit_mask_equals_its_byte_mask(shape):
    q, k, v, dout = tensors((2, HEADS, 2, 61, 83, 40, 24, False), F32)
    mask = GENERATOR.random(shape) < 0.6
    bits = np.packbits(mask, axis=-1, bitorder="little")
    # Bits past the last key may be anything.
    bits[..., -1] |= 0xF8
    options = dict(causal=True, softcap=3.0)
    expected = flashtune.attention_forward(q, k, v, mask=mask, **options)
    for kind in (bits, np.repeat(bits, 2, axis=-1)[..., ::2]):
        actual = flashtune.attention_forward(q, k, v, mask_bits=kind, **options)
        for one, other in zip(actual, expected):
            np.testing.assert_array_equal(one, other)
    for one, other in zip(
        flashtune.attention_backward(dout, q, k, v, *expected, mask_bits=bits, **options),
        flashtune.attention_backward(dout, q, k, v, *expected, mask=mask, **options),
    ):
        np.testing.assert_array_equal(one, other)


def test_a_bias_may_have_any_memory_layout():
    q, k, v, _ = tensors((2, HEADS, 2, 61, 83, 40, 24, False), F32)
    bias = normal(83, 61, HEADS, 2)
    view = bias.transpose()
    expected = flashtune.attention(q, k, v, bias=np.ascontiguousarray(view))
    np.testing.assert_array_equal(flashtune.attention(q, k, v, bias=view), expected)
    reversed_view = np.ascontiguousarray(view[..., ::-1])[..., ::-1]
    np.testing.assert_array_equal(flashtune.attention(q, k, v, bias=reversed_view), expected)


def test_a_plan_depends_on_the_features():
    q, k, v, _ = tensors((2, HEADS, 2, 61, 83, 40, 24, False), F32)
    features = dict(window=(5, 5), sinks=SINKS, bias=normal(83))
    for backward in (False, True):
        flashtune.prepare(q, k, v, backward=backward, **features)
        info = flashtune.plan_info(q, k, v, backward=backward, **features)
        assert info["kernel"].startswith("flashtune_cpu")
    with pytest.raises(NotImplementedError, match="dbias.stride_batch is 0 and deterministic is 1"):
        out, lse = flashtune.attention_forward(q, k, v, bias=normal(83))
        flashtune.attention_backward(out, q, k, v, out, lse, bias=normal(83), deterministic=True)


ONES = np.ones((2, 4, 2, 8), np.float32)
ROWS = np.ones((8, 2, 8), np.float32)
BEGINS = np.array([0, 4, 8], np.int32)


@pytest.mark.parametrize(
    "change, exception, words",
    [
        (dict(window=3), ValueError, "window is 3"),
        (dict(window=(1, 2, 3)), ValueError, "window is"),
        (dict(window=(-2, 0)), ValueError, "window is"),
        (dict(window=(1.5, 0)), ValueError, "window is"),
        (dict(window=(1, 3), causal=True), ValueError, "window_right is 3"),
        (dict(window=(1 << 40, 3)), ValueError, "window_left is 1099511627776"),
        (dict(softcap=-1), ValueError, "softcap is -1"),
        (dict(softcap=float("nan")), ValueError, "softcap is nan"),
        (dict(softcap=float("inf")), ValueError, "softcap is inf"),
        (dict(alibi_slopes=[1.0, 2.0]), TypeError, "alibi_slopes is a list"),
        (dict(alibi_slopes=np.ones(2)), ValueError, "alibi_slopes is float64; it must be float32"),
        (dict(alibi_slopes=np.ones(3, np.float32)), ValueError, "alibi_slopes has shape"),
        (dict(bias=np.ones((4, 4))), ValueError, "bias is float64"),
        (dict(bias=np.ones((4, 5), np.float32)), ValueError, "bias has shape"),
        (dict(mask=np.ones((4, 4))), ValueError, "mask is float64; it must be bool or uint8"),
        (dict(mask=np.ones((3, 1, 4, 4), bool)), ValueError, "mask has shape"),
        (dict(mask_bits=np.ones((4, 1), bool)), ValueError, "mask_bits is bool; it must be uint8"),
        (dict(mask_bits=np.ones((4, 4), np.uint8)), ValueError, "mask_bits has shape .* without broadcasting the last dim"),
        (dict(mask_bits=np.ones((3, 1), np.uint8)), ValueError, "mask_bits has shape .* must broadcast"),
        (dict(mask_bits=np.uint8([[1]]), mask=np.ones(4, bool)), ValueError, "mask and mask_bits are both given"),
        (dict(sinks=np.ones((1, 2), np.float32)), ValueError, "sinks has shape"),
        (dict(sinks=np.ones(2, np.float16)), ValueError, "sinks is float16"),
    ],
)
def test_a_wrong_feature_is_named(change, exception, words):
    with pytest.raises(exception, match=words):
        flashtune.attention(ONES, ONES, ONES, **change)


@pytest.mark.parametrize(
    "change, exception, words",
    [
        (dict(q=ONES), ValueError, "q has shape .* by its cu_seqlens"),
        (dict(cu_seqlens_k=None), ValueError, "k has shape .* must be .batch"),
        (dict(cu_seqlens_q=[0, 4, 8]), TypeError, "cu_seqlens_q is a list"),
        (dict(cu_seqlens_q=BEGINS.astype(np.int64)), ValueError, "cu_seqlens_q is int64; it must be int32"),
        (dict(cu_seqlens_k=BEGINS[:2]), ValueError, "cu_seqlens_k is of 1 sequences and cu_seqlens_q of 2"),
        (dict(cu_seqlens_q=BEGINS[:0]), ValueError, r"cu_seqlens_q has shape \(0,\); it must be \(batch \+ 1,\)"),
        (dict(cu_seqlens_k=np.zeros((), np.int32)), ValueError, r"cu_seqlens_k has shape \(\); it must be \(batch \+ 1,\)"),
        (dict(cu_seqlens_k=BEGINS[None]), ValueError, r"cu_seqlens_k has shape \(1, 3\); it must be \(batch \+ 1,\)"),
        (dict(seqused_k=np.zeros((), np.int32)), ValueError, r"seqused_k has shape \(\); it must be \(batch,\)"),
        (dict(seqused_q=BEGINS), ValueError, "seqused_q is of 3 sequences"),
        (dict(seqused_q=np.array([4, 5], np.int32)), ValueError, r"seqused_q\[1\] is 5"),
        (dict(cu_seqlens_q=BEGINS + 1, max_seqlen_q=4), ValueError, r"cu_seqlens_q\[0\] is 1"),
        (dict(cu_seqlens_k=np.array([0, 5, 9], np.int32)), ValueError, r"cu_seqlens_k\[2\] is 9"),
        (dict(max_seqlen_q=3), ValueError, "cu_seqlens_q makes sequence 0 4 rows long"),
        (dict(max_seqlen_k=4.0), ValueError, "max_seqlen_k is 4.0; it must be an int"),
        (dict(q=ONES, cu_seqlens_q=None, max_seqlen_q=4), ValueError, "max_seqlen_q is given without cu_seqlens_q"),
        (dict(k=ONES, v=ONES, cu_seqlens_k=None, max_seqlen_k=4), ValueError, "max_seqlen_k .* without cu_seqlens_k or block_table"),
    ],
)
def test_wrong_lengths_are_named(change, exception, words):
    arguments = {**dict(q=ROWS, k=ROWS, v=ROWS, cu_seqlens_q=BEGINS, cu_seqlens_k=BEGINS), **change}
    with pytest.raises(exception, match=words):
        flashtune.attention_varlen(**arguments)


def test_numpy_integers_are_accepted():
    window = flashtune.attention(ONES, ONES, ONES, window=(np.int64(1), np.int32(0)), causal=True)
    np.testing.assert_array_equal(window, flashtune.attention(ONES, ONES, ONES, window=(1, 0), causal=True))
    for seed, same in ((np.int64(3), 3), ((np.uint64(3), np.int8(4)), (3, 4))):
        dropped = flashtune.attention(ONES, ONES, ONES, dropout_p=0.5, seed=seed)
        np.testing.assert_array_equal(dropped, flashtune.attention(ONES, ONES, ONES, dropout_p=0.5, seed=same))


def test_an_unknown_feature_is_a_type_error():
    with pytest.raises(TypeError, match="windows"):
        flashtune.attention_forward(ONES, ONES, ONES, windows=(1, 1))
