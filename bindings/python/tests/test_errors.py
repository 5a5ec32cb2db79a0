"""Wrong arguments raise exceptions that name the argument."""

import flashtune
import numpy as np
import pytest

Q = np.ones((1, 4, 2, 8), np.float32)


@pytest.mark.parametrize(
    "change, exception, words",
    [
        (dict(q=None), TypeError, "q is a NoneType"),
        (dict(q=[[1.0]]), TypeError, "q is a list"),
        (dict(k=[1.0]), TypeError, "k is a list"),
        (dict(v="v"), TypeError, "v is a str"),
        (dict(q=Q[0]), ValueError, "q has shape"),
        (dict(v=Q[0]), ValueError, "v has shape"),
        (dict(q=Q[:, :, :0]), ValueError, "num_heads_q"),
        (dict(k=Q[:, :, :0], v=Q[:, :, :0]), ValueError, "num_heads_kv"),
        (dict(k=np.ones((2, 4, 2, 8), np.float32)), ValueError, "k has shape"),
        (dict(k=np.ones((1, 4, 2, 9), np.float32)), ValueError, "k has shape"),
        (dict(v=np.ones((1, 5, 2, 8), np.float32)), ValueError, "v has shape"),
        (dict(v=np.ones((1, 4, 1, 8), np.float32)), ValueError, "v has shape"),
        (dict(q=np.ones((1, 4, 3, 8), np.float32)), ValueError, "multiple of num_heads_kv"),
        (dict(q=Q.astype(np.float64)), ValueError, "k is float32"),
        (dict(q=Q.astype(int), k=Q.astype(int), v=Q.astype(int)), ValueError, "q is int64"),
        (dict(q=Q.astype(">f4"), k=Q.astype(">f4"), v=Q.astype(">f4")), ValueError, "q is >f4"),
        (dict(causal="left"), ValueError, "causal is 'left'"),
        (dict(causal=[]), ValueError, "causal is"),
        (dict(softmax_scale=0), ValueError, "softmax_scale is 0"),
        (dict(softmax_scale=1e300), ValueError, "softmax_scale"),
        (dict(softmax_scale="1"), ValueError, "softmax_scale"),
        (dict(softmax_scale=float("nan")), ValueError, "softmax_scale"),
        # These values round to 0 in fp32, which has a meaning of its own.
        (dict(softmax_scale=1e-50), ValueError, r"softmax_scale is 1e-50; it must be a number whose magnitude is from 2\*\*-100"),
        (dict(softmax_scale=-1e-31), ValueError, "softmax_scale is -1e-31"),
        (dict(softcap=1e-60), ValueError, r"softcap is 1e-60; it must be a number whose magnitude .* \(0 means none\)"),
        (dict(softcap=1e31), ValueError, r"softcap is 1e\+31"),
        (dict(softmax_scale=1e18, softcap=1e-18), ValueError, r"\|softmax_scale\| / softcap is 1e36"),
        (dict(softmax_scale=[0.1, 0.2]), ValueError, r"softmax_scale is \[0.1, 0.2\]; it must be a number"),
        (dict(softmax_scale=np.ones(2)), ValueError, r"softmax_scale is array\(\[1., 1.\]\); it must be a number"),
        (dict(softmax_scale=10**400), ValueError, "softmax_scale is 1000"),
        (dict(softcap=None), ValueError, "softcap is None; it must be a number"),
        (dict(softcap=np.ones(2)), ValueError, r"softcap is array\(\[1., 1.\]\); it must be a number"),
        (dict(dropout_p=None), ValueError, "dropout_p is None; it must be the probability of dropping"),
        (dict(dropout_p="x"), ValueError, "dropout_p is 'x'; it must be the probability of dropping"),
        (dict(dropout_p=[1]), ValueError, r"dropout_p is \[1\]; it must be the probability of dropping"),
        (dict(dropout_p=-0.1), ValueError, "dropout_p is -0.1"),
        (dict(dropout_p=1.0), ValueError, "dropout_p is 1.0"),
        (dict(dropout_p=float("nan")), ValueError, "dropout_p is nan"),
        (dict(return_lse="no"), ValueError, "return_lse is 'no'; it must be False or True"),
        (dict(return_lse=1), ValueError, "return_lse is 1; it must be False or True"),
        (dict(deterministic=2), ValueError, "deterministic is 2; it must be False or True"),
        (dict(deterministic="no"), ValueError, "deterministic is 'no'"),
        (dict(batch_invariant=2), ValueError, "batch_invariant is 2; it must be False or True"),
        (dict(batch_invariant=True, dropout_p=0.1), ValueError, "batch_invariant is true and dropout_p is not 0"),
        (dict(dropout_p=0.1, seed=-1), ValueError, "seed is -1"),
        (dict(dropout_p=0.1, seed=1 << 64), ValueError, "seed is"),
        (dict(dropout_p=0.1, seed=1.5), ValueError, "seed is 1.5"),
        (dict(dropout_p=0.1, seed=(1, 2, 3)), ValueError, "seed is"),
    ],
)
def test_a_wrong_argument_is_named(change, exception, words):
    arguments = {**dict(q=Q, k=Q, v=Q), **change}
    with pytest.raises(exception, match=words):
        flashtune.attention(**arguments)


