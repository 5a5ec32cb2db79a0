"""The public calls: NumPy arrays and torch tensors alike, (batch, seqlen, heads, dim).

Picks the array library by the type of q and leaves the rest to it. Neither is imported before one of its arrays is
handed in, which is when its module is already loaded.
"""

import sys

from ._errors import InvalidArgumentError


def module_of(q):
    """`_torch` or `_numpy`, whichever knows arrays like q."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(q, torch.Tensor):
        from . import _torch

        return _torch
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(q, numpy.ndarray):
        from . import _numpy

        return _numpy
    raise TypeError(f"q is a {type(q).__name__}; it must be a NumPy array or a torch tensor")


def attention(
    q, k, v, *, causal=False, softmax_scale=None, dropout_p=0.0, seed=None, deterministic=False, return_lse=False
):
    """softmax(q k^T * softmax_scale) v, exactly; torch tensors that require it get gradients.

    q is (batch, seqlen_q, heads_q, dim), k (batch, seqlen_k, heads_kv, dim), v (batch, seqlen_k, heads_kv, dim_v), with
    heads_q a multiple of heads_kv. Views are taken as they are when their last dim is contiguous.

    causal: True or "bottom-right" lets the last query see the last key, "top-left" the first query the first key.
    softmax_scale: None means 1/sqrt(dim).
    dropout_p: the probability of dropping. The mask is a function of the seed and of each score's position alone.
    seed: an int, a pair (seed, offset), or for torch an int64 tensor (seed, offset) on q's device that is read when the
        kernels run. None draws one from torch's default generator of the device, or NumPy's global one.
    deterministic: True gives gradients of the same bits at every run, which costs time; the output always has them.
    return_lse: returns (out, lse), lse being fp32 (batch, heads_q, seqlen_q), in natural log; it carries no gradient.
    """
    return module_of(q).attention(q, k, v, causal, softmax_scale, dropout_p, seed, deterministic, return_lse)


def attention_forward(q, k, v, *, causal=False, softmax_scale=None, dropout_p=0.0, seed=None):
    """(out, lse), without autograd. With dropout a seed is needed, since the backward pass needs the same."""
    _need_seed(dropout_p, seed)
    return module_of(q).attention_forward(q, k, v, causal, softmax_scale, dropout_p, seed)


def attention_backward(
    dout, q, k, v, out, lse, *, causal=False, softmax_scale=None, dropout_p=0.0, seed=None, deterministic=False
):
    """(dq, dk, dv) from what `attention_forward` took and returned, under the same keyword arguments.

    deterministic: True gives the same bits at every run, which costs time.
    """
    _need_seed(dropout_p, seed)
    return module_of(q).attention_backward(
        dout, q, k, v, out, lse, causal, softmax_scale, dropout_p, seed, deterministic
    )


def _need_seed(dropout_p, seed):
    if dropout_p and seed is None:
        raise InvalidArgumentError("seed is None; with dropout it must be given, the same one to both passes")
