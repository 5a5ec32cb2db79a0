"""`flashtune.torch.activate`: PyTorch's own attention functions run on flashtune.

On a CPU the operators of CUDA's backends are called by name: they reach flashtune before PyTorch
looks for a kernel of the device. The same tests run on the CPU and on a GPU.
"""

import functools
import inspect
import os
import subprocess
import sys
import threading

import flashtune
import flashtune.torch
import pytest
import torch
import torch.nn.functional as F
from flashtune import _call, _torch_drafts
from oracle_torch import judge, plain, random, with_gradients
from test_torch import DEVICES, TYPED_DEVICES, working_dtype

aten = torch.ops.aten
HAS_REGISTRY = flashtune.torch._registry() is not None
BATCH, HEADS, ROWS, DIM = 2, 4, 70, 32
# PyTorch 2.4 has no rule for the shapes of cuDNN's operator, which has no attn_bias there.
_CUDNN = str(aten._scaled_dot_product_cudnn_attention.default._schema)
BACKENDS = ("flash", "efficient", "cudnn") if "attn_bias" in _CUDNN else ("flash", "efficient")


@pytest.fixture
def active():
    with flashtune.torch.activate() as activation:
        yield activation


def inputs(dtype, device, heads_kv=HEADS, seqlen_k=ROWS):
    shapes = [(BATCH, ROWS, HEADS, DIM), (BATCH, seqlen_k, heads_kv, DIM), (BATCH, seqlen_k, heads_kv, DIM)]
    return random(*shapes, (BATCH, ROWS, HEADS, DIM), dtype=dtype, device=device)


def by_head(function):
    """A function of (batch, heads, seqlen, dim) as one of (batch, seqlen, heads, dim)."""

    @functools.wraps(function)
    def call(q, k, v, *more):
        return function(*(x.transpose(1, 2) for x in (q, k, v)), *more).transpose(1, 2)

    return call


def operator_call(backend, bias=None, causal=False, dropout_p=0.0):
    """The operator of one of SDPA's CUDA backends, as a function of q, k and v."""
    operator = getattr(aten, f"_scaled_dot_product_{backend}_attention").default
    names = {argument.name for argument in operator._schema.arguments}
    more = {"attn_bias": bias, "compute_log_sumexp": True}
    more = {name: value for name, value in more.items() if name in names}
    return lambda q, k, v: operator(q, k, v, **more, dropout_p=dropout_p, is_causal=causal)[0]


def served(activation):
    return sum(activation.calls.values())


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("device, dtype", TYPED_DEVICES)
def test_sdpa_runs_on_flashtune_within_the_error_rule(active, device, dtype, causal):
    *tensors, dout = inputs(dtype, device)
    judge(by_head(functools.partial(F.scaled_dot_product_attention, is_causal=causal)), tensors, dout, causal=causal)
    assert served(active) == 2 and not active.reasons


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_sdpa_with_a_mask_runs_on_flashtune(active, dtype):
    *tensors, dout = inputs(torch.float32, "cpu", seqlen_k=50)
    (mask,) = random((BATCH, 1, ROWS, 50), dtype=torch.float32, device="cpu", seed=3)
    mask = mask > 0 if dtype is torch.bool else mask
    wanted = {"mask": mask} if dtype is torch.bool else {"bias": mask}
    judge(by_head(functools.partial(F.scaled_dot_product_attention, attn_mask=mask)), tensors, dout, **wanted)
    assert served(active) == 2 and not active.reasons


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("device", DEVICES)
def test_the_operators_of_cuda_backends_run_on_flashtune(active, device, backend):
    *tensors, dout = inputs(working_dtype(device), device)
    judge(by_head(operator_call(backend, causal=True)), tensors, dout, causal=True)
    assert served(active) == 2 and not active.reasons


@pytest.mark.parametrize("device", DEVICES)
def test_a_bias_of_the_efficient_backend_gets_its_gradient(active, device):
    *tensors, dout = inputs(working_dtype(device), device)
    (bias,) = random((1, HEADS, ROWS, ROWS), dtype=working_dtype(device), device=device, seed=3)

    def attend(q, k, v, bias):
        return operator_call("efficient", bias.expand(BATCH, -1, -1, -1))(q, k, v)

    judge(by_head(attend), (*tensors, bias), dout, names=("q", "k", "v", "bias"))
    assert not active.reasons


