"""Context parallelism: attention over a sequence whose rows are spread over a process group.

    q, k, v = (flashtune.context_parallel.shard(x) for x in (q, k, v))
    out = flashtune.context_parallel.attention(q, k, v, causal=True)
    out = flashtune.context_parallel.unshard(out)

All messages go through torch.distributed: NCCL between GPUs, gloo between CPUs. Errors in the
arguments are found before any tensor is sent.
"""

import contextlib
import operator

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from . import _attention, _call, _collectives, _features, _ring
from ._errors import InvalidArgumentError, UnsupportedError

__all__ = ["attention", "context_parallel", "shard", "unshard"]

_METHODS, _LAYOUTS = ("ring", "all_gather", "ulysses"), ("zigzag", "contiguous")


def attention(
    q, k, v, *, group=None, method="ring", layout="zigzag", causal=False, softmax_scale=None, window=None, softcap=0.0,
    deterministic=False, return_lse=False, cu_seqlens=None, max_seqlen=None,
):  # fmt: skip
    """`flashtune.attention` of the whole sequence, for this rank's rows; with autograd.

    q, k, v: this rank's rows as `shard` cuts them: (batch, seqlen / ranks, heads, dim). All ranks
        have the same shapes. GQA works as in `flashtune.attention`.
    group: the process group, None for the default one.
    method: "ring" passes keys and values around while it computes; its memory does not grow with
        the number of ranks. "all_gather" collects all keys and values first. "ulysses" exchanges
        rows for heads: the number of heads must be a multiple of the number of ranks, and that of
        K/V heads a multiple or a divisor of it.
    layout: "zigzag" or "contiguous", as for `shard`. With a causal mask, zigzag gives all ranks the
        same work; for "ulysses" it makes no difference.
    causal: False or True.
    softmax_scale, window, deterministic, return_lse: as in `flashtune.attention`. lse is
        (batch, heads, seqlen / ranks), and has a gradient.
    softcap: as in `flashtune.attention`.
    cu_seqlens, max_seqlen: packed sequences, for "ulysses" and the layout "contiguous" alone. q, k
        and v are then (total / ranks, heads, dim), and cu_seqlens is that of the whole batch.

    Each call compares shapes, dtypes and options over the group. On GPUs a rank compares only what
    it has not compared before, since that waits for the device. InvalidArgumentError is raised in
    all ranks if they differ or if one of them is wrong. On GPUs, ranks that mix two calls which the
    group has compared before wait for one another until the group's timeout.
    UnsupportedError: cu_seqlens is given with another method.
    """
    call = {
        "method": method, "layout": layout, "causal": causal, "softmax_scale": softmax_scale, "window": window,
        "softcap": softcap, "deterministic": deterministic, "varlen": cu_seqlens is not None,
    }  # fmt: skip
    # The caller may change a list or an array before the backward pass.
    agreed = dict(_collectives.agree(group, (q, k, v), call, _refuse)[-1])
    features = {name: agreed[name] for name in ("causal", "softmax_scale", "window", "softcap", "deterministic")}
    if method == "ulysses":
        return _ulysses(q, k, v, group, layout, {**features, "return_lse": return_lse}, cu_seqlens, max_seqlen)
    options = (group, layout, *features.values())
    function = _collectives.Ring if method == "ring" else _collectives.AllGather
    out, lse = function.apply(q, k, v, options)
    return (out, lse) if return_lse else out


