"""The calls of flash-attn 2.8: exact signatures, and results against torch's math backend."""

import inspect

import pytest
import torch
from flashtune import flash_attn_interface as interface
from oracle_torch import judge, math_backend, plain, random
from test_torch import NARROW_DEVICES

OPTIONS = [
    ("dropout_p", 0.0),
    ("softmax_scale", None),
    ("causal", False),
    ("window_size", (-1, -1)),
    ("softcap", 0.0),
    ("alibi_slopes", None),
    ("deterministic", False),
    ("return_attn_probs", False),
]


LENGTHS = ["cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"]


@pytest.mark.parametrize(
    "name, tensors",
    [
        ("flash_attn_func", ["q", "k", "v"]),
        ("flash_attn_kvpacked_func", ["q", "kv"]),
        ("flash_attn_qkvpacked_func", ["qkv"]),
        ("flash_attn_varlen_func", ["q", "k", "v", *LENGTHS]),
        ("flash_attn_varlen_kvpacked_func", ["q", "kv", *LENGTHS]),
        ("flash_attn_varlen_qkvpacked_func", ["qkv", "cu_seqlens", "max_seqlen"]),
    ],
)
def test_signatures_are_those_of_flash_attn(name, tensors):
    parameters = inspect.signature(getattr(interface, name)).parameters.values()
    assert all(parameter.kind == parameter.POSITIONAL_OR_KEYWORD for parameter in parameters)
    expected = [(tensor, inspect.Parameter.empty) for tensor in tensors] + OPTIONS
    # seqused_k and the descales as in FlashAttention-3.
    if name == "flash_attn_varlen_func":
        expected += [("block_table", None), ("seqused_k", None)]
    if name in ("flash_attn_func", "flash_attn_varlen_func"):
        expected += [("q_descale", None), ("k_descale", None), ("v_descale", None)]
    assert [(parameter.name, parameter.default) for parameter in parameters] == expected


# batch, heads, heads_kv, seqlen_q, seqlen_k, head_dim
SHAPES = [(2, 4, 4, 128, 128, 64), (1, 8, 2, 113, 203, 128), (1, 4, 1, 256, 128, 64), (1, 2, 2, 64, 64, 256)]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("device, dtype", NARROW_DEVICES)
def test_output_and_gradients_agree_with_the_math_backend(device, dtype, shape, causal):
    batch, heads, heads_kv, seqlen_q, seqlen_k, dim = shape
    *tensors, dout = random(
        (batch, seqlen_q, heads, dim), (batch, seqlen_k, heads_kv, dim), (batch, seqlen_k, heads_kv, dim),
        (batch, seqlen_q, heads, dim), dtype=dtype, device=device,
    )  # fmt: skip
    # The math backend's gradients of a row without keys are NaN; those of flash-attn and `plain`
    # are 0.
    exact = plain if causal and seqlen_q > seqlen_k else math_backend
    judge(lambda q, k, v: interface.flash_attn_func(q, k, v, causal=causal), tensors, dout, exact=exact, causal=causal)


@pytest.mark.parametrize("device, dtype", NARROW_DEVICES)
def test_packed_calls_give_packed_gradients(device, dtype):
    q, qkv, dout = random((2, 90, 4, 64), (2, 90, 3, 4, 64), (2, 90, 4, 64), dtype=dtype, device=device)
    leaf = qkv.clone().requires_grad_()
    out = interface.flash_attn_qkvpacked_func(leaf, causal=True)
    (gradient,) = torch.autograd.grad(out, leaf, dout)
    separate = [x.clone().requires_grad_() for x in qkv.unbind(2)]
    expected = interface.flash_attn_func(*separate, causal=True)
    assert torch.equal(out, expected)
    for actual, wanted in zip(gradient.unbind(2), torch.autograd.grad(expected, separate, dout)):
        torch.testing.assert_close(actual, wanted)

    q_leaf, kv_leaf = q.clone().requires_grad_(), qkv[:, :, 1:, :2].clone().requires_grad_()
    out = interface.flash_attn_kvpacked_func(q_leaf, kv_leaf, softmax_scale=0.1)
    gradients = torch.autograd.grad(out, (q_leaf, kv_leaf), dout)
    separate = [q.clone().requires_grad_(), *(x.detach().clone().requires_grad_() for x in kv_leaf.unbind(2))]
    expected = interface.flash_attn_func(*separate, softmax_scale=0.1)
    assert torch.equal(out, expected)
    unpacked = (gradients[0], *gradients[1].unbind(2))
    for actual, wanted in zip(unpacked, torch.autograd.grad(expected, separate, dout)):
        torch.testing.assert_close(actual, wanted)