@pytest.mark.parametrize("device", DEVICES)
def test_the_flash_operator_takes_grouped_heads(active, device):
    *tensors, dout = inputs(working_dtype(device), device, heads_kv=2)
    judge(by_head(operator_call("flash", causal=True)), tensors, dout, causal=True)
    assert not active.reasons


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (5, 0), (5, 3)])
@pytest.mark.parametrize("device", DEVICES)
def test_varlen_attn_equals_one_call_for_each_sequence(active, device, window):
    varlen = pytest.importorskip("torch.nn.attention.varlen", reason="PyTorch has no varlen_attn")
    if "window_size" not in inspect.signature(varlen.varlen_attn).parameters:
        pytest.skip("varlen_attn has no window_size")
    q, k, v, dout = (x.flatten(0, 1) for x in inputs(working_dtype(device), device))
    offsets = [0, 30, 31, len(q)]
    lengths = torch.tensor(offsets, dtype=torch.int32, device=device)

    def attend(q, k, v):
        return varlen.varlen_attn(q, k, v, lengths, lengths, 110, 110, window_size=window)

    def separate(q, k, v):
        parts = zip(offsets, offsets[1:])
        # As in varlen_attn, -1 is no limit; its diagonal is bottom-right, here the main one.
        return torch.cat([
            flashtune.attention(q[None, a:b], k[None, a:b], v[None, a:b], window=window)[0] for a, b in parts
        ])  # fmt: skip

    for actual, wanted in zip(with_gradients(attend, (q, k, v), dout), with_gradients(separate, (q, k, v), dout)):
        torch.testing.assert_close(actual, wanted)
    assert active.calls["_flash_attention_forward"] == active.calls["_flash_attention_backward"] == 1


OFFSETS = [0, 30, 31, BATCH * ROWS]
_HAS_UNPADDED_LSE = "rng_state" in str(aten._flash_attention_forward.default._schema)
VARLEN = [
    (backend, operator)
    for backend in ("flash", "cudnn")
    if hasattr(aten, f"_{backend}_attention_forward")
    for operator in [getattr(aten, f"_{backend}_attention_forward").default]
    if _HAS_UNPADDED_LSE and (backend == "flash" or "seqused_k" in str(operator._schema))
]


def varlen_call(backend, operator, lengths, causal, **more):
    """(out, lse) of a varlen operator, as a function of q, k and v."""
    last = {"return_debug_mask": False} | ({"compute_log_sumexp": True} if backend == "cudnn" else {})

    def call(q, k, v, cum_seq_k=lengths):
        extra = {"attn_bias": None} if backend == "cudnn" else {}
        return operator(
            query=q, key=k, value=v, cum_seq_q=lengths, cum_seq_k=cum_seq_k, max_q=110, max_k=110, dropout_p=0.0,
            is_causal=causal, **extra, **last, **more,
        )[:2]  # fmt: skip

    return call


@pytest.mark.parametrize("backend, operator", VARLEN)
@pytest.mark.parametrize("device", DEVICES)
def test_the_varlen_operators_run_on_flashtune(active, device, backend, operator):
    q, k, v, dout = (x.flatten(0, 1) for x in inputs(working_dtype(device), device, heads_kv=2))
    lengths = torch.tensor(OFFSETS, dtype=torch.int32, device=device)
    call = varlen_call(backend, operator, lengths, True, scale=0.2)

    def wanted(q, k, v):
        lengths_of = dict(cu_seqlens_q=lengths, cu_seqlens_k=lengths, max_seqlen_q=110, max_seqlen_k=110)
        return flashtune.attention_varlen(q, k, v, **lengths_of, causal=True, softmax_scale=0.2, return_lse=True)

    assert torch.equal(call(q, k, v)[1], wanted(q, k, v)[1])
    pairs = zip(*(with_gradients(lambda *qkv: f(*qkv)[0], (q, k, v), dout) for f in (call, wanted)))
    for actual, expected in pairs:
        torch.testing.assert_close(actual, expected)
    assert served(active) == 3 and not active.reasons


@pytest.mark.skipif(not VARLEN, reason="this PyTorch pads the LSE of packed sequences")
def test_the_flash_operator_takes_slopes_and_used_lengths(active):
    q, k, v, _ = (x.flatten(0, 1) for x in inputs(torch.float32, "cpu"))
    lengths, used = torch.tensor(OFFSETS, dtype=torch.int32), torch.tensor([20, 1, 5], dtype=torch.int32)
    slopes = torch.tensor([0.5, 0.1, 0.02, 0.0])
    out, _ = varlen_call(*VARLEN[0], lengths, True, seqused_k=used, alibi_slopes=slopes)(q, k, v)
    expected = flashtune.attention_varlen(
        q, k, v, cu_seqlens_q=lengths, cu_seqlens_k=lengths, max_seqlen_q=110, max_seqlen_k=110, seqused_k=used,
        alibi_slopes=slopes, causal=True,
    )  # fmt: skip
    assert torch.equal(out, expected) and not active.reasons


