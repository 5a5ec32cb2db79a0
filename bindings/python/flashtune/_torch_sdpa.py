"""Kernels for the operators behind PyTorch's `scaled_dot_product_attention` and `varlen_attn`.

`install` registers them at the dispatch key BackendSelect, which every call passes on its way to
the kernel of its device, below autograd. A kernel runs the call on flashtune or passes it on, so
PyTorch's own kernels stay reachable from every thread. `torch.py` decides when they are installed.

Each `Family` is a forward operator and its backward operator. Arguments go by the names of the
operator's schema, since their positions differ between versions of PyTorch. An argument that no
table here names must have its default.
"""

import threading
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from . import _call, _features
from ._errors import FlashtuneError, UnsupportedError
from ._torch_launch import launch_backward, launch_forward

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_LARGEST_HEAD_DIM = 512
_LAYOUTS = 512
"""The most output layouts that are kept. One more clears them."""


class Family(NamedTuple):
    """A forward operator of aten, its backward operator and what its arguments mean."""

    forward: str
    backward: str
    causal: str
    """The alignment of is_causal."""
    bias: Any = None
    """The name of the argument that is added to the scores."""
    is_dense: bool = True
    """Tensors are (batch, heads, seqlen, dim). False: (total, heads, dim) with cum_seq_q, or (batch,
    seqlen, heads, dim)."""


FAMILIES = (
    Family("_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention_for_cpu_backward",
           "top-left", "attn_mask"),
    Family("_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_backward", "bottom-right"),
    Family("_scaled_dot_product_efficient_attention", "_scaled_dot_product_efficient_attention_backward",
           "top-left", "attn_bias"),
    Family("_scaled_dot_product_cudnn_attention", "_scaled_dot_product_cudnn_attention_backward",
           "top-left", "attn_bias"),
    Family("_flash_attention_forward", "_flash_attention_backward", "bottom-right", is_dense=False),
    Family("_cudnn_attention_forward", "_cudnn_attention_backward", "bottom-right", is_dense=False),
)  # fmt: skip

_COMMON = {
    "query", "key", "value", "dropout_p", "is_causal", "scale", "compute_log_sumexp", "philox_seed", "philox_offset",
    "rng_state", "unused", "max_q", "max_k", "grad_out", "grad_out_", "out", "logsumexp", "grad_input_mask",
}  # fmt: skip
_VARLEN = {"cum_seq_q", "cum_seq_k", "window_size_left", "window_size_right", "seqused_k", "alibi_slopes", "block_table"}
_CUDNN_VARLEN = "_cudnn_attention_forward"


class Refused(Exception):
    """The call is PyTorch's. The text says why."""


def install(library, note, has_dropout):
    """Registers the kernels in a `torch.library.Library` of aten.

    note(operator, reason): called for each call; reason is None if flashtune served it.
    has_dropout: serve calls with dropout too.
    """
    for family in FAMILIES:
        if not _is_offered(family):
            continue
        for name, is_backward in ((family.forward, False), (family.backward, True)):
            kernel = _kernel(family, name, is_backward, note, has_dropout)
            library.impl(name, kernel, "BackendSelect", with_keyset=True)


def _is_offered(family):
    """Whether this PyTorch has the operators, for the tensors that `Family` describes."""
    packet = getattr(torch.ops.aten, family.forward, None)
    # Older versions call it for nested tensors alone, and its LSE has another layout there.
    return packet is not None and (family.forward != _CUDNN_VARLEN or "seqused_k" in str(packet.default._schema))


def _kernel(family, name, is_backward, note, has_dropout):
    operator = getattr(torch.ops.aten, name).default
    arguments = operator._schema.arguments
    names = [argument.name for argument in arguments]
    defaults = {argument.name: argument.default_value if argument.has_default_value() else None for argument in arguments}
    understood = _COMMON | ({family.bias} if family.is_dense else _VARLEN)
    others = [other for other in names if other not in understood]
    behind = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)
    run = _backward if is_backward else _forward

    def kernel(keyset, *args, **kwargs):
        a = {**defaults, **dict(zip(names, args)), **kwargs}
        if a["query"].device.type == "meta" or getattr(_asking, "rule", False):
            return operator.redispatch(keyset & behind, *args, **kwargs)
        is_decided = False
        try:
            _refuse(family, a, others, has_dropout)
            is_decided = True
            outputs = run(family, operator, a)
        except (Refused, FlashtuneError) as error:
            # A dropout mask of one library is not the other's. So once `_refuse` has let a call
            # with dropout pass, as it does in both passes, it stays with flashtune.
            if is_decided and a["dropout_p"]:
                raise error if isinstance(error, FlashtuneError) else UnsupportedError(str(error)) from None
            note(name, str(error))
            return operator.redispatch(keyset & behind, *args, **kwargs)
        note(name, None)
        return outputs

    return kernel