def test_return_attn_probs_returns_lse_and_no_matrix():
    q, k, v = random(*[(1, 9, 2, 8)] * 3, dtype=torch.float32, device="cpu")
    out, lse, matrix = interface.flash_attn_func(q, k, v, return_attn_probs=True)
    assert torch.equal(out, interface.flash_attn_func(q, k, v))
    assert lse.shape == (1, 2, 9) and lse.dtype == torch.float32 and matrix is None
    packed = interface.flash_attn_qkvpacked_func(torch.stack([q, k, v], 2), return_attn_probs=True)
    assert torch.equal(packed[0], out) and torch.equal(packed[1], lse) and packed[2] is None


SLOPES = torch.tensor([0.5, 0.1, 0.02, 0.0])


@pytest.mark.parametrize(
    "options, meaning",
    [
        (dict(window_size=(16, 0)), dict(window=(16, 0))),
        (dict(window_size=[-1, 5]), dict(window=(-1, 5))),
        # causal hides the keys right of the diagonal, whatever the window says.
        (dict(window_size=(16, 5), causal=True), dict(window=(16, -1), causal=True)),
        (dict(softcap=1.5), dict(softcap=1.5)),
        (dict(alibi_slopes=SLOPES, causal=True), dict(alibi_slopes=SLOPES, causal=True)),
        (dict(alibi_slopes=SLOPES.expand(2, 4), softcap=2.0), dict(alibi_slopes=SLOPES, softcap=2.0)),
    ],
    ids=str,
)
@pytest.mark.parametrize("device, dtype", NARROW_DEVICES)
def test_window_softcap_and_alibi_mean_the_same_as_in_flash_attn(device, dtype, options, meaning):
    options, meaning = ({name: _on(device, value) for name, value in some.items()} for some in (options, meaning))
    *tensors, dout = random((2, 65, 4, 64), (2, 130, 2, 64), (2, 130, 2, 64), (2, 65, 4, 64), dtype=dtype, device=device)
    judge(lambda q, k, v: interface.flash_attn_func(q, k, v, **options), tensors, dout, **meaning)


def _on(device, value):
    return value.to(device) if isinstance(value, torch.Tensor) else value


