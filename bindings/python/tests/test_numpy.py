"""Attention on NumPy arrays by the CPU backend."""

import os
import threading

import flashtune
import numpy as np
import oracle
import pytest
from judge import assert_close

try:
    import ml_dtypes
except ImportError:
    ml_dtypes = None

DTYPES = [np.dtype(np.float32), np.dtype(np.float16)] + ([np.dtype(ml_dtypes.bfloat16)] if ml_dtypes else [])

# batch, heads_q, heads_kv, seqlen_q, seqlen_k, head_dim, head_dim_v, causal
PROBLEMS = [
    (2, 3, 3, 64, 64, 64, 64, False),
    (1, 4, 2, 65, 63, 40, 40, True),
    (1, 6, 1, 1, 130, 32, 32, "bottom-right"),
    (1, 2, 2, 50, 20, 16, 16, "bottom-right"),
    (1, 2, 2, 50, 20, 16, 16, "top-left"),
    (2, 2, 1, 33, 129, 80, 24, "top-left"),
    (1, 1, 1, 17, 5, 1, 3, False),
    (1, 2, 2, 300, 300, 72, 72, True),
]


def tensors(problem, dtype, seed=0):
    batch, heads_q, heads_kv, seqlen_q, seqlen_k, head_dim, head_dim_v, _ = problem
    generator = np.random.default_rng(seed)
    shapes = (
        (batch, seqlen_q, heads_q, head_dim),
        (batch, seqlen_k, heads_kv, head_dim),
        (batch, seqlen_k, heads_kv, head_dim_v),
        (batch, seqlen_q, heads_q, head_dim_v),
    )
    return [generator.standard_normal(shape).astype(np.float32).astype(dtype) for shape in shapes]


def check(q, k, v, dout, dtype, **options):
    """Runs both passes and judges out, lse and all gradients."""
    deterministic = options.pop("deterministic", False)
    out, lse = flashtune.attention_forward(q, k, v, **options)
    gradients = flashtune.attention_backward(dout, q, k, v, out, lse, deterministic=deterministic, **options)
    if "seed" in options:
        options["seed"] = (options["seed"], 0)
    exact = oracle.attention(q, k, v, dout, **options)
    naive = oracle.attention(q, k, v, dout, rounded_to=dtype, **options)
    assert out.dtype == dtype and lse.dtype == np.float32
    judge = [("out", out), *zip(("dq", "dk", "dv"), gradients)]
    for name, actual in judge:
        values = (x.astype(np.float64) for x in (actual, getattr(naive, name), getattr(exact, name)))
        assert_close(name, *values, dtype.name, gradient=name != "out")
    finite = np.isfinite(exact.lse)
    assert (np.isneginf(lse) == ~finite).all()
    np.testing.assert_allclose(lse[finite], exact.lse[finite], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: "-".join(map(str, problem)))
def test_both_passes_are_within_the_error_rule(problem, dtype):
    check(*tensors(problem, dtype), dtype, causal=problem[-1])


@pytest.mark.parametrize("causal", [False, True])
def test_both_passes_drop_the_documented_elements(causal):
    problem = (2, 4, 2, 70, 45, 32, 32, causal)
    check(*tensors(problem, DTYPES[0]), DTYPES[0], causal=causal, dropout_p=0.3, seed=1 << 40 | 12345)


@pytest.mark.parametrize("causal", [False, True])
def test_deterministic_gradients_are_right_and_the_same_at_every_run(causal):
    q, k, v, dout = tensors((1, 4, 2, 300, 500, 40, 40, causal), DTYPES[0])
    check(q, k, v, dout, DTYPES[0], causal=causal, deterministic=True)
    out, lse = flashtune.attention_forward(q, k, v, causal=causal)
    first, again = (
        flashtune.attention_backward(dout, q, k, v, out, lse, causal=causal, deterministic=True) for _ in range(2)
    )
    assert all((x == y).all() for x, y in zip(first, again))


def test_softmax_scale_is_applied_as_given():
    check(*tensors(PROBLEMS[0], DTYPES[0]), DTYPES[0], softmax_scale=0.31)


def test_the_mask_shows_when_scores_are_equal_and_v_is_the_identity():
    seqlen = 64
    zeros = np.zeros((1, seqlen, 1, 8), np.float32)
    identity = np.eye(seqlen, dtype=np.float32).reshape(1, seqlen, 1, seqlen)
    out = flashtune.attention(zeros, zeros, identity, dropout_p=0.5, seed=(3, 1 << 35))
    kept = oracle.kept(1, 1, seqlen, seqlen, 0.5, 3, 1 << 35)[0, 0]
    assert ((out[0, :, 0, :] != 0) == kept).all()


