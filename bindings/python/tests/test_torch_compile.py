"""Calls in code that torch.compile traces, and in modes: which are traced, which run as they are.

A call that runs as it is breaks the graph. It hands addresses to the library, so its tensors must
live until the launch.
"""

import functools

import flashtune
import pytest
import torch
from flashtune import flash_attn_interface as interface
from oracle_torch import random, with_gradients
from test_torch import DEVICES, working_dtype
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

LENGTHS = torch.tensor([4, 9], dtype=torch.int32)


def compiled(function, fullgraph=False):
    torch.compiler.reset()
    return torch.compile(function, backend="aot_eager", fullgraph=fullgraph)


def narrow(function):
    return lambda q, k, v: function(*(x.half() for x in (q, k, v)))


def merge(q, k, v):
    out, lse = flashtune.attention_forward(q, k, v)
    return flashtune.merge([out, 2 * out], [lse, lse + 1])


def backward(q, k, v):
    out, lse = flashtune.attention_forward(q, k, v)
    return flashtune.attention_backward(2 * out, q, k, v, out, lse)


def append(q, k, v):
    caches = k.new_zeros((2, 2, 30, 3, 16)).unbind()
    return *caches, flashtune.kv_append(*caches, k, v, LENGTHS.to(k.device))


def decode(q, k, v):
    caches = k.new_zeros((2, 2, 30, 3, 16)).unbind()
    return interface.flash_attn_with_kvcache(q, *caches, 2 * k, 2 * v, cache_seqlens=LENGTHS.to(k.device))


def scaled(q, k, v):
    numbers = [(20 * x).to(torch.int8) for x in (k, v)]
    return interface.flash_attn_func(q.half(), *numbers, k_descale=0.05, v_descale=torch.full((2, 3), 0.1, device=k.device))