LEAST, MOST = 2.0**-100, 2.0**100


@pytest.mark.parametrize(
    "softmax_scale, softcap",
    [(LEAST, 0), (MOST, 0), (-MOST, 0), (LEAST, LEAST), (1, LEAST), (1, MOST), (MOST, MOST)],
)
def test_scales_and_caps_at_the_ends_of_their_range_give_numbers(softmax_scale, softcap):
    # With q = 0 all weights are equal, and so are the gradients of v.
    v = np.random.default_rng(1).standard_normal(Q.shape, np.float32)
    options = dict(softmax_scale=softmax_scale, softcap=softcap)
    out, lse = flashtune.attention_forward(0 * Q, Q, v, **options)
    np.testing.assert_allclose(out, np.broadcast_to(v.mean(1, keepdims=True), out.shape), rtol=1e-5, atol=1e-6)
    dq, dk, dv = flashtune.attention_backward(Q, 0 * Q, Q, v, out, lse, dropout_p=0.9999, seed=1, **options)
    assert np.isfinite(dq).all() and not dk.any() and np.isfinite(dv).all()
    dq, dk, dv = flashtune.attention_backward(Q, 0 * Q, Q, v, out, lse, **options)
    np.testing.assert_allclose(dv, np.ones_like(dv), rtol=1e-5)


def test_a_head_dim_over_512_is_refused():
    wide = np.ones((1, 2, 1, 513), np.float32)
    with pytest.raises((ValueError, NotImplementedError), match="head_dim is 513"):
        flashtune.attention(wide, wide, wide)


@pytest.mark.parametrize(
    "change, words",
    [
        (dict(out=Q[:, :3]), "out has shape"),
        (dict(dout=Q[..., :7]), "dout has shape"),
        (dict(lse=np.zeros((1, 4, 2), np.float32)), "lse has shape"),
        (dict(dout=Q.astype(np.float16)), "dout is float16"),
        (dict(lse=np.zeros((1, 2, 4), np.complex64)), "lse is complex64; it must be float32"),
        (dict(lse=np.zeros((1, 2, 4))), "lse is float64; it must be float32"),
        (dict(dlse=np.zeros((1, 2, 4), bool)), "dlse is bool; it must be float32"),
        (dict(dropout_p=0.5), "seed is None"),
        (dict(deterministic=None), "deterministic is None"),
    ],
)
def test_a_wrong_argument_of_the_backward_pass_is_named(change, words):
    arguments = {**dict(dout=Q, q=Q, k=Q, v=Q, out=Q, lse=np.zeros((1, 2, 4), np.float32)), **change}
    with pytest.raises(ValueError, match=words):
        flashtune.attention_backward(**arguments)


def test_an_array_of_another_library_is_refused_as_dlse():
    torch = pytest.importorskip("torch")
    lse = np.zeros((1, 2, 4), np.float32)
    with pytest.raises(TypeError, match="dlse is a Tensor; it must be a NumPy array, as q is"):
        flashtune.attention_backward(Q, Q, Q, Q, Q, lse, dlse=torch.zeros(1, 2, 4))
    q = torch.from_numpy(Q)
    for dlse, kind in ((1.0, "float"), ([1.0], "list"), (lse, "ndarray")):
        with pytest.raises(TypeError, match=f"dlse is a {kind}; it must be a torch tensor, as q is"):
            flashtune.attention_backward(q, q, q, q, q, torch.zeros(1, 2, 4), dlse=dlse)


def refused(words, function, *arguments, kind=ValueError, **options):
    with pytest.raises(kind, match=words) as caught:
        function(*arguments, **options)
    assert "\n" not in str(caught.value)


def test_a_wrong_flag_is_named():
    lse = np.zeros((1, 2, 4), np.float32)
    refused("need_dbias is 'x'; it must be False or True", flashtune.attention_backward, Q, Q, Q, Q, Q, lse, need_dbias="x")
    for name in ("backward", "need_dbias", "need_dlse"):
        refused(f"{name} is None; it must be False or True", flashtune.prepare, Q, Q, Q, **{name: None})
    refused("return_lse is 2; it must", flashtune.attention_kvcache, Q, Q, Q, return_lse=2)
    refused("return_lse is 2; it must", flashtune.attention_varlen, Q, Q, Q, return_lse=2)