@pytest.mark.parametrize("backend, operator", VARLEN)
def test_the_varlen_operators_take_pages(active, backend, operator):
    if "block_table" not in str(operator._schema):
        pytest.skip("this PyTorch's operator takes no pages")
    q, pages, used, table, lengths = _paged()
    out, _ = varlen_call(backend, operator, lengths, True, seqused_k=used, block_table=table)(q, *pages, cum_seq_k=None)
    expected = flashtune.attention_kvcache(
        q, *pages, block_table=table, seqused_k=used, cu_seqlens_q=lengths, max_seqlen_q=110, causal=True
    )
    assert torch.equal(out, expected) and not active.reasons


def _paged():
    q, pages = random((5, HEADS, DIM), (2, 8, 16, 2, DIM), dtype=torch.float32, device="cpu")
    used, table = torch.tensor([40, 17], dtype=torch.int32), torch.arange(8, dtype=torch.int32).view(2, 4)
    return q, pages, used, table, torch.tensor([0, 2, 5], dtype=torch.int32)


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("backend", [*BACKENDS, "cpu"])
def test_outputs_have_the_layout_that_compiled_code_expects(active, backend, layout):
    from torch._subclasses.fake_tensor import FakeTensorMode

    shape = (BATCH, HEADS, ROWS, DIM)
    tensors = random(shape, shape, shape, dtype=torch.float32, device="cpu")
    if layout == "bshd":
        tensors = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors]
    if backend == "cpu":
        call = aten._scaled_dot_product_flash_attention_for_cpu.default
    else:
        call = operator_call(backend)
    with FakeTensorMode() as mode:
        fake = call(*(mode.from_tensor(x) for x in tensors))
    real = call(*tensors)
    for actual, wanted in zip(*((x,) if isinstance(x, torch.Tensor) else x for x in (real, fake))):
        assert (actual.shape, actual.stride(), actual.dtype) == (wanted.shape, wanted.stride(), wanted.dtype)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("device", DEVICES)
def test_dropout_is_served_on_request_with_one_mask_in_both_passes(device, backend):
    q, k, _, _ = inputs(working_dtype(device), device)
    # With v = identity the output is the weights, and the gradient of v shows the same mask.
    eye = torch.eye(ROWS, device=device, dtype=q.dtype)[None, :, None].expand(BATCH, -1, HEADS, -1).contiguous()
    q, k = (torch.cat([x, x.new_zeros(BATCH, ROWS, HEADS, ROWS - DIM)], -1) for x in (q, k))
    with flashtune.torch.activate(dropout=True) as activation:
        torch.manual_seed(5)
        v = eye.requires_grad_()
        out = by_head(operator_call(backend, dropout_p=0.5))(q, k, v)
        (dv,) = torch.autograd.grad(out, v, torch.eye(ROWS, device=device, dtype=q.dtype)[None, :, None].expand_as(out))
        torch.manual_seed(5)
        again = by_head(operator_call(backend, dropout_p=0.5))(q, k, eye)
        assert served(activation) == 3
    assert torch.equal(out, again)
    assert 0.4 < (out == 0).float().mean() < 0.6
    torch.testing.assert_close(dv, out.transpose(1, 3), rtol=1e-2, atol=1e-3)


def test_dropout_is_pytorchs_unless_requested(active):
    q = torch.randn(1, 2, 8, 16)
    with pytest.raises(NotImplementedError, match="_scaled_dot_product_flash_attention"):
        operator_call("flash", dropout_p=0.5)(q, q, q)  # PyTorch's own kernel is CUDA's alone.
    (operator, reason), count = next(iter(active.reasons.items()))
    assert operator == "_scaled_dot_product_flash_attention" and count == 1
    assert "dropout_p is 0.5" in reason and active.last_fallback == (operator, reason)


def test_what_flashtune_does_not_serve_runs_on_pytorchs_kernel_with_the_reason(active):
    q = torch.randn(1, 2, 8, 16, dtype=torch.float64)
    out = F.scaled_dot_product_attention(q, q, q, is_causal=True)
    torch.testing.assert_close(out, _exact(q))
    assert not active.calls
    assert "the dtypes are torch.float64" in active.last_fallback[1]
    assert sum(active.reasons.values()) == 1


