"""Calls of flash-attn's functions that record a gradient repeat from drafts of their form.

A call with a draft and the same call without one run the same kernel, so their bits are equal. The
same tests run on the CPU and on a GPU.
"""

import pytest
import torch
from flashtune import _torch_drafts, _torch_recorded, flash_attn_interface
from flashtune.flash_attn_interface import flash_attn_func, flash_attn_varlen_func
from repeated_calls import assert_equal, fresh, gradients, tensors, varlen
from test_torch import DEVICES


@pytest.fixture(autouse=True)
def no_drafts():
    _torch_drafts.start()


def recorded_calls(device):
    """Functions of leaves whose calls autograd records, and the leaves."""
    q, k, v, lengths = varlen(device)
    dense = tensors(device)

    def packed(*leaves, **options):
        return flash_attn_varlen_func(*leaves, lengths, lengths, 60, 60, deterministic=True, **options)

    return [
        (lambda *leaves, **options: flash_attn_func(*leaves, deterministic=True, **options), dense),
        (packed, (q, k, v)),
    ]


def recorded(call, given, **options):
    leaves = [x.detach().requires_grad_() for x in given]
    result = call(*leaves, **options)
    out = result[0] if isinstance(result, tuple) else result
    return out, *gradients(out, leaves)


@pytest.mark.parametrize("device", DEVICES)
def test_a_recorded_call_reads_its_options_once(device, monkeypatch):
    options = [dict(), dict(causal=True), dict(causal=True, window_size=(9, 0)), dict(softmax_scale=0.3, softcap=2.0), dict(return_attn_probs=True)]
    cases = [(call, given, chosen) for call, given in recorded_calls(device) for chosen in options]
    expected = [fresh(lambda: recorded(call, given, **chosen)) for call, given, chosen in cases]
    for _ in range(2):
        for (call, given, chosen), results in zip(cases, expected):
            assert_equal(recorded(call, given, **chosen), results)

    def refuse(*_args, **_named):
        raise AssertionError("options were read")

    monkeypatch.setattr(flash_attn_interface, "_taken", refuse)
    for (call, given, chosen), results in zip(cases, expected):
        assert_equal(recorded(call, given, **chosen), results)


@pytest.mark.parametrize("device", DEVICES)
def test_a_recorded_call_passes_on_the_gradient_of_its_lse(device):
    for call, given in recorded_calls(device):

        def both():
            leaves = [x.detach().requires_grad_() for x in given]
            out, lse, _ = call(*leaves, return_attn_probs=True)
            return out, lse, *torch.autograd.grad((out.float().sum() + 3 * lse.sum()), leaves), *torch.autograd.grad(
                call(*leaves, return_attn_probs=True)[1].sum(), leaves
            )

        expected = fresh(both)
        for _ in range(3):
            assert_equal(both(), expected)


@pytest.mark.parametrize("device", DEVICES)
def test_a_recorded_call_notices_that_a_saved_tensor_has_changed(device):
    q, k, v, lengths = varlen(device)
    for _ in range(3):
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        own = lengths.clone()
        out = flash_attn_varlen_func(*leaves, own, own, 60, 60)
        own.add_(0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            gradients(out, leaves)


def test_a_call_without_a_form_looks_for_no_draft(monkeypatch):
    def refuse(*_args):
        raise AssertionError("a draft was looked for")

    calls = recorded_calls("cpu")
    expected = [recorded(call, given, causal=True) for call, given in calls]
    monkeypatch.setattr(_torch_recorded, "attend", refuse)
    for (call, given), results in zip(calls, expected):
        assert_equal(recorded(call, given, causal=True, window_size=[-1, 0]), results)
