"""The fixed-length calls of the flash-attn 2.8 package under the same names, arguments and defaults.

Its users change one import:  from flashtune.flash_attn_interface import flash_attn_func
An argument that flashtune does not do yet raises NotImplementedError with the argument's name; none is ignored.
"""

import torch

from . import _call, _torch
from ._errors import InvalidArgumentError, UnsupportedError

__all__ = ["flash_attn_func", "flash_attn_kvpacked_func", "flash_attn_qkvpacked_func"]


def flash_attn_func(
    q,
    k,
    v,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
):
    """Attention of q (batch, seqlen, heads, dim) over k and v (batch, seqlen_k, heads_kv, dim).

    causal aligns the mask to the bottom right corner. deterministic gives the gradients the same bits at every run.
    return_attn_probs returns (out, softmax_lse, None): the matrix of probabilities, which flash-attn hands out for its
    own tests, is never formed here.
    """
    _expect_tensors(q=q, k=k, v=v)
    _refuse(window_size, softcap, alibi_slopes)
    result = _torch.attention(
        q, k, v, bool(causal), softmax_scale, dropout_p, None, bool(deterministic), return_attn_probs
    )
    return (*result, None) if return_attn_probs else result


def flash_attn_kvpacked_func(
    q,
    kv,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
):
    """`flash_attn_func` with k and v in one tensor, (batch, seqlen_k, 2, heads_kv, dim), and so their gradients."""
    _expect_tensors(q=q, kv=kv)
    _refuse(window_size, softcap, alibi_slopes)
    _expect_packed("kv", kv, 2)
    return _packed(q, kv, dropout_p, softmax_scale, causal, deterministic, return_attn_probs)


def flash_attn_qkvpacked_func(
    qkv,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
):
    """`flash_attn_func` with q, k and v in one tensor, (batch, seqlen, 3, heads, dim), and so their gradients."""
    _expect_tensors(qkv=qkv)
    _refuse(window_size, softcap, alibi_slopes)
    _expect_packed("qkv", qkv, 3)
    return _packed(None, qkv, dropout_p, softmax_scale, causal, deterministic, return_attn_probs)


def _packed(q, packed, dropout_p, softmax_scale, causal, deterministic, return_attn_probs):
    opts = _call.options(bool(causal), softmax_scale, dropout_p, bool(deterministic))
    seed = _torch.resolve_seed(None, dropout_p, packed)
    result = _torch.PackedAttention.apply(q, packed, opts, seed, return_attn_probs)
    return (*result, None) if return_attn_probs else result


def _expect_tensors(**tensors):
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} is a {type(tensor).__name__}; it must be a torch tensor")


def _expect_packed(name, tensor, count):
    if tensor.dim() != 5 or tensor.shape[2] != count:
        found = tuple(tensor.shape)
        raise InvalidArgumentError(f"{name} has shape {found}; it must be (batch, seqlen, {count}, heads, dim)")


def _refuse(window_size, softcap, alibi_slopes):
    if tuple(window_size) != (-1, -1):
        raise UnsupportedError(f"window_size is {tuple(window_size)}; sliding windows are not supported yet")
    if softcap:
        raise UnsupportedError(f"softcap is {softcap}; a soft cap is not supported yet")
    if alibi_slopes is not None:
        raise UnsupportedError("alibi_slopes is given; ALiBi is not supported yet")
