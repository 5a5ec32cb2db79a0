"""Attention on torch tensors with an fp8 forward pass and a 16-bit backward pass.

The forward pass reads e4m3 copies of q, k and v, and the backward pass the tensors themselves. A
rotation of q and k is in the copies alone, since it leaves q k^T as it is. The backward pass
takes out and lse from the forward pass, so its weights differ from the forward pass's by what
quantising changed.
"""

import torch
from torch.autograd.function import once_differentiable

from . import _torch, _torch_eight, _torch_launch
from ._errors import InvalidArgumentError


def attention(q, k, v, opts, features, rotation_seed):
    """out in q's dtype, differentiable with respect to q, k, v and sinks."""
    if torch.compiler.is_dynamo_compiling():
        from ._torch_untraced import untraced

        return untraced(attention, q, k, v, opts, features, rotation_seed)
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        _torch_launch.expect_array(name, tensor)
        if tensor.dim() != 4:
            raise InvalidArgumentError(f"{name} has shape {tuple(tensor.shape)}; it must be (batch, seqlen, heads, dim)")
        _torch_launch.sixteen_bits(name, tensor)
    if k.shape[2] == 0 or q.shape[2] % k.shape[2]:
        raise InvalidArgumentError(f"k has shape {tuple(k.shape)}; the {q.shape[2]} heads of q must be a multiple of its heads")
    features = _torch.with_fp32_sinks(features)
    return _Attention.apply(q, k, v, features.sinks, opts, features._replace(sinks=None), rotation_seed)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, sinks, opts, features, rotation_seed):
        group = q.shape[2] // k.shape[2]
        of = {"q": (q, group, rotation_seed), "k": (k, 1, rotation_seed), "v": (v, 1, None)}
        made = {
            name: _torch_eight.quantize(x, torch.float8_e4m3fn, None, 0, heads, seed) for name, (x, heads, seed) in of.items()
        }
        more = {f"{name}_descale": scales for name, (_, scales) in made.items()}
        out = q.new_empty((*q.shape[:-1], v.shape[-1]))
        quantised = [numbers for numbers, _ in made.values()]
        with_scales = features._replace(sinks=sinks, **more)
        out, lse = _torch_launch.launch_forward(*quantised, opts, None, with_scales, out=out)
        ctx.call = opts, features
        ctx.save_for_backward(q, k, v, out, lse, sinks)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, dout):
        opts, features = ctx.call
        *tensors, sinks = ctx.saved_tensors
        dq, dk, dv, _, dsinks = _torch_launch.launch_backward(dout, *tensors, opts, None, features._replace(sinks=sinks))
        return dq, dk, dv, dsinks, None, None, None
