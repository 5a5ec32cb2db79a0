"""Attention on torch tensors: autograd, layouts, seeds, torch.compile.

The same tests run on the CPU and on a GPU.
"""

import flashtune
import numpy as np
import oracle
import pytest
import torch
from oracle_torch import judge, math_backend, plain, random, with_gradients

CUDA = pytest.param("cuda", marks=pytest.mark.needs_gpu)
DEVICES = ["cpu", CUDA]
# Pages and flash-attn's calls use these dtypes too.
NARROW_DEVICES = [
    pytest.param("cpu", torch.float32, id="cpu-fp32"),
    pytest.param("cpu", torch.bfloat16, id="cpu-bf16"),
    pytest.param("cpu", torch.float16, id="cpu-fp16"),
    pytest.param("cuda", torch.bfloat16, marks=pytest.mark.needs_gpu, id="cuda-bf16"),
    pytest.param("cuda", torch.float16, marks=pytest.mark.needs_gpu, id="cuda-fp16"),
]
TYPED_DEVICES = [*NARROW_DEVICES, pytest.param("cuda", torch.float32, marks=pytest.mark.needs_gpu, id="cuda-fp32")]

# batch, heads_q, heads_kv, seqlen_q, seqlen_k, head_dim, head_dim_v, causal
PROBLEMS = [
    (2, 4, 4, 128, 128, 64, 64, False),
    (1, 8, 2, 200, 200, 128, 128, True),
    (2, 6, 1, 65, 130, 40, 40, "bottom-right"),
    (1, 2, 2, 130, 65, 80, 80, "bottom-right"),
    (1, 2, 2, 130, 65, 32, 48, "top-left"),
    (1, 3, 3, 1, 77, 72, 72, False),
    (1, 2, 1, 33, 33, 5, 3, True),
]


def inputs(problem, dtype, device, seed=0):
    batch, heads_q, heads_kv, seqlen_q, seqlen_k, head_dim, head_dim_v, _ = problem
    return random(
        (batch, seqlen_q, heads_q, head_dim),
        (batch, seqlen_k, heads_kv, head_dim),
        (batch, seqlen_k, heads_kv, head_dim_v),
        (batch, seqlen_q, heads_q, head_dim_v),
        dtype=dtype,
        device=device,
        seed=seed,
    )


def working_dtype(device):
    return torch.float32 if device == "cpu" else torch.bfloat16


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: "-".join(map(str, problem)))
@pytest.mark.parametrize("device, dtype", TYPED_DEVICES)
def test_output_and_gradients_are_within_the_error_rule(device, dtype, problem):
    *tensors, dout = inputs(problem, dtype, device)
    causal = problem[-1]
    judge(lambda q, k, v: flashtune.attention(q, k, v, causal=causal), tensors, dout, causal=causal)


@pytest.mark.parametrize("device, dtype", TYPED_DEVICES)
def test_dropout_drops_the_documented_elements_in_both_passes(device, dtype):
    problem = (2, 4, 2, 100, 90, 64, 64, True)
    *tensors, dout = inputs(problem, dtype, device)
    seed, p = (1 << 45 | 77, 1 << 33 | 5), 0.25
    keep = oracle.kept(2, 4, 100, 90, p, *seed) * oracle.keep_scale(p)
    # fp64 holds the scale exactly; the naive version rounds it with the weights.
    keep = torch.from_numpy(keep).to(device)
    judge(
        lambda q, k, v: flashtune.attention(q, k, v, causal=True, dropout_p=p, seed=seed),
        tensors,
        dout,
        causal=True,
        keep=_Keep(keep),
    )


class _Keep:
    """The mask in the dtype of the weights that it multiplies."""

    def __init__(self, keep):
        self.keep = keep

    def __rmul__(self, weights):
        return weights * self.keep.to(weights.dtype)


@pytest.mark.parametrize("device", DEVICES)
def test_a_seed_tensor_and_the_same_numbers_agree(device):
    *tensors, _ = inputs(PROBLEMS[0], working_dtype(device), device)
    seed = torch.tensor([123, 456], device=device)
    by_tensor = flashtune.attention(*tensors, dropout_p=0.3, seed=seed)
    assert torch.equal(by_tensor, flashtune.attention(*tensors, dropout_p=0.3, seed=(123, 456)))
    assert not torch.equal(by_tensor, flashtune.attention(*tensors, dropout_p=0.3, seed=(123, 457)))


