"""The two passes as torch operators, which torch.compile traces as one node each.

Only traced code comes here: in eager mode an operator's dispatch costs more host time than the
whole launch. The operator refuses an unsupported bias or block mask when it runs, before its
launch. A raise in traced code would become an error of torch's own with fullgraph, and in PyTorch
2.8 and 2.11 without it too.
"""

from typing import Optional, Tuple

import torch
from torch import Tensor

from . import _features, _torch_arguments, _torch_launch
from ._errors import UnsupportedError

# An operator takes the features' tensors one by one, and -1 for numbers that are not given. The
# order is the same in all lists below.


@torch.library.custom_op("flashtune::attention_forward", mutates_args=())
def _forward(
    q: Tensor, k: Tensor, v: Tensor, bias: Optional[Tensor], sinks: Optional[Tensor], alibi_slopes: Optional[Tensor],
    mask: Optional[Tensor], mask_bits: Optional[Tensor], cu_seqlens_q: Optional[Tensor], cu_seqlens_k: Optional[Tensor],
    seqused_q: Optional[Tensor], seqused_k: Optional[Tensor], seed: Optional[Tensor],
    causal: int, softmax_scale: float, dropout_p: float, deterministic: int, window_left: int, window_right: int,
    softcap: float, max_seqlen_q: int, max_seqlen_k: int, batch_invariant: int, lse_learns: bool,
    deterministic_dbias: bool, has_block_mask: bool,
) -> Tuple[Tensor, Tensor]:  # fmt: skip
    if has_block_mask:
        raise UnsupportedError("block_mask is given under torch.compile, whose operator does not take one yet")
    features = _rebuilt(
        bias, sinks, alibi_slopes, mask, mask_bits, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k,
        window_left, window_right, softcap, max_seqlen_q, max_seqlen_k,
    )  # fmt: skip
    if deterministic_dbias:
        _torch_arguments.refuse_summed_dbias(q, k, v, features)
    opts = (causal, softmax_scale, dropout_p, deterministic, batch_invariant)
    return _torch_launch.launch_forward(q, k, v, opts, seed, features)


@_forward.register_fake
def _(q, k, v, bias, sinks, alibi_slopes, mask, mask_bits, cu_seqlens_q, *_):
    out = q.new_empty((*q.shape[:-1], v.shape[-1]))
    shape = (q.shape[1], q.shape[0]) if cu_seqlens_q is not None else (q.shape[0], q.shape[2], q.shape[1])
    return out, q.new_empty(shape, dtype=torch.float32)


@torch.library.custom_op("flashtune::attention_backward", mutates_args=())
def _backward(
    dout: Tensor, out: Tensor, lse: Tensor, dlse: Optional[Tensor], need_dbias: bool,
    q: Tensor, k: Tensor, v: Tensor, bias: Optional[Tensor], sinks: Optional[Tensor], alibi_slopes: Optional[Tensor],
    mask: Optional[Tensor], mask_bits: Optional[Tensor], cu_seqlens_q: Optional[Tensor], cu_seqlens_k: Optional[Tensor],
    seqused_q: Optional[Tensor], seqused_k: Optional[Tensor], seed: Optional[Tensor],
    causal: int, softmax_scale: float, dropout_p: float, deterministic: int, window_left: int, window_right: int,
    softcap: float, max_seqlen_q: int, max_seqlen_k: int, batch_invariant: int,
) -> Tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    features = _rebuilt(
        bias, sinks, alibi_slopes, mask, mask_bits, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k,
        window_left, window_right, softcap, max_seqlen_q, max_seqlen_k,
    )  # fmt: skip
    opts = (causal, softmax_scale, dropout_p, deterministic, batch_invariant)
    dq, dk, dv, dbias, dsinks = _torch_launch.launch_backward(
        dout, q, k, v, out, lse, opts, seed, features, dlse=dlse, need_dbias=need_dbias
    )
    # An operator returns tensors alone: what there is not has no element.
    dbias = q.new_empty(0) if dbias is None else dbias.to(q.dtype)
    return dq, dk, dv, dbias, q.new_empty(0, dtype=torch.float32) if dsinks is None else dsinks


@_backward.register_fake
def _(dout, out, lse, dlse, need_dbias, q, k, v, bias, sinks, *_):
    gradients = [x.new_empty(x.shape) for x in (q, k, v)]
    dbias = bias.new_empty(bias.shape) if need_dbias and bias is not None else q.new_empty(0)
    return *gradients, dbias, q.new_empty(0 if sinks is None else sinks.shape, dtype=torch.float32)


def _rebuilt(
    bias, sinks, alibi_slopes, mask, mask_bits, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k,
    window_left, window_right, softcap, max_seqlen_q, max_seqlen_k,
):  # fmt: skip
    longest = (None if given < 0 else given for given in (max_seqlen_q, max_seqlen_k))
    lengths = (cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, *longest)
    return _features.of((window_left, window_right), softcap, alibi_slopes, bias, mask, sinks, mask_bits, None, *lengths)


def _save(ctx, inputs, output):
    *tensors_and_options, ctx.lse_learns, _, _ = inputs
    ctx.options = tensors_and_options[_TENSORS:]
    ctx.save_for_backward(*tensors_and_options[:_TENSORS], *output)


_TENSORS = 13
_FORWARD_ALONE = 3  # lse_learns and those after it


def _gradients(ctx, dout, dlse):
    *tensors, out, lse = ctx.saved_tensors
    need_dbias = ctx.needs_input_grad[3]
    dlse = dlse if ctx.lse_learns else None
    dq, dk, dv, dbias, dsinks = _backward(dout, out, lse, dlse, need_dbias, *tensors, *ctx.options)
    dbias = dbias if need_dbias else None
    dsinks = dsinks if ctx.needs_input_grad[4] else None
    return dq, dk, dv, dbias, dsinks, *[None] * (_TENSORS - 5 + len(ctx.options) + _FORWARD_ALONE)


_forward.register_autograd(_gradients, setup_context=_save)


def attention(q, k, v, opts, seed, return_lse, features, deterministic_dbias):
    """`_torch.attention` in traced code. A seed of ints becomes a tensor for the operator."""
    causal, softmax_scale, dropout_p, deterministic, batch_invariant = opts
    seed = _torch_arguments.resolve_seed(seed, dropout_p, q)
    if seed is not None and not isinstance(seed, Tensor):
        signed = [part - (1 << 64) if part >> 63 else part for part in seed]
        seed = torch.tensor(signed, dtype=torch.int64, device=q.device)
    f = _features.Features() if features is None else features
    left, right = (-1, -1) if f.window is None else f.window
    longest = (-1 if given is None else given for given in (f.max_seqlen_q, f.max_seqlen_k))
    out, lse = _forward(
        q, k, v, f.bias, f.sinks, f.alibi_slopes, f.mask, f.mask_bits,
        f.cu_seqlens_q, f.cu_seqlens_k, f.seqused_q, f.seqused_k, seed,
        causal, float(softmax_scale), float(dropout_p), deterministic, left, right, float(f.softcap), *longest,
        batch_invariant, return_lse, deterministic_dbias, f.block_mask is not None,
    )  # fmt: skip
    return (out, lse) if return_lse else out