def _refuse(size, tensors, call):
    """Raises what is wrong with the arguments of one rank; returns what all must share.

    The last element has the items of `call`, with plain numbers.
    """
    q, k, v = tensors
    _one_of("method", call["method"], _METHODS)
    _one_of("layout", call["layout"], _LAYOUTS)
    if call["causal"] is not True and call["causal"] is not False:
        raise InvalidArgumentError(f"causal is {call['causal']!r}; it must be False or True")
    # Numbers of any type: those of two ranks must compare as equal.
    _, scale, _, deterministic, _ = _call.options(call["causal"], call["softmax_scale"], 0.0, call["deterministic"])
    features = _features.of(window=call["window"], softcap=call["softcap"]) or _features.Features()
    plain = dict(
        softmax_scale=scale or None, deterministic=bool(deterministic), window=features.window, softcap=float(features.softcap)
    )  # fmt: skip
    for name, x in (("k", k), ("v", v)):
        if x.dtype != q.dtype or x.device != q.device:
            raise InvalidArgumentError(f"{name} is {x.dtype} on {x.device}; it must be {q.dtype} on {q.device}, as q is")
    shapes = [tuple(x.shape) for x in tensors]
    if call["varlen"]:
        if call["method"] != "ulysses" or call["layout"] != "contiguous":
            raise UnsupportedError('cu_seqlens is given; it needs method="ulysses" and layout="contiguous"')
        shapes = [(1, *shape) for shape in shapes]
    dims = _call.sizes(*shapes)
    _, heads_q, heads_kv, seqlen_q, seqlen_k, *_ = dims
    if seqlen_q != seqlen_k:
        raise InvalidArgumentError(f"q has {seqlen_q} rows and k has {seqlen_k}; they must be the same")
    if call["layout"] == "zigzag" and seqlen_q % 2:
        raise InvalidArgumentError(f"q has {seqlen_q} rows; the layout zigzag needs an even number, its two chunks")
    if call["method"] == "ulysses" and (heads_q % size or (heads_kv % size and size % heads_kv)):
        raise InvalidArgumentError(
            f"q has {heads_q} heads and k has {heads_kv}; with {size} ranks ulysses needs a multiple of {size} for q, "
            "and a multiple or a divisor for k"
        )
    return dims, str(q.dtype), tuple({**call, **plain}.items())


def _one_of(name, given, allowed):
    if given not in allowed:
        raise InvalidArgumentError(f"{name} is {given!r}; it must be one of {', '.join(map(repr, allowed))}")


def shard(x, *, dim=1, group=None, layout="zigzag"):
    """This rank's rows of a tensor that every rank has.

    dim: the dim that is cut. layout: "zigzag" cuts it into 2 * ranks chunks and gives rank r the
    chunks r and 2 * ranks - 1 - r. "contiguous" cuts it into one chunk for each rank.

    InvalidArgumentError: the chunks would differ in size.
    """
    rank, size = _collectives.place(group)
    _one_of("layout", layout, _LAYOUTS)
    _expect_rows(x, dim)
    count = size * len(_ring.chunks(rank, size, layout))
    if x.shape[dim] % count:
        raise InvalidArgumentError(f"x has {x.shape[dim]} rows in dim {dim}; {size} ranks with layout {layout} need a multiple of {count}")
    parts = x.chunk(count, dim)
    return torch.cat([parts[at] for at in _ring.chunks(rank, size, layout)], dim)


def unshard(x, *, dim=1, group=None, layout="zigzag"):
    """The whole tensor from every rank's rows, in every rank; without autograd."""
    _, size = _collectives.place(group)
    _one_of("layout", layout, _LAYOUTS)
    _expect_rows(x, dim)
    if layout == "zigzag" and size > 1 and x.shape[dim] % 2:
        raise InvalidArgumentError(f"x has {x.shape[dim]} rows in dim {dim}; the layout zigzag needs an even number, its two chunks")
    x = x.detach().contiguous()
    parts = [torch.empty_like(x) for _ in range(size)]
    dist.all_gather(parts, x, group=group)
    return _collectives.in_order(parts, dim, layout)


def _expect_rows(x, dim):
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"x is a {type(x).__name__}; it must be a torch tensor")
    try:
        at = operator.index(dim)
    except TypeError:
        at = x.dim()
    if not -x.dim() <= at < x.dim():
        raise InvalidArgumentError(f"dim is {dim!r}; x of shape {tuple(x.shape)} has no such dim")


