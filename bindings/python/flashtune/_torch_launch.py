"""Launches on torch tensors.

Outputs and workspace come from torch's allocator on the current stream. The library gets addresses.
"""

import sys

import torch

from . import _block_mask, _call, _dtypes, _eight, _features, _merge, _torch_drafts
from ._context import CPU, context
from ._errors import InvalidArgumentError, UnsupportedError
from ._torch_drafts import BACKWARD, DK, DLSE, DOUT, DQ, DV, FORWARD, K, LSE, OUT, Q, V, current_stream

_NUMBERS = {getattr(torch, name): number for name, number in _call.DTYPES.items()}
EIGHT = {getattr(torch, name): number for name, number in _eight.NUMBERS.items() if hasattr(torch, name)}
_FLOAT32 = torch.float32


def launch_forward(q, k, v, opts, seed, features=None, want_lse=True, before_launch=None, out=None):
    """(out, lse or None). `seed` is `resolve_seed`'s; `before_launch` runs after the last check.

    out: a tensor to write to, of q's dtype and device, of the result's shape and with a contiguous
    last dim. None: a new one.
    """
    repeated = repeat_forward(q, k, v, opts, seed, features, want_lse, before_launch, out)
    return repeated or _launch_first_forward(q, k, v, opts, seed, features, want_lse, before_launch, out)


def repeat_forward(q, k, v, opts, seed, features, want_lse, before_launch=None, out=None):
    """`launch_forward` if an earlier call was of the same form.

    None otherwise, and then nothing is launched.
    """
    return _torch_drafts.repeat(FORWARD, before_launch, seed, q, k, v, out, opts, features, want_lse)


def _launch_first_forward(q, k, v, opts, seed, features, want_lse, before_launch, out):
    """`launch_forward` with all checks. A draft is left for the form."""
    call = FORWARD, None, seed, q, k, v, out, opts, features, want_lse
    words, outputs = [Q, K, V], []
    device, number, kv_number = _of_dtypes(q, k, v, features)
    q, k, v = expressible(q), expressible(k), expressible(v)
    dims = _features.sizes(features, q.shape, *_eight.key_shapes(k, v, features), _this, q)
    packed, _kept = _features.pack(features, opts, dims, q, k, _this)
    pages, _table = _features.pack_pages(features, k, q, _this)
    key_starts, _starts = _features.pack_key_starts(features, k, q, _this)
    blocks, _lists = _block_mask.pack(features, dims, q, _this, backward=False)
    has_unused = features is not None and features.seqused_q is not None
    out_dtype = _out_dtype(q, out)
    out_number = _number("out", out_dtype) if number in EIGHT.values() else 0
    eight, _scales = _eight.pack(features, number, kv_number, out_number, dims, k.shape, _this, q)
    if out is None:
        out = _output(q, (*q.shape[:-1], dims[-1]), has_unused, out_dtype)
        outputs.append((OUT, _torch_drafts.made(out, q, 0)))
    else:
        words.append(OUT)
        outputs.append(words.index(OUT))
    lse = None
    if want_lse:
        shape = _features.lse_shape(features, q.shape, dims)
        lse = q.new_full(shape, -torch.inf, dtype=_FLOAT32) if has_unused else q.new_empty(shape, dtype=_FLOAT32)
    params = _call.forward(
        number, opts, dims, _seed_fields(seed), ref(q), ref(k), ref(v), ref(out), lse.data_ptr() if want_lse else 0,
        packed, pages, blocks, key_starts, eight,
    )  # fmt: skip
    run = context(device).forward
    if before_launch is not None:
        run.supported(params)
        before_launch()
    size = run.workspace_bytes(params)
    _launch(run, params, size, q, device)
    outputs.append((LSE, _torch_drafts.made(lse)) if want_lse else None)
    if not is_quantised(k):  # Its scales may be tensors of this call alone.
        _torch_drafts.keep(call, run, params, words, features, outputs, size, device)
    return out, lse