def test_dropout_p_is_rounded_to_a_65536th_that_stays_below_1():
    q, v = np.zeros((1, 64, 64, 8), np.float32), np.broadcast_to(np.eye(64, dtype=np.float32)[None, :, None], (1, 64, 64, 64))
    np.testing.assert_array_equal(flashtune.attention(q, q, v, dropout_p=0.49 / 65536, seed=1), flashtune.attention(q, q, v))
    for p in (1 - 1e-6, 1 - 2**-40):  # the second one is 1 in fp32
        out = flashtune.attention(q, q, v, dropout_p=p, seed=1)
        assert set(out.flat) == {0, 65536 / 64}


def test_v_of_ones_gives_ones():
    q, k, v, _ = tensors(PROBLEMS[1], DTYPES[0])
    out = flashtune.attention(q, k, np.ones_like(v))
    np.testing.assert_allclose(out, 1, rtol=1e-6)


def test_rows_without_keys_give_zeros_and_minus_infinity():
    q, k, v, dout = tensors((1, 2, 2, 6, 4, 8, 8, True), DTYPES[0])
    out, lse = flashtune.attention_forward(q, k, v, causal=True)
    assert (out[:, :2] == 0).all() and np.isneginf(lse[:, :, :2]).all()
    dq, _, _ = flashtune.attention_backward(dout, q, k, v, out, lse, causal=True)
    assert (dq[:, :2] == 0).all()


def test_no_keys_at_all_give_zeros():
    q = np.ones((2, 3, 2, 8), np.float32)
    empty = np.ones((2, 0, 2, 8), np.float32)
    out, lse = flashtune.attention(q, empty, empty, return_lse=True)
    assert out.shape == q.shape and (out == 0).all() and np.isneginf(lse).all()
    dq, dk, dv = flashtune.attention_backward(q, q, empty, empty, out, lse)
    assert (dq == 0).all() and dk.shape == dv.shape == empty.shape


def test_no_queries_give_nothing():
    empty = np.ones((2, 0, 2, 8), np.float32)
    k = np.ones((2, 3, 2, 8), np.float32)
    out, lse = flashtune.attention(empty, k, k, return_lse=True)
    assert out.shape == empty.shape and lse.shape == (2, 2, 0)
    dq, dk, dv = flashtune.attention_backward(empty, empty, k, k, out, lse)
    assert dq.shape == empty.shape and (dk == 0).all() and (dv == 0).all()


def test_views_into_a_packed_qkv_are_used_in_place():
    from flashtune import _numpy

    qkv = np.random.default_rng(0).standard_normal((2, 50, 3, 4, 32)).astype(np.float32)
    views = [qkv[:, :, i] for i in range(3)]
    assert all(np.shares_memory(x, y) for x, y in zip(_numpy._inputs(q=views[0], k=views[1], v=views[2])[1], views))
    np.testing.assert_array_equal(flashtune.attention(*views), flashtune.attention(*(x.copy() for x in views)))


def test_bhsd_layout_is_only_a_stride():
    q, k, v, _ = tensors(PROBLEMS[0], DTYPES[0])
    by_head = [np.ascontiguousarray(x.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3) for x in (q, k, v)]
    np.testing.assert_array_equal(flashtune.attention(*by_head), flashtune.attention(q, k, v))


@pytest.mark.parametrize("view", [lambda x: x[:, ::-1], lambda x: x[..., ::-1], lambda x: x[..., ::2]])
def test_views_that_strides_cannot_express_are_copied(view):
    q, k, v, _ = tensors(PROBLEMS[0], DTYPES[0])
    expected = flashtune.attention(*(np.ascontiguousarray(view(x)) for x in (q, k, v)))
    np.testing.assert_array_equal(flashtune.attention(view(q), view(k), view(v)), expected)


def test_reversed_dims_of_size_one_are_copied():
    # NumPy calls such a view contiguous, whatever its stride.
    q, k, v, dout = (np.random.default_rng(2).standard_normal((1, 5, 1, 8), np.float32) for _ in range(4))
    bias = np.ones((1, 1, 5, 5), np.float32)
    out, lse = flashtune.attention_forward(q, k, v, bias=bias)
    gradients = flashtune.attention_backward(dout, q, k, v, out, lse, bias=bias)
    turned = [x[::-1, :, ::-1] for x in (q, k, v)]
    assert all(x.strides[0] < 0 and x.flags.c_contiguous for x in turned)
    np.testing.assert_array_equal(flashtune.attention_forward(*turned, bias=bias[::-1])[0], out)
    found = flashtune.attention_backward(dout[::-1], *turned, out, lse[::-1], bias=bias[:, ::-1])
    for gradient, expected in zip(found[:4], gradients):
        np.testing.assert_array_equal(gradient, expected)
    assert flashtune.attention(q[:0][::-1], k[:0][::-1], v[:0][::-1]).shape == (0, 5, 1, 8)