def _exact(q):
    rows = q.transpose(1, 2)
    return plain(rows, rows, rows, causal=True).transpose(1, 2)


def test_a_refusal_of_the_library_is_a_reason_and_not_an_error(active, monkeypatch):
    def refuse(*_, **__):
        raise flashtune.UnsupportedError("no such kernel")

    monkeypatch.setattr(flashtune._torch_sdpa, "launch_forward", refuse)
    q = torch.randn(1, 2, 8, 16)
    torch.testing.assert_close(F.scaled_dot_product_attention(q, q, q, is_causal=True), _exact(q))
    assert active.last_fallback[1] == "no such kernel"


@pytest.mark.parametrize("transposed", ["query", "all"])
def test_outputs_are_whole_where_their_last_dim_is_not_contiguous(active, transposed):
    # The operators' rule for shapes gives outputs the strides of a dense query.
    operator = aten._scaled_dot_product_flash_attention_for_cpu.default
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    turned = torch.randn(1, 2, 16, 24).transpose(-1, -2)
    other = turned if transposed == "all" else turned.contiguous()
    dout = torch.randn(1, 2, 24, 16)
    with torch.no_grad():
        out, lse = operator(turned, other, other, 0.0, True)
        gradients = backward(dout, turned, other, other, out, lse, 0.0, True)
    assert served(active) == 2
    leaves = [x.transpose(1, 2).contiguous() for x in (turned, other, other)]
    expected = with_gradients(functools.partial(plain, causal=True), leaves, dout.transpose(1, 2))
    for actual, wanted in zip((out, *gradients), expected):
        torch.testing.assert_close(actual, wanted.transpose(1, 2), rtol=1e-4, atol=1e-5)


def test_the_backward_pass_is_deterministic_where_torch_asks_for_it(active, monkeypatch):
    seen, launch = [], flashtune._torch_sdpa.launch_backward
    monkeypatch.setattr(flashtune._torch_sdpa, "launch_backward", lambda *a, **k: seen.append(a[6]) or launch(*a, **k))
    q = torch.randn(1, 2, 8, 16, requires_grad=True)
    for wanted in (False, True):
        torch.use_deterministic_algorithms(wanted)
        try:
            F.scaled_dot_product_attention(q, q, q).sum().backward()
        finally:
            torch.use_deterministic_algorithms(False)
    off, on = (options[3] for options in seen)
    assert not off and on


def test_a_refusal_of_a_call_with_dropout_is_an_error(monkeypatch):
    def refuse(*_, **__):
        raise flashtune.UnsupportedError("no such kernel")

    monkeypatch.setattr(flashtune._torch_sdpa, "launch_forward", refuse)
    q = torch.randn(1, 2, 8, 16)
    with flashtune.torch.activate(dropout=True), pytest.raises(NotImplementedError, match="no such kernel"):
        operator_call("flash", dropout_p=0.5)(q, q, q)

    # Also what the integration itself finds after the decision that both passes share.
    def no_rule(*_):
        raise flashtune._torch_sdpa.Refused("no rule for shapes")

    monkeypatch.setattr(flashtune._torch_sdpa, "_layouts", no_rule)
    with flashtune.torch.activate(dropout=True), pytest.raises(flashtune.UnsupportedError, match="no rule for shapes"):
        operator_call("flash", dropout_p=0.5)(q, q, q)


def test_a_gradient_may_be_taken_after_the_activation_ends():
    *tensors, dout = inputs(torch.float32, "cpu")
    attend = by_head(F.scaled_dot_product_attention)
    expected = with_gradients(attend, tensors, dout)
    leaves = [x.requires_grad_() for x in tensors]
    with flashtune.torch.activate() as activation:
        out = attend(*leaves)
    gradients = torch.autograd.grad(out, leaves, dout)
    assert served(activation) == 1
    for actual, wanted in zip((out, *gradients), expected):
        torch.testing.assert_close(actual, wanted)


def test_inference_mode_and_compiled_code_run_on_flashtune(active):
    *tensors, dout = inputs(torch.float32, "cpu")
    attend = by_head(functools.partial(F.scaled_dot_product_attention, is_causal=True))
    expected = with_gradients(attend, tensors, dout)
    active.calls.clear()
    with torch.inference_mode():
        torch.testing.assert_close(attend(*tensors), expected[0])
    assert served(active) == 1
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    for actual, wanted in zip(with_gradients(compiled, tensors, dout), expected):
        torch.testing.assert_close(actual, wanted)
    assert served(active) == 3 and not active.reasons