def launch_backward(dout, q, k, v, out, lse, opts, seed, features=None, gradients=None, dlse=None, need_dbias=True):
    """(dq, dk, dv, dbias, dsinks). The first three are written into `gradients` if it is given."""
    call = BACKWARD, None, seed, q, k, v, out, lse, dout, dlse, gradients, opts, features
    repeated = _torch_drafts.repeat(*call)
    if repeated is not None:
        return repeated
    words = [Q, K, V, OUT, LSE, DOUT]
    device, number = _check_same(q, q.dtype, k=k, v=v, out=out, dout=dout)
    q, k, v, out, dout = expressible(q), expressible(k), expressible(v), expressible(out), expressible(dout)
    dims = _features.sizes(features, q.shape, k.shape, v.shape, _this, q)
    shape = _features.lse_shape(features, q.shape, dims)
    _call.expect_shape("out", out.shape, (*q.shape[:-1], dims[-1]))
    _call.expect_shape("dout", dout.shape, (*q.shape[:-1], dims[-1]))
    lse = _like_lse("lse", lse, shape, q)
    if dlse is not None:
        words.append(DLSE)
        dlse = _like_lse("dlse", dlse, shape, q)
    packed, _kept = _features.pack(features, opts, dims, q, k, _this)
    used_q, used_k = (None, None) if features is None else (features.seqused_q, features.seqused_k)
    has_unused = [used is not None for used in (used_q, used_k, used_k)]
    if gradients is None:
        gradients = [_output(x, x.shape, unused) for x, unused in zip((q, k, v), has_unused)]
        alike = zip((DQ, DK, DV), gradients, (q, k, v), range(3))
        outputs = [(word, _torch_drafts.made(gradient, like, at)) for word, gradient, like, at in alike]
    else:
        outputs = [len(words) + at for at in range(3)]
        words += [DQ, DK, DV]
        gradients = [into.zero_() if unused else into for into, unused in zip(gradients, has_unused)]
    dq, dk, dv = gradients
    dbias = dsinks = None
    more = ()
    blocks, _lists = _block_mask.pack(features, dims, q, _this, backward=True)
    if features is not None or dlse is not None:
        dbias, dsinks, more = _feature_gradients(packed, features, dims, q, dlse, need_dbias)
    params = _call.backward(
        number, opts, dims, _seed_fields(seed), ref(q), ref(k), ref(v), ref(out), lse.data_ptr(),
        ref(dout), ref(dq), ref(dk), ref(dv), *more, blocks=blocks,
    )  # fmt: skip
    run = context(device).backward
    size = run.workspace_bytes(params)
    _launch(run, params, size, q, device)
    _torch_drafts.keep(call, run, params, words, features, [*outputs, None, None], size, device)
    return dq, dk, dv, dbias, dsinks


def _output(like, shape, has_unused_rows, dtype=None):
    """An output tensor. Rows that a sequence does not use hold 0, since no kernel writes them.

    Rows behind the last sequence of a packed batch hold anything, as in flash-attn. Filling all
    rows because of them would cost up to a tenth of the call.
    """
    return like.new_zeros(shape, dtype=dtype) if has_unused_rows else like.new_empty(shape, dtype=dtype)


def _like_lse(name, tensor, shape, q):
    expect_array(name, tensor)
    refuse_layout(name, tensor)
    _call.expect_shape(name, tensor.shape, shape)
    if tensor.dtype != _FLOAT32 or tensor.device != q.device:
        raise InvalidArgumentError(f"{name} is {tensor.dtype} on {tensor.device}; it must be torch.float32 on {q.device}")
    return tensor.contiguous()


def _feature_gradients(packed, features, dims, q, dlse, need_dbias):
    """(dbias, dsinks, the two parts of the params that describe features)"""
    dbias = dsinks = None
    dbias_ref = _features.NO_SCORES
    if features is not None and features.bias is not None and need_dbias:
        dbias = q.new_zeros(features.bias.shape, dtype=_FLOAT32)
        batch_size, num_heads_q, _, seqlen_q, seqlen_k, *_ = dims
        dbias_ref = _scores_ref(dbias.expand(batch_size, num_heads_q, seqlen_q, seqlen_k))
    if features is not None and features.sinks is not None:
        dsinks = q.new_zeros(features.sinks.shape, dtype=_FLOAT32)
    addresses = [0 if tensor is None else tensor.data_ptr() for tensor in (dsinks, dlse)]
    more = _features.with_gradients(packed, dbias_ref, *addresses, dbias is not None, dlse is not None)
    return dbias, dsinks, more


