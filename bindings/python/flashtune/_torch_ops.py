"""The two passes as torch operators, which torch.compile traces as one node each.

Only traced code comes here: in eager mode an operator's dispatch costs more host time than the whole launch.
"""

from typing import Optional, Tuple

import torch
from torch import Tensor

from . import _call, _torch


@torch.library.custom_op("flashtune::attention_forward", mutates_args=())
def _forward(
    q: Tensor, k: Tensor, v: Tensor,
    causal: int, softmax_scale: float, dropout_p: float, deterministic: int, seed: Optional[Tensor],
) -> Tuple[Tensor, Tensor]:  # fmt: skip
    return _torch.launch_forward(q, k, v, (causal, softmax_scale, dropout_p, deterministic), seed)


@_forward.register_fake
def _(q, k, v, causal, softmax_scale, dropout_p, deterministic, seed):
    batch_size, num_heads_q, _, seqlen_q, _, _, head_dim_v = _call.sizes(q.shape, k.shape, v.shape)
    out = q.new_empty((batch_size, seqlen_q, num_heads_q, head_dim_v))
    return out, q.new_empty((batch_size, num_heads_q, seqlen_q), dtype=torch.float32)


@torch.library.custom_op("flashtune::attention_backward", mutates_args=())
def _backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    causal: int, softmax_scale: float, dropout_p: float, deterministic: int, seed: Optional[Tensor],
) -> Tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return _torch.launch_backward(dout, q, k, v, out, lse, (causal, softmax_scale, dropout_p, deterministic), seed)


@_backward.register_fake
def _(dout, q, k, v, out, lse, causal, softmax_scale, dropout_p, deterministic, seed):
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _save(ctx, inputs, output):
    q, k, v, *ctx.opts, seed = inputs
    ctx.save_for_backward(q, k, v, *output, seed)


def _gradients(ctx, dout, _dlse):
    q, k, v, out, lse, seed = ctx.saved_tensors
    return (*_backward(dout, q, k, v, out, lse, *ctx.opts, seed), None, None, None, None, None)


_forward.register_autograd(_gradients, setup_context=_save)


def attention(q, k, v, opts, seed, return_lse):
    """`_torch.attention` in traced code; a seed of ints becomes a tensor, which is what an operator can take."""
    causal, softmax_scale, dropout_p, deterministic = opts
    seed = _torch.resolve_seed(seed, dropout_p, q)
    if seed is not None and not isinstance(seed, Tensor):
        signed = [part - (1 << 64) if part >> 63 else part for part in seed]
        seed = torch.tensor(signed, dtype=torch.int64, device=q.device)
    out, lse = _forward(q, k, v, causal, float(softmax_scale), float(dropout_p), deterministic, seed)
    return (out, lse.detach()) if return_lse else out