@pytest.mark.parametrize("path", [None, 3, ["x"], Q])
def test_a_wrong_path_is_named(path):
    for function in (flashtune.export_records, flashtune.import_records) + (() if path is None else (flashtune.use_pack,)):
        refused(f"path is a {type(path).__name__}; it must be a str, bytes or an os.PathLike", function, path, kind=TypeError)


def test_a_wrong_argument_of_a_tuning_run_is_named():
    refused("progress is a int; it must be a function, or None", flashtune.autotune, Q, Q, Q, progress=3, kind=TypeError)
    refused("retune is 'no'; it must be False or True", flashtune.autotune, Q, Q, Q, retune="no")
    refused(r"device is a ndarray of shape \(1, 4, 2, 8\); it must be the number of a GPU", flashtune.pack_info, Q)
    refused(r"largest is a ndarray of shape \(1, 4, 2, 8\); it must be", flashtune.prepare_range, Q, Q, Q, largest=Q)


def test_packed_rows_without_their_offsets_are_told_of_them():
    begins = np.array([0, 4], np.int32)
    for name, other in (("q", "k"), ("k", "q")):
        words = rf"{name} has shape \(4, 2, 8\); it must be \(batch, seqlen, heads, dim\), or with cu_seqlens_{name} \(total, heads, dim\)"
        refused(words, flashtune.attention_varlen, Q[0], Q[0], Q[0], **{f"cu_seqlens_{other}": begins})


@pytest.mark.parametrize("dtype", ["complex64", "bool", "U1", "int64"])
def test_offsets_of_a_wrong_dtype_are_named(dtype):
    """The longest length was computed before the dtype was checked."""
    begins = np.array([0, 4], np.int32)
    lengths = dict(cu_seqlens_q=begins, cu_seqlens_k=begins)
    for name in lengths:
        refused(f"{name} is .*; it must be int32", flashtune.attention_varlen, Q[0], Q[0], Q[0], **lengths | {name: begins.astype(dtype)})


def test_a_large_wrong_argument_is_told_in_one_line():
    q, table = Q.astype(np.float16), np.ones((40, 40), np.float32)
    refused(r"softcap is a ndarray of shape \(40, 40\); it must be", flashtune.attention, Q, Q, Q, softcap=table)
    refused(r"window is a ndarray of shape \(40, 40\); it must be", flashtune.attention, Q, Q, Q, window=table)
    refused(r"descale is \[1.0, .*\.\.\.; it must be", flashtune.quantize, q, np.int8, descale=table[0].tolist())
    refused(r"seed is a ndarray of shape", flashtune.rotate, q, table)
    refused(r"num_splits is a ndarray", flashtune.attention_kvcache, Q, Q, Q, num_splits=table)


def test_a_wrong_dtype_to_quantise_or_rotate_is_named():
    for dtype in ("float32", "float64", "int8", ">f2"):
        x = Q.astype(dtype)
        refused(f"x is {x.dtype}; it must be float16 or bfloat16", flashtune.quantize, x, np.int8)
        refused(f"x is {x.dtype}; it must be float16 or bfloat16", flashtune.rotate, x, 1)


def test_blocks_of_two_libraries_are_refused():
    torch = pytest.importorskip("torch")
    blocks, full = np.ones((2, 2), bool), torch.ones(2, 2, dtype=torch.bool)
    refused("full is a Tensor; it must be a ndarray, as blocks is", flashtune.block_mask, blocks, full, kind=TypeError)
    refused("full is a ndarray; it must be a Tensor, as blocks is", flashtune.block_mask, full, blocks, kind=TypeError)
    refused("full is on meta; it must be on cpu, as blocks is", flashtune.block_mask, full, full.to("meta"))


@pytest.mark.parametrize("longest", [1 << 70, -1, 1.5, "x"])
def test_a_wrong_longest_length_is_named(longest):
    begins = np.array([0, 4], np.int32)
    for name in ("max_seqlen_q", "max_seqlen_k"):
        with pytest.raises(ValueError, match=f"{name} is .*; it must be an int that no sequence exceeds"):
            flashtune.attention_varlen(Q[0], Q[0], Q[0], cu_seqlens_q=begins, cu_seqlens_k=begins, **{name: longest})


def test_every_exception_is_a_flashtune_error_with_its_status():
    with pytest.raises(flashtune.FlashtuneError) as caught:
        flashtune.attention(np.ones((1, 4, 3, 8), np.float32), Q, Q)
    assert caught.value.status == 1 and isinstance(caught.value, flashtune.InvalidArgumentError)