@pytest.mark.parametrize("device, dtype", NARROW_DEVICES)
def test_varlen_calls_equal_one_call_for_each_sequence(device, dtype):
    lengths_q, lengths_k = [13, 0, 61, 30], [40, 17, 83, 0]
    begins_q, begins_k = (
        torch.tensor([0, *lengths], dtype=torch.int32, device=device).cumsum(0, dtype=torch.int32)
        for lengths in (lengths_q, lengths_k)
    )
    q, kv, dout = random((104, 4, 64), (140, 2, 2, 64), (104, 4, 64), dtype=dtype, device=device)
    options = dict(causal=True, window_size=(20, 0), softcap=2.0, alibi_slopes=SLOPES.to(device))
    arguments = (begins_q, begins_k, max(lengths_q), max(lengths_k))

    def of(call, leaves):
        leaves = [x.detach().clone().requires_grad_() for x in leaves]
        out = call(*leaves)
        return [out, *torch.autograd.grad(out, leaves, dout)]

    separate = of(lambda *qkv: interface.flash_attn_varlen_func(*qkv, *arguments, **options), [q, *kv.unbind(1)])
    packed = of(lambda *qkv: interface.flash_attn_varlen_kvpacked_func(*qkv, *arguments, **options), [q, kv])
    one_by_one = [torch.zeros_like(x) for x in separate]
    for start, end, start_k, end_k in zip(begins_q, begins_q[1:], begins_k, begins_k[1:]):
        rows, keys = slice(int(start), int(end)), slice(int(start_k), int(end_k))
        leaves = [x.detach().clone()[None].requires_grad_() for x in (q[rows], *kv[keys].unbind(1))]
        out = interface.flash_attn_func(*leaves, **options)
        for whole, place, part in zip(
            one_by_one, (rows, rows, keys, keys), (out, *torch.autograd.grad(out, leaves, dout[None, rows]))
        ):
            whole[place] = part[0].detach()
    unpacked = [*packed[:2], *packed[2].unbind(1)]
    # A GPU's kernels for other lengths sum in another order, and products are rounded to 16 bits.
    tolerance = {} if dtype == torch.float32 else dict(rtol=2e-2, atol=2e-2)
    for of_separate, of_packed, wanted in zip(separate, unpacked, one_by_one, strict=True):
        torch.testing.assert_close(of_separate, wanted, **tolerance)
        torch.testing.assert_close(of_packed, of_separate, **tolerance)

    qkv = torch.stack([q, *(x.repeat_interleave(2, 1)[:104] for x in kv.unbind(1))], 1)
    leaf = qkv.clone().requires_grad_()
    out, lse, matrix = interface.flash_attn_varlen_qkvpacked_func(leaf, begins_q, 61, **options, return_attn_probs=True)
    assert lse.shape == (4, 104) and matrix is None
    (gradient,) = torch.autograd.grad(out, leaf, dout)
    leaves = [x.clone().requires_grad_() for x in qkv.unbind(1)]
    expected = interface.flash_attn_varlen_func(*leaves, begins_q, begins_q, 61, 61, **options)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(gradient, torch.stack(torch.autograd.grad(expected, leaves, dout), 1))


def test_pages_and_dropout_are_refused_together():
    q, begins = torch.ones(4, 2, 8), torch.tensor([0, 4], dtype=torch.int32)
    with pytest.raises(NotImplementedError, match="block_table"):
        pages, table = torch.ones(1, 4, 2, 8), torch.zeros(1, 1, dtype=torch.int32)
        interface.flash_attn_varlen_func(q, pages, pages, begins, begins, 4, 4, 0.1, block_table=table)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("device, dtype", NARROW_DEVICES)
def test_deterministic_gradients_have_the_same_bits_at_every_run(device, dtype, causal):
    q, kv, dout = random((2, 300, 4, 64), (2, 700, 2, 2, 64), (2, 300, 4, 64), dtype=dtype, device=device)

    def separate():
        leaves = [x.clone().requires_grad_() for x in (q, *kv.unbind(2))]
        out = interface.flash_attn_func(*leaves, causal=causal, deterministic=True)
        return torch.autograd.grad(out, leaves, dout)

    def packed():
        leaves = q.clone().requires_grad_(), kv.clone().requires_grad_()
        out = interface.flash_attn_kvpacked_func(*leaves, causal=causal, deterministic=True)
        dq, dkv = torch.autograd.grad(out, leaves, dout)
        return dq, *dkv.unbind(2)

    first = separate()
    for _ in range(50 if device == "cuda" else 2):
        for again in (separate(), packed()):
            assert all(torch.equal(x, y) for x, y in zip(first, again))


@pytest.mark.parametrize("shape", [(1, 4, 2, 8), (1, 4, 2, 2, 8), (1, 4, 3, 8)])
def test_packed_qkv_of_a_wrong_shape_is_refused(shape):
    with pytest.raises(ValueError, match="qkv has shape"):
        interface.flash_attn_qkvpacked_func(torch.ones(shape))