@pytest.mark.parametrize("device", DEVICES)
def test_manual_seed_reproduces_output_and_gradients(device):
    *tensors, dout = inputs(PROBLEMS[0], working_dtype(device), device)

    def run():
        return with_gradients(lambda *qkv: flashtune.attention(*qkv, dropout_p=0.3), tensors, dout)

    torch.manual_seed(11)
    first, other = run(), run()
    torch.manual_seed(11)
    again = run()
    assert torch.equal(first[0], again[0])
    # On a GPU many CTAs add to dq, so it agrees up to rounding; dk and dv are bit-equal.
    torch.testing.assert_close(first[1], again[1])
    assert torch.equal(first[2], again[2]) and torch.equal(first[3], again[3])
    assert not torch.equal(first[0], other[0])


@pytest.mark.parametrize("device", DEVICES)
def test_lse_is_the_logsumexp_and_carries_a_gradient(device):
    q, k, v, _ = inputs(PROBLEMS[1], working_dtype(device), device)
    out, lse = flashtune.attention(q.requires_grad_(), k, v, return_lse=True)
    assert lse.dtype == torch.float32
    exact = q.detach().double().requires_grad_()
    keys = k.repeat_interleave(4, 2).double()
    scores = torch.einsum("bqhd,bkhd->bhqk", exact, keys) * q.shape[-1] ** -0.5
    torch.testing.assert_close(lse.double(), scores.logsumexp(-1), rtol=1e-4, atol=1e-4)
    (gradient,) = torch.autograd.grad(lse.sum(), q, retain_graph=True)
    (expected,) = torch.autograd.grad(scores.logsumexp(-1).sum(), exact)
    torch.testing.assert_close(gradient.double(), expected, rtol=2e-2, atol=2e-3)
    # The gradient of both outputs is the sum of their gradients.
    (of_out,) = torch.autograd.grad(out.float().sum(), q, retain_graph=True)
    (of_both,) = torch.autograd.grad(out.float().sum() + lse.sum(), q)
    torch.testing.assert_close(of_both, of_out + gradient, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("device", DEVICES)
def test_the_calls_without_autograd_give_what_autograd_gives(device):
    *tensors, dout = inputs(PROBLEMS[1], working_dtype(device), device)
    options = dict(causal=True, softmax_scale=0.2, dropout_p=0.1, seed=9)
    expected = with_gradients(flashtune.attention, tensors, dout, **options)
    out, lse = flashtune.attention_forward(*tensors, **options)
    gradients = flashtune.attention_backward(dout, *tensors, out, lse, **options)
    assert not out.requires_grad
    for actual, wanted in zip((out, *gradients), expected):
        torch.testing.assert_close(actual, wanted)


@pytest.mark.parametrize("device", DEVICES)
def test_views_into_a_packed_qkv_are_read_in_place(device):
    dtype = working_dtype(device)
    qkv, dout = random((2, 70, 3, 4, 64), (2, 70, 4, 64), dtype=dtype, device=device)
    views = qkv.unbind(2)
    expected = with_gradients(flashtune.attention, [x.clone() for x in views], dout)
    packed = qkv.clone().requires_grad_()
    out = flashtune.attention(*packed.unbind(2))
    (gradient,) = torch.autograd.grad(out, packed, dout)
    assert torch.equal(out, expected[0])
    for actual, wanted in zip(gradient.unbind(2), expected[1:]):
        torch.testing.assert_close(actual, wanted)


@pytest.mark.parametrize("device", DEVICES)
def test_bhsd_and_strided_last_dims_are_only_layouts(device):
    *tensors, dout = inputs(PROBLEMS[0], working_dtype(device), device)
    expected = with_gradients(flashtune.attention, tensors, dout)
    by_head = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors]
    by_dim = [x.transpose(1, 3).contiguous().transpose(1, 3) for x in tensors]
    for layout in (by_head, by_dim):
        leaves = [x.requires_grad_() for x in layout]
        out = flashtune.attention(*leaves)
        assert torch.equal(out, expected[0])
        # In real models the gradient of such an output has a last dim that is not contiguous.
        strided = dout.transpose(1, 3).contiguous().transpose(1, 3)
        for actual, wanted in zip(torch.autograd.grad(out, leaves, strided), expected[1:]):
            torch.testing.assert_close(actual, wanted)


@pytest.mark.parametrize("device", DEVICES)
def test_an_expanded_gradient_is_accepted(device):
    *tensors, dout = inputs(PROBLEMS[0], working_dtype(device), device)
    leaves = [x.requires_grad_() for x in tensors]
    gradients = torch.autograd.grad(flashtune.attention(*leaves).sum(), leaves)
    expected = torch.autograd.grad(flashtune.attention(*leaves), leaves, torch.ones_like(dout))
    for actual, wanted in zip(gradients, expected):
        torch.testing.assert_close(actual, wanted)