def merge(outs, lses, dtype):
    """(out, lse) without autograd."""
    with torch.no_grad():
        parts = (("outs", outs), ("lses", lses))
        outs, lses = (x if isinstance(x, torch.Tensor) else torch.stack(_merge.parts(name, x, _this)) for name, x in parts)
        dtype = outs.dtype if dtype is None else dtype
        sizes, lse_shape = _merge.shapes(outs.shape, lses.shape)
        device, partial_number = place("outs", outs)
        number = _number("dtype", dtype)
        lses = _like_lse("lses", lses, lses.shape, outs)
        outs = outs if outs.stride(-1) == 1 else outs.contiguous()
        out, lse = outs.new_empty(outs.shape[1:], dtype=dtype), outs.new_empty(lse_shape, dtype=_FLOAT32)
        strides = outs.stride()[1:-1] if outs.dim() == 5 else (0, *outs.stride()[1:-1])
        of_outs = (len(outs), outs.data_ptr(), outs.stride(0), *strides)
        of_lses = (lses.data_ptr(), lses.stride(0))
        params = _merge.pack(number, partial_number, sizes, of_outs, of_lses, ref(out), lse.data_ptr())
        context(device).merge(params, None if device == CPU else current_stream(device))
    return out, lse


def kv_append(k_cache, v_cache, k, v, seqlens, block_table, seqused, slots=None, rotary=None, eight=None):
    """Writes k and v behind each sequence's seqlens keys, and the new number of keys into seqused.

    `_kvcache` has checked shapes, dtypes and devices. Lengths and tables may hold anything.

    slots: (seqused_new or None, cache_batch_idx or None). With slots, seqused may be seqlens.
    rotary: (cos, sin, interleaved, q, q_rotated, whether all queries have one position).
    eight: for caches of 8 bits and int4 (number of the cache's dtype, whether scales are computed,
        scales of k and of v, whether each key has one). int4 has no scales beside the cache.
    """
    device, number = place("k", k)
    # The kernel must not read a tensor that it writes.
    written = {x.untyped_storage().data_ptr() for x in (k_cache, v_cache)}
    k, v = (x.clone() if x.untyped_storage().data_ptr() in written else expressible(x) for x in (k, v))
    seqlens = seqlens.contiguous()
    batch_size, seqlen_new, num_heads_kv, head_dim = k.shape
    seqlen_cache, pages = k_cache.shape[1], _call.NULL
    if block_table is not None:
        block_table = block_table.contiguous()
        num_pages, page_size = k_cache.shape[:2]
        pages = (block_table.data_ptr(), block_table.shape[1], page_size, num_pages)
        seqlen_cache = block_table.shape[1] * page_size
    dims = (batch_size, num_heads_kv, seqlen_new, seqlen_cache, head_dim, v.shape[-1])
    tensors = (ref(k), ref(v), ref(k_cache), ref(v_cache))
    more = {}
    if slots is not None:
        slots = [None if x is None else x.contiguous() for x in slots]
        entries = 0 if slots[1] is None else len(k_cache)
        more["slots"] = _call.kv_slots(*(0 if x is None else x.data_ptr() for x in slots), entries)
    if rotary is not None:
        cos, sin, interleaved, q, q_rotated, at_one_position = rotary
        if cos.stride() != sin.stride() or cos.stride(1) != 1:
            cos, sin = cos.contiguous(), sin.contiguous()
        q, q_rotated = expressible(q), q_rotated
        more["rotary"] = _call.kv_rotary(
            2 * cos.shape[1], _number("rotary_cos", cos.dtype), interleaved, at_one_position, cos.data_ptr(), sin.data_ptr(),
            cos.stride(0), len(cos), q.shape[1:3], ref(q), ref(q_rotated),
        )  # fmt: skip
    if eight is not None:
        number_of_cache, computes, k_descale, v_descale, of_keys = eight
        refs = [_call.NULL if scales is None else scales_ref(scales, of_keys) for scales in (k_descale, v_descale)]
        more["eight"] = _call.kv_eight(number_of_cache, computes, *refs, of_keys)
    params = _call.kv_append(number, dims, *tensors, seqlens.data_ptr(), seqused.data_ptr(), pages, **more)
    context(device).kv_append(params, None if device == CPU else current_stream(device))
    # Autograd counts this as an operation in place: a cache saved for a backward pass now has
    # other keys.
    for cache in (k_cache, v_cache):
        if not cache.is_inference():
            torch.autograd.graph.increment_version(cache)


