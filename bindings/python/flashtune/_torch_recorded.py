"""Calls of flash-attn's functions that record a gradient, and whose arguments were checked before.

A call's form is that of its arguments as the user gave them. Where the drafts know it, neither pass
reads options or makes a `Features`. The first call of a form takes the whole way in
`_torch_autograd`.
"""

import torch

from . import _torch_drafts
from ._torch_autograd import once_differentiable
from ._torch_drafts import BACKWARD, FORWARD, RECORDED
from ._torch_launch import launch_backward


class Unknown(Exception):
    """No draft knows the form of the call."""


def attend(q, k, v, options, lengths, taken):
    """out, or (out, lse) if the last option says so. Raises `Unknown` before anything is launched.

    options: flash-attn's options in their order, without dropout and slopes.
    lengths: (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, None), or None.
    taken: a function that makes (opts, features, whether lse is returned) of both.
    """
    return _Recorded.apply(q, k, v, options, lengths, taken)


def know(q, k, v, options, lengths, opts, features):
    """Lets later calls of the form use the draft that the whole way has left."""
    _torch_drafts.alias(_forward_call(q, k, v, options, lengths), (FORWARD, None, None, q, k, v, None, opts, features, True))


def _forward_call(q, k, v, options, lengths):
    return RECORDED + FORWARD, None, None, q, k, v, options, lengths


class _Recorded(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, options, lengths, taken):
        results = _torch_drafts.repeat(*_forward_call(q, k, v, options, lengths))
        if results is None:
            raise Unknown
        out, lse = results
        ctx.set_materialize_grads(False)
        if lengths is None:
            ctx.call = options, None, taken
            ctx.save_for_backward(q, k, v, out, lse)
        else:
            offsets_q, offsets_k, *bounds = lengths
            ctx.call = options, bounds, taken
            ctx.save_for_backward(q, k, v, out, lse, offsets_q, offsets_k)
        return results if options[-1] else out

    @staticmethod
    @once_differentiable
    def backward(ctx, dout, dlse):
        options, bounds, taken = ctx.call
        q, k, v, out, lse, *offsets = ctx.saved_tensors
        lengths = None if bounds is None else (*offsets, *bounds)
        call = RECORDED + BACKWARD, None, None, q, k, v, out, lse, dout, options, lengths
        if dout is not None and dlse is None:
            gradients = _torch_drafts.repeat(*call)
            if gradients is not None:
                return *gradients[:3], None, None, None
        opts, features, _ = taken(options, lengths)
        dout = torch.zeros_like(out) if dout is None else dout
        gradients = launch_backward(dout, q, k, v, out, lse, opts, None, features, dlse=dlse, need_dbias=False)
        if dlse is None:
            _torch_drafts.alias(call, (BACKWARD, None, None, q, k, v, out, lse, dout, None, None, opts, features))
        return *gradients[:3], None, None, None
