"""The two passes as torch operators, which torch.compile traces as one node each.

Only traced code comes here: in eager mode an operator's dispatch costs more host time than the
whole launch. The operator refuses an unsupported bias or block mask when it runs, before its
launch. A raise in traced code would become an error of torch's own with fullgraph, and in PyTorch
2.8 and 2.11 without it too.
"""

from types import SimpleNamespace

import torch
from torch import Tensor

from . import _block_mask, _features, _torch_arguments, _torch_launch

# An operator takes tensors and numbers alone, by position. Only these lists know the positions; all
# else goes by name. -1 stands for a number that is not given. torch
# compiles a function again for each value of an `int`, but once for all values of a `SymInt`.
_FEATURE_TENSORS = (
    "bias", "sinks", "alibi_slopes", "mask", "mask_bits", "cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k",
)  # fmt: skip
_BLOCK_LISTS = tuple(name for name in _block_mask.BlockMask._fields if name != "BLOCK_SIZE")
_TENSORS = ("q", "k", "v", *_FEATURE_TENSORS, *_BLOCK_LISTS, "seed")
_NUMBERS = {
    "causal": "SymInt", "softmax_scale": "float", "dropout_p": "float", "deterministic": "SymInt",
    "window_left": "SymInt", "window_right": "SymInt", "softcap": "float", "max_seqlen_q": "SymInt",
    "max_seqlen_k": "SymInt", "batch_invariant": "SymInt", "block_q": "SymInt", "block_k": "SymInt",
}  # fmt: skip
_FORWARD_FLAGS = ("lse_learns", "deterministic_dbias", "learns")
_BACKWARD_FIRST = {"dout": "Tensor", "out": "Tensor", "lse": "Tensor", "dlse": "Tensor?", "need_dbias": "bool"}

_SHARED = {name: "Tensor" if name in ("q", "k", "v") else "Tensor?" for name in _TENSORS} | _NUMBERS
_FORWARD = _SHARED | {name: "bool" for name in _FORWARD_FLAGS}
_BACKWARD = _BACKWARD_FIRST | _SHARED


def _schema(arguments, results):
    listed = ", ".join(f"{kind} {name}" for name, kind in arguments.items())
    return f"({listed}) -> ({', '.join(['Tensor'] * results)})"


def _named(arguments, values):
    return SimpleNamespace(**dict(zip(arguments, values)))


def _launched_forward(*values):
    a = _named(_FORWARD, values)
    features = _rebuilt(a)
    if a.deterministic and a.learns:
        _torch_arguments.refuse_deterministic_blocks(a.q, features)
    if a.deterministic_dbias:
        _torch_arguments.refuse_summed_dbias(a.q, a.k, a.v, features)
    return _torch_launch.launch_forward(a.q, a.k, a.v, _opts(a), a.seed, features)


def _launched_backward(*values):
    a = _named(_BACKWARD, values)
    dq, dk, dv, dbias, dsinks = _torch_launch.launch_backward(
        a.dout, a.q, a.k, a.v, a.out, a.lse, _opts(a), a.seed, _rebuilt(a), dlse=a.dlse, need_dbias=a.need_dbias
    )
    # An operator returns tensors alone: an absent one has no element.
    dbias = a.q.new_empty(0) if dbias is None else dbias.to(a.q.dtype)
    return dq, dk, dv, dbias, a.q.new_empty(0, dtype=torch.float32) if dsinks is None else dsinks


def _opts(a):
    return a.causal, a.softmax_scale, a.dropout_p, a.deterministic, a.batch_invariant


def _rebuilt(a):
    """The Features of an operator's arguments."""
    longest = {name: getattr(a, name) for name in ("max_seqlen_q", "max_seqlen_k")}
    longest = {name: None if given < 0 else given for name, given in longest.items()}
    tensors = {name: getattr(a, name) for name in _FEATURE_TENSORS}
    blocks = None
    if a.block_q >= 0:
        blocks = _block_mask.BlockMask((a.block_q, a.block_k), **{name: getattr(a, name) for name in _BLOCK_LISTS})
    return _features.of(
        window=(a.window_left, a.window_right), softcap=a.softcap, block_mask=blocks, **tensors, **longest
    )