CALLS = {
    "attention_forward": lambda q, k, v: flashtune.attention_forward(2 * q, k, v, causal=True),
    "attention_backward": backward,
    "attention_kvcache": lambda q, k, v: flashtune.attention_kvcache(q, k, v, seqused_k=LENGTHS.to(k.device)),
    "attention_fp8": narrow(lambda q, k, v: flashtune.attention_fp8(q, k, v, causal=True)),
    "merge": merge,
    "kv_append": append,
    "quantize": narrow(lambda q, k, v: flashtune.quantize(2 * k, torch.int8)),
    "rotate": narrow(lambda q, k, v: flashtune.rotate(2 * q, 7)),
    "flash_attn_with_kvcache": decode,
    "flash_attn_func of 8 bits": scaled,
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_calls_without_autograd_have_the_same_bits_in_compiled_code(call):
    tensors = random(*[(2, 9, 3, 16)] * 3, dtype=torch.float32, device="cpu")
    # The last dim is not contiguous, so the call makes copies.
    tensors = [x.transpose(1, 3).contiguous().transpose(1, 3) for x in tensors]
    with torch.no_grad():
        expected, actual = call(*tensors), compiled(call)(*tensors)
    expected, actual = (x if isinstance(x, tuple) else (x,) for x in (expected, actual))
    assert all(torch.equal(x, y) for x, y in zip(actual, expected, strict=True))


def test_an_export_without_dynamo_refuses_tensors_without_memory():
    class Model(torch.nn.Module):
        def forward(self, out, lse):
            return flashtune.merge([out, out], [lse, lse])[0]

    with pytest.raises(RuntimeError, match="Cannot access data pointer"):
        torch.export.export(Model(), (torch.ones(1, 2, 3, 8), torch.ones(1, 3, 2)), strict=False)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("has_own_q", [False, True])
def test_calls_on_packed_tensors_are_traced_without_a_break(device, has_own_q):
    dtype = working_dtype(device)
    q, packed, dout = random((2, 9, 3, 16), (2, 9, 2 + (not has_own_q), 3, 16), (2, 9, 3, 16), dtype=dtype, device=device)

    def layer(q, packed):
        if has_own_q:
            return interface.flash_attn_kvpacked_func(2 * q, packed, causal=True)
        return interface.flash_attn_qkvpacked_func(packed, causal=True) + 0 * q

    results = [with_gradients(function, (q, packed), dout) for function in (compiled(layer, fullgraph=True), layer)]
    for actual, wanted in zip(*results):
        torch.testing.assert_close(actual, wanted)


def test_calls_on_packed_sequences_are_traced_without_a_break():
    packed, dout = random((18, 3, 3, 16), (18, 3, 16), dtype=torch.float32, device="cpu")
    begins = torch.tensor([0, 9, 18], dtype=torch.int32)

    def layer(packed):
        return interface.flash_attn_varlen_qkvpacked_func(packed, begins, 9, causal=True)

    results = [with_gradients(function, (packed,), dout) for function in (compiled(layer, fullgraph=True), layer)]
    for actual, wanted in zip(*results):
        torch.testing.assert_close(actual, wanted)


ATTENTION = {
    "attention": lambda q, k, v: flashtune.attention(q, k, v, causal=True),
    "flash_attn_func": lambda q, k, v: interface.flash_attn_func(q, k, v, causal=True),
    "flash_attn_qkvpacked_func": lambda *qkv: interface.flash_attn_qkvpacked_func(torch.stack(qkv, 2), causal=True),
}
EACH_ATTENTION = pytest.mark.parametrize("attend", ATTENTION.values(), ids=ATTENTION)


@EACH_ATTENTION
@pytest.mark.parametrize("tracing_mode", ["real", "fake"])
def test_a_trace_of_make_fx_computes_on_its_own_arguments(attend, tracing_mode):
    tensors = random(*[(2, 9, 3, 16)] * 3, dtype=torch.float32, device="cpu")
    attend(*tensors)  # A later call of the form would take the shortest way.
    trace = make_fx(attend, tracing_mode=tracing_mode)(*(torch.zeros_like(x) for x in tensors))
    torch.testing.assert_close(trace(*tensors), attend(*tensors))


def test_a_mode_does_not_lose_the_scales_of_8_bits():
    tensors = random(*[(2, 9, 3, 16)] * 3, dtype=torch.float32, device="cpu")
    expected = scaled(*tensors)
    with FlopCounterMode(display=False):
        assert torch.equal(scaled(*tensors), expected)


@EACH_ATTENTION
def test_a_selective_checkpoint_may_save_attention(attend):
    *tensors, dout = random(*[(2, 9, 3, 16)] * 4, dtype=torch.float32, device="cpu")
    seen = []

    def policy(ctx, operator, *_, **__):
        seen.append(str(operator))
        return CheckpointPolicy.MUST_SAVE if operator.namespace == "flashtune" else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    saving = functools.partial(checkpoint, attend, use_reentrant=False, context_fn=contexts)
    for actual, wanted in zip(with_gradients(saving, tensors, dout), with_gradients(attend, tensors, dout)):
        torch.testing.assert_close(actual, wanted)
    assert "flashtune.attention_forward.default" in seen


@EACH_ATTENTION
def test_a_class_that_computes_its_operators_computes_attention(attend):
    tensors = random(*[(2, 9, 3, 16)] * 3, dtype=torch.float32, device="cpu")
    pairs = [TwoTensor(x, 2 * x) for x in tensors]
    out = attend(*pairs)
    for part, factor in ((out.a, 1), (out.b, 2)):
        torch.testing.assert_close(part, attend(*(factor * x for x in tensors)))


@EACH_ATTENTION
def test_a_tangent_of_forward_mode_is_refused(attend):
    q, k, v = random(*[(2, 9, 3, 16)] * 3, dtype=torch.float32, device="cpu")
    attend(q, k, v)
    with forward_ad.dual_level():
        assert torch.equal(attend(q, k, v), attend(q, k, v))
        with pytest.raises(NotImplementedError, match="forward mode"):
            attend(forward_ad.make_dual(q, q), k, v)