def scales_ref(scales, has_rows):
    """The ref of scales (entries, rows, heads), of (batch, heads), or of one number. Dims of size 1
    are shared."""
    strides = [0 if size == 1 else stride for size, stride in zip(scales.shape, scales.stride())]
    if len(strides) < 2 or scales.numel() == 1:
        return (scales.data_ptr(), 0, 0, 0)
    return (scales.data_ptr(), *strides) if has_rows else (scales.data_ptr(), strides[0], 0, strides[-1])


def describe(q, k, v, opts, features, backward):
    """The arguments of calls that read no data.

    (device, dtype number, sizes, refs of q, k and v, packed features, pages, block mask, starts
    of keys, and types and scales of 8 bits)
    """
    for name, tensor in (("k", k), ("v", v)):
        expect_array(name, tensor)
    device, number, kv_number = _of_dtypes(q, k, v, features, backward)
    tensors = [expressible(x) for x in (q, k, v)]
    dims = _features.sizes(features, tensors[0].shape, *_eight.key_shapes(*tensors[1:], features), _this, q)
    packed, _kept = _features.pack(features, opts, dims, *tensors[:2], _this)
    pages, _table = _features.pack_pages(features, tensors[1], tensors[0], _this)
    blocks, _lists = _block_mask.pack(features, dims, tensors[0], _this, backward)
    key_starts, _starts = _features.pack_key_starts(features, tensors[1], tensors[0], _this)
    out_number = _number("out", _out_dtype(q, None)) if number in EIGHT.values() else 0
    eight, _scales = _eight.pack(features, number, kv_number, out_number, dims, tensors[1].shape, _this, q)
    return device, number, dims, [ref(x) for x in tensors], packed, pages, blocks, key_starts, eight


def vector(name, tensor, kind, q):
    """(the tensor, its address): contiguous, of the dtype `kind`, on q's device."""
    expect_array(name, tensor)
    refuse_layout(name, tensor)
    if tensor.dtype != getattr(torch, kind) or tensor.device != q.device:
        raise InvalidArgumentError(f"{name} is {tensor.dtype} on {tensor.device}; it must be torch.{kind} on {q.device}")
    tensor = tensor.contiguous()
    return tensor, tensor.data_ptr()


def scores(name, tensor, shape, q):
    """(the tensor, its ref), broadcast to one element a score. Bits of a row are not broadcast."""
    expect_array(name, tensor)
    refuse_layout(name, tensor)
    allowed = {"bias": (_out_dtype(q, None),), "mask": (torch.bool, torch.uint8), "mask_bits": (torch.uint8,)}[name]
    if tensor.dtype not in allowed or tensor.device != q.device:
        expected = " or ".join(map(str, allowed))
        raise InvalidArgumentError(f"{name} is {tensor.dtype} on {tensor.device}; it must be {expected} on {q.device}")
    if name == "mask_bits":
        if tensor.shape[-1:] != shape[-1:]:
            found = tuple(tensor.shape)
            raise InvalidArgumentError(f"{name} has shape {found}; it must broadcast to {shape} without broadcasting the last dim")
        tensor = tensor if tensor.stride(-1) == 1 else tensor.contiguous()
    try:
        return tensor, _scores_ref(tensor.expand(shape))
    except RuntimeError:
        raise InvalidArgumentError(f"{name} has shape {tuple(tensor.shape)}; it must broadcast to {shape}") from None


def longest(name, cu_seqlens, q):
    """The length of the longest sequence, if the host can read it."""
    if cu_seqlens.device.type != "cpu":
        side = name[-1]
        raise InvalidArgumentError(f"max_seqlen_{side} is None; with {name} on {cu_seqlens.device} it must be given")
    lengths = vector(name, cu_seqlens, "int32", q)[0].diff()
    return int(lengths.max()) if lengths.numel() else 0


def _scores_ref(tensor):
    return (tensor.data_ptr(), *tensor.stride())


def _seed_fields(seed):
    if seed is None:
        return _call.NO_SEED
    if isinstance(seed, torch.Tensor):
        address = seed.data_ptr()
        return (0, 0, address, address + 8)
    return (*seed, 0, 0)


def expect_array(name, tensor, like="q"):
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} is a {type(tensor).__name__}; it must be a torch tensor, as {like} is")