def _refuse(family, a, others, has_dropout):
    """Raises `Refused` if the call is PyTorch's.

    The answer is the same for both passes of a problem: dropout needs that.
    """
    q, k, v = a["query"], a["key"], a["value"]
    if q.is_nested or k.is_nested or v.is_nested:
        raise Refused("the tensors are nested")
    if q.device.type not in ("cpu", "cuda"):
        raise Refused(f"query is on {q.device}; flashtune runs on cpu and cuda tensors")
    if q.dtype not in _DTYPES or k.dtype != q.dtype or v.dtype != q.dtype:
        raise Refused(f"the dtypes are {q.dtype}, {k.dtype} and {v.dtype}; they must be one of float16, bfloat16 and float32")
    if k.device != q.device or v.device != q.device:
        raise Refused("query, key and value are on different devices")
    if not (q.numel() and k.numel() and v.numel()):
        raise Refused("a tensor is empty")
    if max(q.shape[-1], v.shape[-1]) > _LARGEST_HEAD_DIM:
        raise Refused(f"the head dim is {max(q.shape[-1], v.shape[-1])}; it must be at most {_LARGEST_HEAD_DIM}")
    if a["dropout_p"] and not has_dropout:
        raise Refused(f"dropout_p is {a['dropout_p']}; activate(dropout=True) serves dropout")
    for name in others:
        if isinstance(a[name], torch.Tensor) or a[name]:
            raise Refused(f"{name} is given")
    if family.is_dense:
        _refuse_bias(family, a, q)
    else:
        _refuse_lengths(family, a, q)


def _refuse_bias(family, a, q):
    if q.dim() != 4:
        raise Refused(f"query has {q.dim()} dims; it must have 4")
    bias = a.get(family.bias)
    if bias is not None and (bias.dtype not in (q.dtype, torch.bool) or bias.device != q.device):
        raise Refused(f"{family.bias} is {bias.dtype} on {bias.device}; it must be {q.dtype} or torch.bool on {q.device}")


def _refuse_lengths(family, a, q):
    is_paged, seqused_k = a.get("block_table") is not None, a.get("seqused_k")
    if is_paged and (seqused_k is None or a["cum_seq_q"] is None):
        raise Refused("block_table is given without seqused_k or cum_seq_q")
    if not is_paged and (a["cum_seq_q"] is None) != (a["cum_seq_k"] is None):
        raise Refused("one of cum_seq_q and cum_seq_k is missing")
    if family.forward == _CUDNN_VARLEN and a["is_causal"] and seqused_k is None and not _is_same(a["cum_seq_q"], a["cum_seq_k"]):
        raise Refused("cuDNN aligns the causal mask of packed sequences top-left, and their lengths may differ")
    if q.dim() != (4 if a["cum_seq_q"] is None else 3):
        raise Refused(f"query has {q.dim()} dims; it must have 3 with cum_seq_q, else 4")
    for name in ("cum_seq_q", "cum_seq_k", "seqused_k"):
        lengths = a.get(name)
        if lengths is not None and (lengths.dtype != torch.int32 or lengths.device != q.device):
            raise Refused(f"{name} is {lengths.dtype} on {lengths.device}; it must be torch.int32 on {q.device}")


def _is_same(x, y):
    return x is y or (x is not None and y is not None and x.data_ptr() == y.data_ptr())


def _forward(family, operator, a):
    layouts = _layouts(operator, a)
    q, k, v = (_by_row(family, a[name]) for name in ("query", "key", "value"))
    outputs = [_made(layout, q.device) for layout in layouts]
    if q.dim() == 3 and outputs[1].shape != (q.shape[1], q.shape[0]):
        raise Refused(f"this PyTorch pads the LSE of packed sequences to {tuple(outputs[1].shape)}")
    seed = None
    if a["dropout_p"]:
        seed = torch.empty(2, dtype=torch.int64, device=q.device).random_()
    features = _of(family, a)
    want_lse = bool(a.get("compute_log_sumexp", True))
    place = _by_row(family, outputs[0])
    _, lse = launch_forward(q, k, v, _opts(family, a), seed, features, want_lse, out=place)
    _put_back(family, place, outputs[0])
    if want_lse:
        outputs[1] = _as_laid_out(lse, outputs[1])
    if seed is not None:
        _write_seed(seed, outputs, operator)
    return tuple(outputs)


def _backward(family, operator, a):
    layouts = _layouts(operator, a)
    q, k, v, out = (_by_row(family, a[name]) for name in ("query", "key", "value", "out"))
    dout = _by_row(family, a["grad_out"] if "grad_out" in a else a["grad_out_"])
    gradients = [_made(layout, q.device) for layout in layouts]
    # Some operators pad the rows of the LSE or give it a last dim of 1.
    lse = a["logsumexp"]
    if family.is_dense:
        lse = lse.reshape(*lse.shape[:2], -1)[..., : q.shape[1]]
    wants_dbias = len(gradients) > 3 and gradients[3] is not None
    features = _of(family, a)
    into = tuple(_by_row(family, gradient) for gradient in gradients[:3])
    options = _opts(family, a, deterministic=torch.are_deterministic_algorithms_enabled())
    _, _, _, dbias, _ = launch_backward(
        dout, q, k, v, out, lse, options, _seed(a), features, into, need_dbias=wants_dbias
    )  # fmt: skip
    for place, gradient in zip(into, gradients):
        _put_back(family, place, gradient)
    if wants_dbias:
        gradients[3].copy_(dbias)
    return tuple(gradients)


