"""Attention for torch's autograd in eager mode.

Autograd sees nothing inside a tuple. Bias and sinks get gradients, so they are separate arguments.
"""

import functools

import torch
from torch.autograd import function

from ._features import Features
from ._torch_launch import launch_backward, launch_forward


def attention(q, k, v, opts, seed, return_lse, features):
    """out or (out, lse)."""
    bias, sinks, features = _apart(features)
    return _Attention.apply(q, k, v, bias, sinks, (opts, seed, return_lse, features))


def packed_attention(q, packed, opts, seed, return_lse, features):
    """Attention on a packed k and v, or with q None on a packed q, k and v.

    They are slices of the third dim from the end, and so are their gradients.
    """
    bias, sinks, features = _apart(features)
    return _PackedAttention.apply(q, packed, bias, sinks, (opts, seed, return_lse, features))


def _apart(features):
    if features is None:
        return None, None, None
    if features.bias is features.sinks is None:
        return None, None, features
    return features.bias, features.sinks, features._replace(bias=None, sinks=None)


def _together(features, bias, sinks):
    return features if bias is sinks is None else features._replace(bias=bias, sinks=sinks)


def once_differentiable(backward):
    """torch's `once_differentiable`, without its guards where no gradient is recorded."""
    guarded = function.once_differentiable(backward)

    @functools.wraps(backward)
    def differentiate(ctx, dout, dlse=None):
        return guarded(ctx, dout, dlse) if torch.is_grad_enabled() else backward(ctx, dout, dlse)

    return differentiate


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, bias, sinks, call):
        opts, seed, return_lse, features = call
        out, lse = launch_forward(q, k, v, opts, seed, _together(features, bias, sinks))
        _save(ctx, (q, k, v, out, lse), bias, sinks, opts, seed, features)
        return (out, lse) if return_lse else out

    @staticmethod
    @once_differentiable
    def backward(ctx, dout, dlse):
        (q, k, v, out, lse), bias, opts, seed, features = _saved(ctx)
        dout = torch.zeros_like(out) if dout is None else dout
        dq, dk, dv, dbias, dsinks = launch_backward(
            dout, q, k, v, out, lse, opts, seed, features, dlse=dlse, need_dbias=ctx.needs_input_grad[3]
        )
        return dq, dk, dv, _of_dtype(dbias, bias), dsinks, None


class _PackedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, packed, bias, sinks, call):
        opts, seed, return_lse, features = call
        queries, k, v = _slices(q, packed)
        out, lse = launch_forward(queries, k, v, opts, seed, _together(features, bias, sinks))
        _save(ctx, (q, packed, out, lse), bias, sinks, opts, seed, features)
        return (out, lse) if return_lse else out

    @staticmethod
    @once_differentiable
    def backward(ctx, dout, dlse):
        (q, packed, out, lse), bias, opts, seed, features = _saved(ctx)
        dout = torch.zeros_like(out) if dout is None else dout
        dq = None if q is None else torch.empty_like(q, memory_format=torch.contiguous_format)
        dpacked = torch.empty_like(packed, memory_format=torch.contiguous_format)
        *_, dbias, dsinks = launch_backward(
            dout, *_slices(q, packed), out, lse, opts, seed, features, _slices(dq, dpacked),
            dlse=dlse, need_dbias=ctx.needs_input_grad[2],
        )  # fmt: skip
        return dq, dpacked, _of_dtype(dbias, bias), dsinks, None


def _slices(q, packed):
    """(q, k, v) from a packed pair, or from a packed triple if q is None."""
    return packed.unbind(-3) if q is None else (q, *packed.unbind(-3))


def _of_dtype(gradient, tensor):
    return None if gradient is None else gradient.to(tensor.dtype)


def _save(ctx, tensors, bias, sinks, opts, seed, features):
    # Every tensor that backward reads must live unchanged until then, including a seed and the
    # features' tensors.
    ctx.set_materialize_grads(False)
    ctx.count = len(tensors)
    if features is None and not isinstance(seed, torch.Tensor):
        ctx.call = opts, seed, None
        ctx.save_for_backward(*tensors)
        return
    given = () if features is None else _together(features, bias, sinks)
    of_features = [value if isinstance(value, torch.Tensor) else None for value in given]
    others = None if features is None else Features(*[None if saved is value else value for value, saved in zip(given, of_features)])
    of_seed = seed if isinstance(seed, torch.Tensor) else None
    ctx.call = opts, None if of_seed is seed else seed, others
    ctx.save_for_backward(*tensors, of_seed, *of_features)


def _saved(ctx):
    """(tensors, bias, opts, seed, features)"""
    opts, seed, features = ctx.call
    saved, count = ctx.saved_tensors, ctx.count
    if len(saved) == count:
        return saved, None, opts, seed, features
    if saved[count] is not None:
        seed = saved[count]
    if features is not None:
        features = Features(*[value if tensor is None else tensor for value, tensor in zip(features, saved[count + 1 :])])
    return saved[:count], None if features is None else features.bias, opts, seed, features
