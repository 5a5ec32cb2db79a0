"""Attention on torch tensors, on the CPU or on CUDA's current stream, with autograd.

Random seeds come from torch's generators as a tensor that the kernels read at launch: a call can be captured into a CUDA
graph, each replay draws a new mask, and `torch.manual_seed` reproduces it.
"""

import torch

from . import _call, _features, _torch_autograd, _torch_launch
from ._errors import InvalidArgumentError, UnsupportedError
from ._torch_launch import describe, launch_backward, launch_forward, merge

__all__ = ["attention", "attention_backward", "attention_forward", "describe", "merge", "resolve_seed"]


def attention(q, k, v, opts, seed, return_lse, features):
    """out or (out, lse), differentiable with respect to q, k, v, bias and sinks."""
    _expect_tensors(k=k, v=v)
    features = _with_fp32_sinks(features)
    deterministic_dbias = bool(opts[3]) and features is not None and torch.is_grad_enabled() and _learns(features.bias)
    if torch.compiler.is_compiling():
        from . import _torch_ops

        return _torch_ops.attention(q, k, v, opts, seed, return_lse, features, deterministic_dbias)
    if deterministic_dbias:
        refuse_summed_dbias(q, k, v, features)
    seed = resolve_seed(seed, opts[2], q)
    if torch.is_grad_enabled() and _needs_gradient(q, k, v, features):
        # Only the backward pass refuses it, when the forward pass is long done.
        if opts[3] and features is not None and features.block_mask is not None and q.device.type != "cpu":
            raise UnsupportedError("deterministic is True and block_mask is given; on a GPU gradients do not have both")
        return _torch_autograd.attention(q, k, v, opts, seed, return_lse, features)
    out, lse = launch_forward(q, k, v, opts, seed, features, want_lse=return_lse)
    return (out, lse) if return_lse else out


def attention_forward(q, k, v, opts, seed, features, before_launch=None):
    """(out, lse) without autograd. `before_launch` is called once nothing can be refused any more."""
    _expect_tensors(k=k, v=v)
    with torch.no_grad():
        seed, features = resolve_seed(seed, opts[2], q), _with_fp32_sinks(features)
        return launch_forward(q, k, v, opts, seed, features, before_launch=before_launch)


def attention_backward(dout, q, k, v, out, lse, opts, seed, features, dlse, need_dbias):
    """(dq, dk, dv, dbias, dsinks) without autograd, the last two None where there is nothing that they could be of."""
    _expect_tensors(k=k, v=v, out=out, lse=lse, dout=dout)
    seed = resolve_seed(seed, opts[2], q)
    with torch.no_grad():
        features = _with_fp32_sinks(features)
        return launch_backward(dout, q, k, v, out, lse, opts, seed, features, dlse=dlse, need_dbias=need_dbias)


def resolve_seed(seed, dropout_p, q):
    """What a launch reads: None without dropout, a pair of ints, or an int64 tensor (seed, offset) beside q."""
    if not dropout_p:
        return None
    if seed is None:
        # Drawn on the device by the default generator, so that nothing waits and a graph replay draws anew.
        return torch.empty(2, dtype=torch.int64, device=q.device).random_()
    if isinstance(seed, torch.Tensor):
        if seed.dtype != torch.int64 or tuple(seed.shape) != (2,) or seed.device != q.device:
            found = f"{seed.dtype} of shape {tuple(seed.shape)} on {seed.device}"
            raise InvalidArgumentError(f"seed is {found}; a tensor must be torch.int64 (seed, offset) on {q.device}")
        return seed.contiguous()
    pair = _call.integer_seed(seed)
    if pair is None:
        raise InvalidArgumentError(f"seed is {seed!r}; it must be an int, a pair of ints or a tensor (seed, offset)")
    return pair


def _needs_gradient(q, k, v, features):
    if q.requires_grad or k.requires_grad or v.requires_grad:
        return True
    return features is not None and (_learns(features.bias) or _learns(features.sinks))


def _learns(given):
    return isinstance(given, torch.Tensor) and given.requires_grad


def refuse_summed_dbias(q, k, v, features):
    """Refuses a bias that learns and is broadcast. Only the backward pass would, when the forward pass is long done."""
    bias = features.bias
    batch_size, num_heads_q, _, seqlen_q, seqlen_k, *_ = _features.sizes(features, q.shape, k.shape, v.shape, _torch_launch, q)
    whole = (batch_size, num_heads_q, seqlen_q, seqlen_k)
    found = (1,) * (4 - bias.dim()) + tuple(bias.shape)
    if any(size == 1 < of for size, of in zip(found[::-1], whole[::-1])):
        raise UnsupportedError(
            f"deterministic is True and bias, of shape {tuple(bias.shape)}, requires a gradient: a sum of scores into one element "
            f"has no fixed order; use bias.expand{whole}, whose gradient torch sums, or leave out deterministic"
        )


def _with_fp32_sinks(features):
    """Sinks as the kernels read them; autograd follows the conversion."""
    if features is None or not isinstance(features.sinks, torch.Tensor) or not features.sinks.is_floating_point():
        return features
    return features._replace(sinks=features.sinks.float())


def _expect_tensors(**tensors):
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} is a {type(tensor).__name__}; it must be a torch tensor, as q is")