def test_an_exported_program_runs_on_flashtune(active):
    class Layer(torch.nn.Module):
        def forward(self, q, k, v):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    tensors = random(*[(BATCH, HEADS, ROWS, DIM)] * 3, dtype=torch.float32, device="cpu")
    program = torch.export.export(Layer(), tuple(tensors))
    active.calls.clear()
    torch.testing.assert_close(program.module()(*tensors), Layer()(*tensors))
    assert served(active) == 2


def test_threads_share_an_activation(active):
    q = torch.randn(1, 2, 40, 16)
    expected = F.scaled_dot_product_attention(q, q, q)
    results = []
    threads = [
        threading.Thread(target=lambda: results.extend(F.scaled_dot_product_attention(q, q, q) for _ in range(20)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 80 and all(torch.equal(result, expected) for result in results)


def test_activating_twice_and_removing_twice_are_defined():
    first = flashtune.torch.activate()
    assert flashtune.torch.activate() is first
    with pytest.raises(ValueError, match="dropout is True; the activation in force has dropout=False"):
        flashtune.torch.activate(dropout=True)
    first.remove()
    first.remove()
    assert not first.is_active
    second = flashtune.torch.activate(dropout=True)
    first.remove()
    assert second is not first and second.is_active
    second.remove()
    q = torch.randn(1, 2, 8, 16)
    F.scaled_dot_product_attention(q, q, q)
    assert not first.calls and not second.calls


@pytest.mark.skipif(not HAS_REGISTRY, reason="PyTorch has no registry of flash attention implementations")
def test_pytorchs_registry_activates_and_restores_flashtune():
    from torch.nn import attention

    flashtune.torch.register()
    assert "flashtune" in attention.list_flash_attention_impls()
    assert attention.current_flash_attention_impl() is None
    attention.activate_flash_attention_impl("flashtune")
    assert attention.current_flash_attention_impl() == "flashtune"
    activation = flashtune.torch.activate()
    q = torch.randn(1, 2, 8, 16)
    F.scaled_dot_product_attention(q, q, q)
    assert served(activation) == 1
    attention.restore_flash_attention_impl()
    assert not activation.is_active and attention.current_flash_attention_impl() is None
    activation = flashtune.torch.activate()
    assert attention.current_flash_attention_impl() == "flashtune"
    activation.remove()
    assert attention.current_flash_attention_impl() is None


@pytest.mark.skipif(HAS_REGISTRY, reason="this PyTorch has the registry")
def test_without_a_registry_register_says_what_works():
    with pytest.raises(NotImplementedError, match="needs PyTorch 2.11, but flashtune.torch.activate works"):
        flashtune.torch.register()


def test_an_old_pytorch_is_refused(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.3.1+cpu")
    with pytest.raises(NotImplementedError, match="this is PyTorch 2.3.1.cpu; flashtune.torch needs PyTorch 2.4 or later"):
        flashtune.torch.activate()


def test_a_wrong_argument_is_named():
    with pytest.raises(ValueError, match="dropout is 0.1; it must be False or True"):
        flashtune.torch.activate(dropout=0.1)


def test_nothing_happens_on_import():
    program = (
        "import flashtune, torch\n"
        "assert 'flashtune._torch_sdpa' not in __import__('sys').modules\n"
        "import flashtune.torch\n"
        "name = 'aten::_scaled_dot_product_flash_attention_for_cpu'\n"
        "assert not torch._C._dispatch_has_kernel_for_dispatch_key(name, 'BackendSelect')\n"
        "activation = flashtune.torch.activate()\n"
        "assert torch._C._dispatch_has_kernel_for_dispatch_key(name, 'BackendSelect')\n"
        "activation.remove()\n"
        "assert not torch._C._dispatch_has_kernel_for_dispatch_key(name, 'BackendSelect')\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", program], check=True, env=environment)


def test_an_operator_that_gives_its_gradients_repeats_its_backward_pass(active, monkeypatch):
    _torch_drafts.start()
    q, k, v, dout = inputs(torch.bfloat16, "cpu")
    lengths = (None, None, ROWS, ROWS, 0.0, False)
    out, lse, *seed, _ = aten._flash_attention_forward(q, k, v, *lengths, False)

    def backward():
        return aten._flash_attention_backward(dout, q, k, v, out, lse, *lengths, *seed)

    expected = backward()
    assert any(gradient.abs().sum() > 0 for gradient in expected)

    def refuse(*_args, **_named):
        raise AssertionError("params were packed")

    monkeypatch.setattr(_call, "backward", refuse)
    assert all(map(torch.equal, backward(), expected))