@pytest.mark.parametrize("device", DEVICES)
def test_a_gradient_that_all_rows_share_is_accepted(device):
    """The gradient of a sum over the sequence: rows have a stride of 0 and the last dim is
    contiguous.
    """
    *tensors, dout = inputs(PROBLEMS[0], working_dtype(device), device)
    leaves = [x.requires_grad_() for x in tensors]
    shared = dout[:, :1].expand_as(dout)
    gradients = torch.autograd.grad(flashtune.attention(*leaves), leaves, shared)
    expected = torch.autograd.grad(flashtune.attention(*leaves), leaves, shared.contiguous())
    for actual, wanted in zip(gradients, expected):
        torch.testing.assert_close(actual, wanted)


@pytest.mark.parametrize("device", DEVICES)
def test_only_requested_gradients_are_computed(device):
    q, k, v, _ = inputs(PROBLEMS[0], working_dtype(device), device)
    v.requires_grad_()
    flashtune.attention(q, k, v).sum().backward()
    assert v.grad is not None and q.grad is None and k.grad is None


@pytest.mark.parametrize("device", DEVICES)
def test_empty_sequences_give_zeros_in_both_passes(device):
    for seqlen_q, seqlen_k in ((0, 5), (5, 0), (0, 0)):
        *tensors, dout = inputs((2, 2, 2, seqlen_q, seqlen_k, 64, 64, False), working_dtype(device), device)
        for tensor in with_gradients(flashtune.attention, tensors, dout):
            assert torch.count_nonzero(tensor) == 0


@pytest.mark.parametrize("device", DEVICES)
def test_nan_reaches_only_what_depends_on_it(device):
    q, k, v, _ = inputs(PROBLEMS[0], working_dtype(device), device)
    q[0, 3, 1, 0] = float("nan")
    out = flashtune.attention(q, k, v)
    assert out[0, 3, 1].isnan().all() and out.isnan().sum() == out.shape[-1]


@pytest.mark.parametrize("device", DEVICES)
def test_activation_checkpointing_sees_the_same_mask(device):
    *tensors, dout = inputs(PROBLEMS[0], working_dtype(device), device)

    def attend(*qkv):
        return flashtune.attention(*qkv, dropout_p=0.4)

    torch.manual_seed(3)
    expected = with_gradients(attend, tensors, dout)
    torch.manual_seed(3)
    checkpointed = with_gradients(
        lambda *qkv: torch.utils.checkpoint.checkpoint(attend, *qkv, use_reentrant=False), tensors, dout
    )
    for actual, wanted in zip(checkpointed, expected):
        torch.testing.assert_close(actual, wanted)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
def test_torch_compile_traces_attention_without_a_break(device, dropout_p):
    *tensors, dout = inputs(PROBLEMS[1], working_dtype(device), device)

    def layer(q, k, v):
        return flashtune.attention(q * 2, k, v, causal=True, dropout_p=dropout_p, seed=(1 << 63 | 5, 8))

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for actual, wanted in zip(with_gradients(compiled, tensors, dout), with_gradients(layer, tensors, dout)):
        torch.testing.assert_close(actual, wanted)


@pytest.mark.parametrize("device", DEVICES)
def test_torch_and_numpy_agree_with_the_same_seed(device):
    q, k, v, _ = inputs(PROBLEMS[0], torch.float16, device)
    options = dict(causal=True, dropout_p=0.5, seed=21)
    by_torch = flashtune.attention(q, k, v, **options).cpu().numpy()
    by_numpy = flashtune.attention(*(x.cpu().numpy() for x in (q, k, v)), **options)
    np.testing.assert_allclose(by_torch.astype(float), by_numpy.astype(float), atol=4e-3)


def test_plain_attention_agrees_with_torchs_math_backend():
    # The plain version, by which the other tests judge, is itself compared with torch.
    *tensors, _ = inputs((1, 4, 2, 30, 50, 16, 16, True), torch.float64, "cpu")
    torch.testing.assert_close(plain(*tensors, causal=True), math_backend(*tensors, causal=True))


@pytest.mark.parametrize(
    "change, exception, words",
    [
        (dict(k=None), TypeError, "k is a NoneType"),
        (dict(k=np.ones((1, 4, 2, 8), np.float32)), TypeError, "k is a ndarray"),
        (dict(v=torch.ones(1, 4, 2, 8, dtype=torch.float16)), ValueError, "v is torch.float16; it must be torch.float32, as q is"),
        (dict(q=torch.ones(4, 2, 8)), ValueError, "q has shape"),
        (dict(k=torch.ones(1, 4, 2, 9)), ValueError, "k has shape"),
        (dict(q=torch.ones(1, 4, 3, 8)), ValueError, "multiple of num_heads_kv"),
        (dict(causal="no"), ValueError, "causal is 'no'"),
        (dict(dropout_p=2), ValueError, "dropout_p is 2"),
        (dict(dropout_p=0.1, seed=torch.tensor([1])), ValueError, "seed is torch.int64 of shape"),
        (dict(dropout_p=0.1, seed="a"), ValueError, "seed is 'a'"),
        (dict(v=torch.ones(1, 4, 2, 8, device="meta")), ValueError, "v is torch.float32 on meta"),
    ],
)
def test_a_wrong_argument_is_named(change, exception, words):
    ones = torch.ones(1, 4, 2, 8)
    with pytest.raises(exception, match=words):
        flashtune.attention(**{**dict(q=ones, k=ones, v=ones), **change})


