"""Arguments that `_torch` (eager) and `_torch_ops` (traced) resolve and check alike.

This module imports neither of them.
"""

import torch
from torch.compiler import is_compiling

from . import _call, _features, _torch_launch
from ._errors import InvalidArgumentError, UnsupportedError, shown

_dispatch_modes = getattr(torch._C, "_len_torch_dispatch_stack", lambda: 0)
_NO_DISPATCH = torch.Tensor.__torch_dispatch__


def is_observed(q):
    """Whether something follows the call by its operators, past which a launch by addresses goes.

    That is torch.compile, or a mode: make_fx, fake tensors, selective checkpointing. Or it is the
    class of q, if it computes its operators, as DTensor does. Such a tensor may have no memory.
    """
    if is_compiling() or _dispatch_modes() > 0:
        return True
    return type(q) is not torch.Tensor and getattr(q, "__torch_dispatch__", _NO_DISPATCH) is not _NO_DISPATCH


def resolve_seed(seed, dropout_p, q):
    """The seed that a launch takes.

    None without dropout, a pair of ints, or an int64 tensor (seed, offset) on q's device.
    """
    if not dropout_p:
        return None
    if seed is None:
        # The device's generator draws it: the host does not wait, and each replay draws anew.
        return torch.empty(2, dtype=torch.int64, device=q.device).random_()
    if isinstance(seed, torch.Tensor):
        if seed.dtype != torch.int64 or tuple(seed.shape) != (2,) or seed.device != q.device:
            found = f"{seed.dtype} of shape {tuple(seed.shape)} on {seed.device}"
            raise InvalidArgumentError(f"seed is {found}; a tensor must be torch.int64 (seed, offset) on {q.device}")
        return seed.contiguous()
    pair = _call.integer_seed(seed)
    if pair is None:
        raise InvalidArgumentError(f"seed is {shown(seed)}; it must be an int, a pair of ints or a tensor (seed, offset)")
    return pair


def refuse_summed_dbias(q, k, v, features):
    """Refuses a broadcast bias that needs a gradient.

    Otherwise the backward pass would refuse it, after the forward pass has run.
    """
    bias = features.bias
    batch_size, num_heads_q, _, seqlen_q, seqlen_k, *_ = _features.sizes(features, q.shape, k.shape, v.shape, _torch_launch, q)
    whole = (batch_size, num_heads_q, seqlen_q, seqlen_k)
    found = (1,) * (4 - bias.dim()) + tuple(bias.shape)
    if any(size == 1 < of for size, of in zip(found[::-1], whole[::-1])):
        raise UnsupportedError(
            f"deterministic is True and bias, of shape {tuple(bias.shape)}, requires a gradient: a sum of scores into one element "
            f"has no fixed order; use bias.expand{whole}, whose gradient torch sums, or leave out deterministic"
        )


def refuse_deterministic_blocks(q, features):
    """Refuses a block mask with deterministic gradients on a GPU, for the same reason."""
    if features is not None and features.block_mask is not None and q.device.type != "cpu":
        raise UnsupportedError("deterministic is True and block_mask is given; on a GPU gradients do not have both")