def _ulysses(q, k, v, group, layout, features, cu_seqlens, max_seqlen):
    _, size = _collectives.place(group)
    packed = cu_seqlens is not None
    q, k, v = (x[None] if packed else x for x in (q, k, v))
    if k.shape[2] % size:
        repeats = size // k.shape[2]
        k, v = (x.repeat_interleave(repeats, 2) for x in (k, v))
    q, k, v = (_collectives.RowsToHeads.apply(x, group, layout) for x in (q, k, v))
    if packed:
        lengths = dict(cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens, max_seqlen_q=max_seqlen, max_seqlen_k=max_seqlen)
        result = _attention.attention_varlen(q[0], k[0], v[0], **features, **lengths)
        result = tuple(x[None] for x in result) if features["return_lse"] else result[None]
    else:
        result = _attention.attention(q, k, v, **features)
    out, lse = result if features["return_lse"] else (result, None)
    out = _collectives.HeadsToRows.apply(out, group, layout)
    out = out[0] if packed else out
    if lse is None:
        return out
    lse = _collectives.HeadsToRows.apply(lse.transpose(1, 2)[..., None], group, layout)[..., 0].transpose(1, 2)
    return out, lse[0] if packed else lse


@contextlib.contextmanager
def context_parallel(mesh, *, buffers=None, buffer_seq_dims=None, no_restore_buffers=None, method="ring"):
    """PyTorch's `torch.distributed.tensor.experimental.context_parallel`, on flashtune.

    Within the block every call of `scaled_dot_product_attention` is `attention` over the group of
    `mesh`, in the layout "zigzag". Such a call must have neither attn_mask nor dropout.

    mesh: a DeviceMesh of one dim.
    buffers: tensors that every rank has, without gradients. They are cut in place at the start of
        the block, and are at its end as they were. A buffer's own memory is neither read nor
        written meanwhile, so it may be a view.
    buffer_seq_dims: for each buffer the dim of the sequence.
    no_restore_buffers: those of the buffers that stay cut.
    """
    buffers, dims = list(buffers or ()), [operator.index(dim) for dim in buffer_seq_dims or ()]
    kept = {id(buffer) for buffer in no_restore_buffers or ()}
    if len(buffers) != len(dims):
        raise InvalidArgumentError(f"buffer_seq_dims has {len(dims)} elements; it must have {len(buffers)}, one for each buffer")
    if not kept <= {id(buffer) for buffer in buffers}:
        raise InvalidArgumentError("no_restore_buffers has a tensor that is not in buffers")
    if mesh.ndim != 1:
        raise InvalidArgumentError(f"mesh has {mesh.ndim} dims; it must have one, such as mesh['cp']")
    _one_of("method", method, _METHODS)
    for at, buffer in enumerate(buffers):
        if not isinstance(buffer, torch.Tensor) or buffer.requires_grad:
            found = "requires a gradient" if isinstance(buffer, torch.Tensor) else f"is a {type(buffer).__name__}"
            raise InvalidArgumentError(f"buffers[{at}] {found}; it must be a tensor without gradient, which is cut in place")
    group = mesh.get_group()
    cut = [shard(buffer, dim=dim, group=group) for buffer, dim in zip(buffers, dims)]
    whole = [buffer.detach() for buffer in buffers]
    with torch.no_grad():
        for buffer, rows in zip(buffers, cut):
            buffer.set_(rows)
    try:
        with _Sdpa(group, method):
            yield
    finally:
        with torch.no_grad():
            for buffer, rows in zip(buffers, whole):
                if id(buffer) not in kept:
                    buffer.set_(rows)


class _Sdpa(TorchFunctionMode):
    """Runs calls of `scaled_dot_product_attention` over a group."""

    def __init__(self, group, method):
        super().__init__()
        self._group, self._method = group, method

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is F.scaled_dot_product_attention:
            return self._attend(*args, **(kwargs or {}))
        return function(*args, **(kwargs or {}))

    def _attend(
        self, query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False
    ):  # fmt: skip
        if attn_mask is not None or dropout_p:
            raise UnsupportedError("attn_mask or dropout_p is given; context_parallel supports neither")
        rows = (x.transpose(1, 2) for x in (query, key, value))
        out = attention(*rows, group=self._group, method=self._method, causal=is_causal, softmax_scale=scale)
        return out.transpose(1, 2)
