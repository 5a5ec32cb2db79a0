"""Attention on torch tensors, on the CPU or on CUDA's current stream, with autograd.

A random seed is a tensor that torch's generator fills and the kernels read at launch. A call can
therefore be captured into a CUDA graph, each replay draws a new mask, and `torch.manual_seed`
reproduces it.
"""

import torch
from torch.autograd import forward_ad

from . import _eight, _torch_autograd, _torch_launch
from ._errors import UnsupportedError
from ._features import Features
from ._torch_arguments import is_observed, refuse_deterministic_blocks, refuse_summed_dbias, resolve_seed
from ._torch_eight import quantize, rotate
from ._torch_launch import describe, expect_array, is_eight, is_quantised, launch_backward, launch_forward

__all__ = ["attention", "attention_backward", "attention_forward", "describe", "merge", "quantize", "resolve_seed", "rotate"]


def attention(q, k, v, opts, seed, return_lse, features):
    """out or (out, lse), differentiable with respect to q, k, v, bias and sinks."""
    if not isinstance(k, torch.Tensor) or not isinstance(v, torch.Tensor):
        _expect_tensors(k=k, v=v)
    if features is not None and features.sinks is not None:
        features = with_fp32_sinks(features)
    deterministic_dbias = bool(opts[3]) and features is not None and torch.is_grad_enabled() and _learns(features.bias)
    if is_observed(q):
        if not (is_quantised(k) or _eight.has_scales(features)):
            from . import _torch_ops

            learns = torch.is_grad_enabled() and _needs_gradient(q, k, v, features)
            return _torch_ops.attention(q, k, v, opts, seed, return_lse, features, deterministic_dbias, learns)
        # The operators take neither scales nor rows of int4.
        if torch.compiler.is_dynamo_compiling():
            from ._torch_untraced import untraced

            return untraced(attention, q, k, v, opts, seed, return_lse, features)
    if deterministic_dbias:
        refuse_summed_dbias(q, k, v, features)
    seed = resolve_seed(seed, opts[2], q) if opts[2] else None
    learns = torch.is_grad_enabled() and _needs_gradient(q, k, v, features)
    # Autograd refuses tangents of forward mode. A launch without it would lose them.
    if learns or forward_ad._current_level >= 0:
        if learns and is_eight(k):
            raise UnsupportedError(
                "k has 8 bits, which have no backward pass; under torch.no_grad() the call runs, and attention_fp8 quantises 16-bit tensors that learn"
            )
        if opts[3]:
            refuse_deterministic_blocks(q, features)
        return _torch_autograd.attention(q, k, v, opts, seed, return_lse, features)
    out, lse = launch_forward(q, k, v, opts, seed, features, want_lse=return_lse)
    return (out, lse) if return_lse else out


def attention_forward(q, k, v, opts, seed, features, before_launch=None, want_lse=True):
    """(out, lse or None) without autograd, which sees no launch.

    `before_launch` is called after the last check.
    """
    if torch.compiler.is_dynamo_compiling():
        from ._torch_untraced import untraced

        return untraced(attention_forward, q, k, v, opts, seed, features, before_launch, want_lse)
    _expect_tensors(k=k, v=v)
    if features is not None and features.sinks is not None:
        features = with_fp32_sinks(features)
    return launch_forward(q, k, v, opts, resolve_seed(seed, opts[2], q), features, want_lse, before_launch)


def attention_backward(dout, q, k, v, out, lse, opts, seed, features, dlse, need_dbias):
    """(dq, dk, dv, dbias, dsinks) without autograd; the last two may be None."""
    if torch.compiler.is_dynamo_compiling():
        from ._torch_untraced import untraced

        return untraced(attention_backward, dout, q, k, v, out, lse, opts, seed, features, dlse, need_dbias)
    _expect_tensors(k=k, v=v, out=out, lse=lse, dout=dout)
    if features is not None and features.sinks is not None:
        features = with_fp32_sinks(features)
    seed = resolve_seed(seed, opts[2], q)
    return launch_backward(dout, q, k, v, out, lse, opts, seed, features, dlse=dlse, need_dbias=need_dbias)


def merge(outs, lses, dtype):
    """(out, lse) without autograd."""
    if torch.compiler.is_dynamo_compiling():
        from ._torch_untraced import untraced

        return untraced(merge, outs, lses, dtype)
    return _torch_launch.merge(outs, lses, dtype)


def _needs_gradient(q, k, v, features):
    if q.requires_grad or k.requires_grad or v.requires_grad:
        return True
    if features is None or features.bias is features.sinks is None:
        return False
    return _learns(features.bias) or _learns(features.sinks)


def _learns(given):
    return isinstance(given, torch.Tensor) and given.requires_grad


def with_fp32_sinks(features):
    """Converts sinks to fp32, which the kernels read; autograd follows the conversion."""
    if not isinstance(features.sinks, torch.Tensor) or not features.sinks.is_floating_point():
        return features
    # In PyTorch 2.4 and 2.8, torch.compile does not trace a NamedTuple's _replace.
    sinks = features.sinks.float()
    return Features(*[sinks if name == "sinks" else value for name, value in zip(Features._fields, features)])


def _expect_tensors(**tensors):
    for name, tensor in tensors.items():
        expect_array(name, tensor)