def test_non_tensors_are_refused():
    q = torch.ones(1, 4, 2, 8)
    with pytest.raises(TypeError, match="q is a list"):
        interface.flash_attn_func([1.0], q, q)
    with pytest.raises(TypeError, match="qkv is a ndarray"):
        interface.flash_attn_qkvpacked_func(q.numpy())


Q, QKV, BEGINS = torch.ones(4, 2, 8), torch.ones(4, 3, 2, 8), torch.tensor([0, 4], dtype=torch.int32)
CALLS = {
    "flash_attn_func": lambda **options: interface.flash_attn_func(Q[None], Q[None], Q[None], **options),
    "flash_attn_qkvpacked_func": lambda **options: interface.flash_attn_qkvpacked_func(QKV[None], **options),
    "flash_attn_varlen_func": lambda **options: interface.flash_attn_varlen_func(
        Q, Q, Q, BEGINS, BEGINS, **{**dict(max_seqlen_q=4, max_seqlen_k=4), **options}
    ),
    "flash_attn_varlen_func over pages": lambda **options: interface.flash_attn_varlen_func(
        Q, Q[None], Q[None], BEGINS, BEGINS, **{**dict(max_seqlen_q=4, max_seqlen_k=4), **options}, block_table=BEGINS[:1, None]
    ),
    "flash_attn_varlen_qkvpacked_func": lambda **options: interface.flash_attn_varlen_qkvpacked_func(
        QKV, BEGINS, **{**dict(max_seqlen=4), **options}
    ),
    "flash_attn_with_kvcache": lambda **options: interface.flash_attn_with_kvcache(Q[None], Q[None], Q[None], **options),
}
NO_FLAG, NO_WINDOW, NO_BOUND = "it must be False or True", r"it must be \(left, right\), numbers of keys", "it must be an int"


@pytest.mark.parametrize(
    "argument, value, message, calls",
    [
        ("causal", "top-left", f"'top-left'; {NO_FLAG}", CALLS),
        ("causal", 1, f"1; {NO_FLAG}", CALLS),
        ("causal", None, f"None; {NO_FLAG}", CALLS),
        ("deterministic", 7, f"7; {NO_FLAG}", [name for name in CALLS if "kvcache" not in name]),
        ("return_attn_probs", "no", f"'no'; {NO_FLAG}", [name for name in CALLS if "kvcache" not in name]),
        ("return_softmax_lse", "no", f"'no'; {NO_FLAG}", ["flash_attn_with_kvcache"]),
        ("window_size", 3, f"3; {NO_WINDOW}", CALLS),
        ("window_size", (None, 3), rf"\(None, 3\); {NO_WINDOW}", CALLS),
        ("window_size", (1, 2, 3), rf"\(1, 2, 3\); {NO_WINDOW}", CALLS),
        ("max_seqlen_q", None, f"None; {NO_BOUND}", ["flash_attn_varlen_func", "flash_attn_varlen_func over pages"]),
        ("max_seqlen_k", 4.5, f"4.5; {NO_BOUND}", ["flash_attn_varlen_func", "flash_attn_varlen_func over pages"]),
        ("max_seqlen", "4", f"'4'; {NO_BOUND}", ["flash_attn_varlen_qkvpacked_func"]),
    ],
)
def test_an_argument_of_a_wrong_type_is_refused_by_name(argument, value, message, calls):
    for name in calls:
        with pytest.raises(ValueError, match=f"^{argument} is {message}"):
            CALLS[name](**{argument: value})


@pytest.mark.parametrize("name", CALLS)
def test_numpy_bools_and_integers_are_accepted(name):
    numpy = pytest.importorskip("numpy")
    expected = CALLS[name](causal=True, window_size=(2, 1))
    out = CALLS[name](causal=numpy.True_, window_size=(numpy.int64(2), numpy.int32(1)))
    assert torch.equal(out, expected)


def test_max_seqlen_may_be_a_tensor():
    expected = CALLS["flash_attn_varlen_func"]()
    assert torch.equal(CALLS["flash_attn_varlen_func"](max_seqlen_q=torch.tensor(4), max_seqlen_k=BEGINS[1]), expected)
