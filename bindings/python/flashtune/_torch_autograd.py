"""Attention for torch's autograd in eager mode.

Autograd sees nothing inside a tuple. Bias and sinks get gradients, so they are separate arguments.
"""

import torch
from torch.autograd.function import once_differentiable

from ._features import Features
from ._torch_launch import launch_backward, launch_forward


def attention(q, k, v, opts, seed, return_lse, features):
    """out or (out, lse)."""
    bias, sinks, features = _apart(features)
    return _Attention.apply(q, k, v, bias, sinks, opts, seed, return_lse, features)


def packed_attention(q, packed, opts, seed, return_lse, features):
    """Attention on a packed k and v, or with q None on a packed q, k and v.

    They are slices of the third dim from the end, and so are their gradients.
    """
    bias, sinks, features = _apart(features)
    return _PackedAttention.apply(q, packed, bias, sinks, opts, seed, return_lse, features)


def _apart(features):
    if features is None:
        return None, None, None
    return features.bias, features.sinks, features._replace(bias=None, sinks=None)


def _together(features, bias, sinks):
    return features if features is None else features._replace(bias=bias, sinks=sinks)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, bias, sinks, opts, seed, return_lse, features):
        out, lse = launch_forward(q, k, v, opts, seed, _together(features, bias, sinks))
        _save(ctx, (q, k, v, bias, sinks, out, lse), opts, seed, features)
        return (out, lse) if return_lse else out

    @staticmethod
    @once_differentiable
    def backward(ctx, dout, dlse=None):
        (q, k, v, bias, sinks, out, lse), opts, seed, features = _saved(ctx)
        dout = torch.zeros_like(out) if dout is None else dout
        dq, dk, dv, dbias, dsinks = launch_backward(
            dout, q, k, v, out, lse, opts, seed, _together(features, bias, sinks),
            dlse=dlse, need_dbias=ctx.needs_input_grad[3],
        )  # fmt: skip
        return dq, dk, dv, _of_dtype(dbias, bias), dsinks, None, None, None, None


class _PackedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, packed, bias, sinks, opts, seed, return_lse, features):
        queries, k, v = _slices(q, packed)
        out, lse = launch_forward(queries, k, v, opts, seed, _together(features, bias, sinks))
        _save(ctx, (q, packed, bias, sinks, out, lse), opts, seed, features)
        return (out, lse) if return_lse else out

    @staticmethod
    @once_differentiable
    def backward(ctx, dout, dlse=None):
        (q, packed, bias, sinks, out, lse), opts, seed, features = _saved(ctx)
        dout = torch.zeros_like(out) if dout is None else dout
        dq = None if q is None else torch.empty_like(q, memory_format=torch.contiguous_format)
        dpacked = torch.empty_like(packed, memory_format=torch.contiguous_format)
        *_, dbias, dsinks = launch_backward(
            dout, *_slices(q, packed), out, lse, opts, seed, _together(features, bias, sinks), _slices(dq, dpacked),
            dlse=dlse, need_dbias=ctx.needs_input_grad[2],
        )  # fmt: skip
        return dq, dpacked, _of_dtype(dbias, bias), dsinks, None, None, None, None


def _slices(q, packed):
    """(q, k, v) from a packed pair, or from a packed triple if q is None."""
    return packed.unbind(-3) if q is None else (q, *packed.unbind(-3))


def _of_dtype(gradient, tensor):
    return None if gradient is None else gradient.to(tensor.dtype)


def _save(ctx, tensors, opts, seed, features):
    # Every tensor that backward reads must live unchanged until then, including a seed and the
    # features' tensors.
    ctx.set_materialize_grads(False)
    ctx.seed = None if isinstance(seed, torch.Tensor) else seed
    ctx.opts = opts
    ctx.count = len(tensors)
    ctx.features = features
    of_features = () if features is None else features
    is_tensor = [isinstance(value, torch.Tensor) for value in of_features]
    if features is not None:
        ctx.features = Features(*(None if saved else value for value, saved in zip(features, is_tensor)))
    of_features = [value if saved else None for value, saved in zip(of_features, is_tensor)]
    ctx.save_for_backward(*tensors, seed if ctx.seed is None else None, *of_features)


def _saved(ctx):
    """(tensors, opts, seed, features)"""
    saved = ctx.saved_tensors
    tensors, seed, of_features = saved[: ctx.count], saved[ctx.count], saved[ctx.count + 1 :]
    features = ctx.features
    if features is not None:
        features = Features(*(value if tensor is None else tensor for value, tensor in zip(features, of_features)))
    return tensors, ctx.opts, ctx.seed if seed is None else seed, features