SPARSE = torch.ones(1, 4, 2, 8, dtype=torch.bfloat16).to_sparse()


@pytest.mark.parametrize("name", ["q", "k", "v", "out", "lse", "dout", "dlse", "bias", "mask", "sinks", "alibi_slopes"])
def test_a_sparse_tensor_is_named(name):
    ones, lse = SPARSE.to_dense(), torch.zeros(1, 2, 4)
    forward = dict(q=ones, k=ones, v=ones)
    calls = [(flashtune.attention_backward, forward | dict(out=ones, lse=lse, dout=ones))]
    if name not in ("out", "lse", "dout", "dlse"):
        calls += [(flashtune.attention, forward), (flashtune.attention_kvcache, {"q": ones, "k_cache": ones, "v_cache": ones})]
    for function, arguments in calls:
        key = f"{name}_cache" if name in "kv" and function is flashtune.attention_kvcache else name
        with pytest.raises(ValueError, match=f"{name} has the layout torch.sparse_coo; it must be torch.strided"):
            function(**arguments | {key: SPARSE})


@pytest.mark.parametrize("name", ["k_cache", "v_cache", "k", "v", "cache_seqlens", "cache_batch_idx", "seqused_new", "rotary_cos"])
def test_a_sparse_tensor_of_an_append_is_named(name):
    ones, lengths = SPARSE.to_dense(), torch.zeros(1, dtype=torch.int32)
    arguments = dict(k_cache=ones.clone(), v_cache=ones.clone(), k=ones[:, :1], v=ones[:, :1], cache_seqlens=lengths)
    arguments |= dict(rotary_cos=torch.ones(4, 4), rotary_sin=torch.ones(4, 4))
    arguments[name] = arguments.get(name, lengths).to_sparse()
    with pytest.raises(ValueError, match=f"{name} has the layout torch.sparse_coo; it must be torch.strided"):
        flashtune.kv_append(**arguments)


def test_a_sparse_tensor_of_other_functions_is_named():
    ones, lse = SPARSE.to_dense(), torch.zeros(1, 1, 2, 4)
    for call, name in (
        (lambda: flashtune.merge(SPARSE[None], lse, dtype=torch.float32), "outs"),
        (lambda: flashtune.merge(ones[None], lse.to_sparse()), "lses"),
        (lambda: flashtune.quantize(SPARSE, torch.int8), "x"),
        (lambda: flashtune.rotate(SPARSE, 1), "x"),
        (lambda: flashtune.attention_fp8(ones, SPARSE, ones), "k"),
        (lambda: flashtune.attention(ones, ones.char(), ones.char(), k_descale=lse.to_sparse()), "k_descale"),
        (lambda: flashtune.attention_varlen(ones, ones, ones, seqused_k=torch.ones(1, dtype=torch.int32).to_sparse()), "seqused_k"),
    ):
        with pytest.raises(ValueError, match=f"{name} has the layout torch.sparse_coo; it must be torch.strided"):
            call()


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32, torch.complex64])
def test_other_dtypes_are_refused(dtype):
    ones = torch.ones(1, 4, 2, 8, dtype=dtype)
    with pytest.raises(ValueError, match=f"q is {dtype}"):
        flashtune.attention(ones, ones, ones)


def test_a_device_that_is_neither_cpu_nor_cuda_is_not_supported():
    ones = torch.ones(1, 4, 2, 8, device="meta")
    with pytest.raises(NotImplementedError, match="q is on meta"):
        flashtune.attention(ones, ones, ones)


def test_a_second_derivative_is_refused():
    leaves = [torch.ones(1, 4, 2, 8, requires_grad=True) for _ in range(3)]
    out = flashtune.attention(*leaves)
    (gradient,) = torch.autograd.grad((out * out).sum(), leaves[0], create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        gradient.sum().backward()


@pytest.mark.parametrize("compiles", [False, True])
def test_a_double_backward_pass_is_refused(compiles):
    q = torch.randn(1, 5, 2, 8, requires_grad=True)
    attend = torch.compile(flashtune.attention, backend="aot_eager") if compiles else flashtune.attention
    (gradient,) = torch.autograd.grad(attend(q, q, q).sum(), q, create_graph=True)
    with pytest.raises(RuntimeError):
        gradient.sum().backward()