def test_inputs_are_left_as_they_are():
    arrays = tensors(PROBLEMS[1], DTYPES[0])
    before = [x.copy() for x in arrays]
    q, k, v, dout = arrays
    out, lse = flashtune.attention_forward(q, k, v)
    flashtune.attention_backward(dout, q, k, v, out, lse)
    for now, then in zip(arrays, before):
        np.testing.assert_array_equal(now, then)


def test_a_seed_gives_one_mask_and_another_seed_another():
    q, k, v, _ = tensors(PROBLEMS[0], DTYPES[0])
    first, again, other = (flashtune.attention(q, k, v, dropout_p=0.2, seed=seed) for seed in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()


def test_numpy_seed_reproduces_dropout():
    q, k, v, _ = tensors(PROBLEMS[0], DTYPES[0])

    def two():
        np.random.seed(7)
        return [flashtune.attention(q, k, v, dropout_p=0.2) for _ in range(2)]

    first, second = two(), two()
    np.testing.assert_array_equal(first, second)
    assert (first[0] != first[1]).any()


def test_many_threads_at_once_get_their_own_results():
    cases = [tensors(problem, DTYPES[0], seed) for seed, problem in enumerate(PROBLEMS)]
    expected = [flashtune.attention(q, k, v) for q, k, v, _ in cases]
    wrong = []

    def work():
        for _ in range(5):
            for (q, k, v, _), out in zip(cases, expected):
                if not np.array_equal(flashtune.attention(q, k, v), out):
                    wrong.append(q.shape)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_computes_too():
    q, k, v, _ = tensors(PROBLEMS[0], DTYPES[0])
    expected = flashtune.attention(q, k, v)
    child = os.fork()
    if child == 0:
        same = False
        try:
            same = np.array_equal(flashtune.attention(q, k, v), expected)
        finally:
            os._exit(0 if same else 1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0


def misaligned(array):
    """The same values, contiguous and one byte off their alignment."""
    memory = np.empty(array.nbytes + 16, np.uint8)
    start = 1 + -memory.ctypes.data % 16
    view = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    view[...] = array
    assert view.flags.c_contiguous and (view.ctypes.data % array.itemsize or array.itemsize == 1)
    return view


def test_arrays_at_odd_addresses_are_copied():
    q, k, v, dout = tensors((2, 2, 2, 5, 9, 8, 8, False), DTYPES[0])
    features = dict(
        bias=np.linspace(-1, 1, 9, dtype=np.float32),
        alibi_slopes=np.array([0.5, 0.25], np.float32),
        sinks=np.array([0.1, 0.2], np.float32),
        seqused_k=np.array([9, 4], np.int32),
    )

    def run(change):
        tensors, changed = [change(x) for x in (q, k, v)], {name: change(array) for name, array in features.items()}
        out, lse = flashtune.attention_forward(*tensors, **changed)
        gradients = flashtune.attention_backward(
            change(dout), *tensors, change(out), change(lse), dlse=change(np.ones_like(lse)), **changed
        )
        merged = flashtune.merge(change(np.stack([out, dout])), change(np.stack([lse, lse])))
        return [out, lse, *gradients, *merged]

    for actual, expected in zip(run(misaligned), run(lambda array: array)):
        np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize("name", ["q", "v", "bias", "mask", "sinks", "seqused_k", "lse", "dlse"])
def test_masked_arrays_are_refused_since_their_mask_would_be_lost(name):
    q, k, v, dout = tensors((1, 2, 2, 5, 5, 8, 8, False), DTYPES[0])
    arrays = dict(
        q=q, k=k, v=v, dout=dout, out=dout, lse=np.zeros((1, 2, 5), np.float32), dlse=np.zeros((1, 2, 5), np.float32),
        bias=np.zeros(5, np.float32), mask=np.ones(5, bool), sinks=np.zeros(2, np.float32), seqused_k=np.ones(1, np.int32),
    )  # fmt: skip
    arrays[name] = np.ma.masked_array(arrays[name], mask=False)
    with pytest.raises(TypeError, match=f"^{name} is a masked array"):
        flashtune.attention_backward(**arrays)