_forward = torch.library.custom_op(
    "flashtune::attention_forward", _launched_forward, mutates_args=(), schema=_schema(_FORWARD, 2)
)
_backward = torch.library.custom_op(
    "flashtune::attention_backward", _launched_backward, mutates_args=(), schema=_schema(_BACKWARD, 5)
)


@_forward.register_fake
def _(*values):
    a = _named(_FORWARD, values)
    out = a.q.new_empty((*a.q.shape[:-1], a.v.shape[-1]))
    batch, seqlen, heads = (None, *a.q.shape[:2]) if a.cu_seqlens_q is not None else a.q.shape[:3]
    shape = (heads, seqlen) if batch is None else (batch, heads, seqlen)
    return out, a.q.new_empty(shape, dtype=torch.float32)


@_backward.register_fake
def _(*values):
    a = _named(_BACKWARD, values)
    gradients = [x.new_empty(x.shape) for x in (a.q, a.k, a.v)]
    dbias = a.bias.new_empty(a.bias.shape) if a.need_dbias and a.bias is not None else a.q.new_empty(0)
    return *gradients, dbias, a.q.new_empty(0 if a.sinks is None else a.sinks.shape, dtype=torch.float32)


def _save(ctx, inputs, output):
    a = dict(zip(_FORWARD, inputs))
    ctx.lse_learns = a["lse_learns"]
    ctx.numbers = {name: a[name] for name in _NUMBERS}
    ctx.save_for_backward(*(a[name] for name in _TENSORS), *output)


def _gradients(ctx, dout, dlse):
    *tensors, out, lse = ctx.saved_tensors
    needed = dict(zip(_FORWARD, ctx.needs_input_grad))
    a = {
        "dout": dout, "out": out, "lse": lse, "dlse": dlse if ctx.lse_learns else None, "need_dbias": needed["bias"],
        **dict(zip(_TENSORS, tensors)), **ctx.numbers,
    }  # fmt: skip
    dq, dk, dv, dbias, dsinks = _backward(*(a[name] for name in _BACKWARD))
    gradients = {"q": dq, "k": dk, "v": dv}
    if needed["bias"]:
        gradients["bias"] = dbias
    if needed["sinks"]:
        gradients["sinks"] = dsinks
    return tuple(gradients.get(name) for name in _FORWARD)


_forward.register_autograd(_gradients, setup_context=_save)


def attention(q, k, v, opts, seed, return_lse, features, deterministic_dbias, learns):
    """`_torch.attention` in traced code. A seed of ints becomes a tensor for the operator.

    learns: whether a gradient may be asked for.
    """
    causal, softmax_scale, dropout_p, deterministic, batch_invariant = opts
    seed = _torch_arguments.resolve_seed(seed, dropout_p, q)
    if seed is not None and not isinstance(seed, Tensor):
        signed = [part - (1 << 64) if part >> 63 else part for part in seed]
        seed = torch.tensor(signed, dtype=torch.int64, device=q.device)
    f = _features.Features() if features is None else features
    left, right = (-1, -1) if f.window is None else f.window
    a = {
        "q": q, "k": k, "v": v, "seed": seed, "causal": causal, "softmax_scale": float(softmax_scale),
        "dropout_p": float(dropout_p), "deterministic": deterministic, "window_left": left, "window_right": right,
        "softcap": float(f.softcap), "max_seqlen_q": -1 if f.max_seqlen_q is None else f.max_seqlen_q,
        "max_seqlen_k": -1 if f.max_seqlen_k is None else f.max_seqlen_k, "batch_invariant": batch_invariant,
        "lse_learns": return_lse, "deterministic_dbias": deterministic_dbias, "learns": learns,
    }  # fmt: skip
    for name in _FEATURE_TENSORS:
        a[name] = getattr(f, name)
    a["block_q"], a["block_k"] = (-1, -1) if f.block_mask is None else _pair(f.block_mask.BLOCK_SIZE)
    for name in _BLOCK_LISTS:
        a[name] = None if f.block_mask is None else getattr(f.block_mask, name, None)
    out, lse = _forward(*[a[name] for name in _FORWARD])
    return (out, lse) if return_lse else out


def _pair(size):
    """(queries, keys) of a block. The launch checks them."""
    return size if isinstance(size, (tuple, list)) else (size, size)