def _by_row(family, tensor):
    """(batch, seqlen, heads, dim) or (total, heads, dim), with a contiguous last dim: a copy where
    the tensor has none."""
    tensor = tensor.transpose(1, 2) if family.is_dense else tensor
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _put_back(family, rows, output):
    """Copies what a kernel wrote by rows to an output whose last dim is not contiguous."""
    if output.stride(-1) != 1:
        output.copy_(rows.transpose(1, 2) if family.is_dense else rows)


def _opts(family, a, deterministic=False):
    return _call.options(family.causal if a["is_causal"] else False, a["scale"], float(a["dropout_p"]), deterministic)


def _of(family, a):
    """The Features of a call."""
    if family.is_dense:
        given = a.get(family.bias)
        if given is None:
            return None
        return _features.of(mask=given) if given.dtype == torch.bool else _features.of(bias=given)
    left, right = (-1 if side is None else side for side in (a.get("window_size_left"), a.get("window_size_right")))
    window = (left, None if a["is_causal"] else right)
    lengths, table = {}, a.get("block_table")
    if a["cum_seq_q"] is not None:
        lengths = {"cu_seqlens_q": a["cum_seq_q"], "max_seqlen_q": a["max_q"]}
        if table is None:
            lengths |= {"cu_seqlens_k": a["cum_seq_k"], "max_seqlen_k": a["max_k"]}
    return _features.of(
        window=window, seqused_k=a.get("seqused_k"), alibi_slopes=a.get("alibi_slopes"), block_table=table, **lengths
    )


_known_layouts = {}
_asking = threading.local()
"""Has `rule` while this thread asks PyTorch for the shapes of an operator's outputs."""


def _layouts(operator, a):
    """What the operator's own rule for shapes says of its outputs, which compiled code relies on.

    For each output (shape, strides, dtype), a number, or None.
    """
    if "cudnn_attention" in operator.name() and a["query"].dim() == 3:
        return _layouts_of_cudnn_varlen(a)
    form = (operator, *map(_form, a.values()))
    known = _known_layouts.get(form)
    if known is None:
        _asking.rule = True
        try:
            with FakeTensorMode():
                outputs = operator(**{name: _without_data(value) for name, value in a.items()})
        except NotImplementedError:
            raise Refused("this PyTorch has no rule for the shapes of the operator's outputs") from None
        finally:
            _asking.rule = False
        known = [(x.shape, x.stride(), x.dtype) if isinstance(x, torch.Tensor) else x for x in outputs]
        if len(_known_layouts) >= _LAYOUTS:
            _known_layouts.clear()
        _known_layouts[form] = known
    return known


def _layouts_of_cudnn_varlen(a):
    """As `varlen_attn` expects them, since PyTorch has no rule for these operators."""
    q, k, v = (torch.empty_like(a[name], device="meta") for name in ("query", "key", "value"))
    if "out" in a:
        return [(x.shape, x.stride(), x.dtype) for x in (q, k, v)]
    total, heads = q.shape[:2]
    lse, number = ((heads, total), (total, 1), torch.float32), ((), (), torch.int64)
    return [(q.shape, q.stride(), q.dtype), lse, None, None, a["max_q"], a["max_k"], number, number, ((0,), (1,), q.dtype)]


def _form(value):
    if isinstance(value, torch.Tensor):
        return value.shape, value.stride(), value.dtype
    return tuple(value) if isinstance(value, list) else value


def _without_data(value):
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)


def _made(layout, device):
    if not isinstance(layout, tuple):
        return layout
    shape, strides, dtype = layout
    return torch.empty_strided(shape, strides, dtype=dtype, device=device)


def _as_laid_out(lse, wanted):
    """The LSE in the layout of its output."""
    if lse.shape == wanted.shape and lse.stride() == wanted.stride():
        return lse
    if lse.numel() == wanted.numel() and wanted.is_contiguous():
        return lse.view(wanted.shape)
    if lse.shape == wanted.shape:
        return wanted.copy_(lse)
    # Rows behind the last query are padding.
    wanted.fill_(float("inf"))
    wanted[..., : lse.shape[-1]].copy_(lse)
    return wanted


def _write_seed(seed, outputs, operator):
    """The seed as the outputs that the backward operator gets: one pair, or two numbers."""
    names = [result.name for result in operator._schema.returns]
    first = names.index("rng_state" if "rng_state" in names else "philox_seed")
    if outputs[first].numel() == 2:
        outputs[first] = seed.view(outputs[first].dtype)
    else:
        for at, part in ((first, seed[0]), (first + 1, seed[1])):
            outputs[at] = part.clone().view(outputs[at].dtype)


def _seed(a):
    if not a["dropout_p"]:
        return None
    first, second = (a["rng_state"], a["unused"]) if "rng_state" in a else (a["philox_seed"], a["philox_offset"])
    if first.numel() == 2:
        return first.view(torch.int64)
    return torch.stack([first.view(torch.int64), second.view(torch.int64)])