def _check_same(q, dtype, **others):
    """(device, dtype number) of q, after a check that all others have the same."""
    device = q.device
    refuse_layout("q", q)
    for name, tensor in others.items():
        refuse_layout(name, tensor)
        if tensor.dtype != dtype or tensor.device != device:
            expected = f"{dtype} on {device}, as q is"
            raise InvalidArgumentError(f"{name} is {tensor.dtype} on {tensor.device}; it must be {expected}")
    return place("q", q)


def _of_dtypes(q, k, v, features, backward=False):
    """(device, dtype number of q, dtype number of k and v if they have 8 bits or int4, else 0)."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        refuse_layout(name, tensor)
        if tensor.device != q.device:
            raise InvalidArgumentError(f"{name} is {tensor.dtype} on {tensor.device}; it must be on {q.device}, as q is")
    group = None if features is None else features.int4_group
    return device_of("q", q), *_dtypes.numbers([_name(x.dtype) for x in (q, k, v)], group, "torch.{}".format, backward)


def _name(dtype):
    return str(dtype).removeprefix("torch.")


def sixteen_bits(name, tensor):
    """(device, dtype number) of a tensor that is quantised or rotated."""
    refuse_layout(name, tensor)
    return device_of(name, tensor), _dtypes.sixteen_bits(name, _name(tensor.dtype), "torch.{}".format)


def refuse_layout(name, tensor):
    """Refuses sparse and jagged tensors, which have no strides."""
    if tensor.layout is not torch.strided:
        raise InvalidArgumentError(f"{name} has the layout {tensor.layout}; it must be torch.strided")


def is_eight(tensor):
    """Whether a tensor has 8 bits."""
    return tensor.dtype in EIGHT


def is_quantised(tensor):
    """Whether a tensor has 8 bits or int4 rows."""
    return tensor.dtype in EIGHT or tensor.dtype is torch.uint8


def _out_dtype(q, out):
    """The dtype of the output: q's, but where q has 8 bits that of `out`, or bfloat16."""
    if q.dtype not in EIGHT:
        return q.dtype
    return torch.bfloat16 if out is None else out.dtype


def scales(name, given, q):
    """(what to keep, address, shape, strides) of fp32 scales on q's device."""
    if not isinstance(given, torch.Tensor):
        given = torch.full((), _call.scale(name, given, "fp32 tensor"), dtype=_FLOAT32, device=q.device)
    refuse_layout(name, given)
    if given.dtype is not _FLOAT32 or given.device != q.device:
        raise InvalidArgumentError(f"{name} is {given.dtype} on {given.device}; it must be torch.float32 on {q.device}")
    return given, given.data_ptr(), given.shape, given.stride()


def place(name, tensor):
    """(device, dtype number) of a tensor."""
    refuse_layout(name, tensor)
    number = _number(name, tensor.dtype)
    return device_of(name, tensor), number


def device_of(name, tensor):
    """The number of a tensor's device."""
    device = tensor.device
    if device.type == "cuda":
        return device.index
    if device.type == "cpu":
        return CPU
    raise UnsupportedError(f"{name} is on {device}; flashtune runs on cuda and cpu tensors")


def _number(name, dtype):
    number = _NUMBERS.get(dtype) if isinstance(dtype, torch.dtype) else None
    if number is None:
        raise InvalidArgumentError(f"{name} is {dtype}; it must be torch.float16, torch.bfloat16 or torch.float32")
    return number


def expressible(tensor):
    """The tensor, or a copy if its last dim is not contiguous."""
    return tensor if tensor.dim() not in (3, 4) or tensor.stride(-1) == 1 else tensor.contiguous()


def ref(tensor):
    """(address, stride_batch, stride_seqlen, stride_head). A packed tensor's batch stride is 0."""
    strides = tensor.stride()
    if len(strides) == 3:
        return (tensor.data_ptr(), 0, strides[0], strides[1])
    return (tensor.data_ptr(), *strides[:3])


def _launch(run, params, size, q, device):
    """Launches with a workspace of `size` bytes."""
    stream = None if device == CPU else current_stream(device)
    if not size:
        return run.launch(params, None, 0, stream)
    memory = q.new_empty(size + _call.WORKSPACE_ALIGNMENT if device == CPU else size, dtype=torch.uint8)
    address = memory.data_ptr()
    return run.launch(params, address + -address % _call.WORKSPACE_ALIGNMENT, size, stream)


_this = sys.modules[__name__]
