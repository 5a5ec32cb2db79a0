"""Attention on NumPy arrays, by the CPU backend: fp32, fp16, and bf16 as `ml_dtypes.bfloat16`."""

import sys

import numpy as np

from . import _block_mask, _call, _dtypes, _eight, _features, _merge, _quantize
from ._context import CPU, context
from ._errors import InvalidArgumentError, shown


def attention(q, k, v, opts, seed, return_lse, features):
    """out or (out, lse). deterministic has no effect without gradients and is only checked."""
    out, lse = attention_forward(q, k, v, opts, seed, features)
    return (out, lse) if return_lse else out


def attention_forward(q, k, v, opts, seed, features, want_lse=True):
    """(out, lse). An lse that is not wanted costs nothing here and is returned too."""
    number, kv_number, (q, k, v) = _of_dtypes(q, k, v, features)
    dims = _features.sizes(features, q.shape, *_eight.key_shapes(k, v, features), _this, q)
    packed, _kept = _features.pack(features, opts, dims, q, k, _this)
    out_dtype = _out_dtype(q)
    out_number = _number("out", out_dtype) if out_dtype != q.dtype else 0
    eight, _scales = _eight.pack(features, number, kv_number, out_number, dims, k.shape, _this, q)
    pages, _table = _features.pack_pages(features, k, q, _this)
    key_starts, _starts = _features.pack_key_starts(features, k, q, _this)
    blocks, _lists = _block_mask.pack(features, dims, q, _this, backward=False)
    # Rows that no sequence uses are not written.
    has_unused = features is not None and (features.cu_seqlens_q is not None or features.seqused_q is not None)
    out = (np.zeros if has_unused else np.empty)((*q.shape[:-1], dims[-1]), out_dtype)
    lse_shape = _features.lse_shape(features, q.shape, dims)
    lse = np.full(lse_shape, -np.inf, np.float32) if has_unused else np.empty(lse_shape, np.float32)
    seed = resolve_seed(seed, opts[2])
    params = _call.forward(
        number, opts, dims, seed, _ref(q), _ref(k), _ref(v), _ref(out), lse.ctypes.data, packed, pages, blocks, key_starts,
        eight,
    )
    _launch(context(CPU).forward, params)
    return out, lse


def attention_backward(dout, q, k, v, out, lse, opts, seed, features, dlse, need_dbias):
    """(dq, dk, dv, dbias, dsinks); the last two are None without such an input."""
    number, (q, k, v, out, dout) = _inputs(q=q, k=k, v=v, out=out, dout=dout)
    dims = _features.sizes(features, q.shape, k.shape, v.shape, _this, q)
    shape = _features.lse_shape(features, q.shape, dims)
    _call.expect_shape("out", out.shape, (*q.shape[:-1], dims[-1]))
    _call.expect_shape("dout", dout.shape, out.shape)
    _call.expect_shape("lse", np.shape(lse), shape)
    lse = _like_lse("lse", lse)
    if dlse is not None:
        _call.expect_shape("dlse", np.shape(dlse), shape)
        dlse = _like_lse("dlse", dlse)
    packed, _kept = _features.pack(features, opts, dims, q, k, _this)
    blocks, _lists = _block_mask.pack(features, dims, q, _this, backward=True)
    has_lengths = features is not None and features.has_lengths()
    dq, dk, dv = ((np.zeros if has_lengths else np.empty)(x.shape, x.dtype) for x in (q, k, v))
    dbias = dsinks = None
    dbias_ref, dsinks_address = _features.NO_SCORES, 0
    if features is not None and features.bias is not None and need_dbias:
        dbias = np.zeros(features.bias.shape, np.float32)
        dbias_ref = _scores_ref(np.broadcast_to(dbias, (dims[0], dims[1], dims[3], dims[4])))
    if features is not None and features.sinks is not None:
        dsinks = np.zeros(dims[1], np.float32)
        dsinks_address = dsinks.ctypes.data
    dlse_address = 0 if dlse is None else dlse.ctypes.data
    packed = _features.with_gradients(
        packed, dbias_ref, dsinks_address, dlse_address, dbias is not None, dlse is not None
    )
    params = _call.backward(
        number, opts, dims, resolve_seed(seed, opts[2]), _ref(q), _ref(k), _ref(v), _ref(out), lse.ctypes.data,
        _ref(dout), _ref(dq), _ref(dk), _ref(dv), *packed, blocks,
    )  # fmt: skip
    _launch(context(CPU).backward, params)
    return dq, dk, dv, dbias, dsinks


def merge(outs, lses, dtype):
    """(out, lse)"""
    parts = (("outs", outs), ("lses", lses))
    outs, lses = (x if isinstance(x, np.ndarray) else np.stack(_merge.parts(name, x, _this)) for name, x in parts)
    dtype = outs.dtype if dtype is None else _dtype(dtype)
    sizes, lse_shape = _merge.shapes(outs.shape, lses.shape)
    outs, lses = _contiguous("outs", outs), _like_lse("lses", lses)
    numbers = _number("dtype", dtype), _number("outs", outs.dtype)
    out, lse = np.empty(outs.shape[1:], dtype), np.empty(lse_shape, np.float32)
    of_outs = (len(outs), outs.ctypes.data, outs.strides[0] // outs.itemsize, *_ref(outs[0])[1:]) if len(outs) else (0,) * 6
    of_lses = (lses.ctypes.data, lses.strides[0] // 4)
    context(CPU).merge(_merge.pack(*numbers, sizes, of_outs, of_lses, _ref(out), lse.ctypes.data), None)
    return out, lse


def quantize(x, dtype, descale, keys_per_descale, heads_per_descale, rotation_seed):
    """(numbers, scales)"""
    expect_array("x", x, "the others")
    dtype = _dtype(dtype)
    number = _eight.NUMBERS.get(dtype.name)
    if number is None:
        raise InvalidArgumentError(f"dtype is {dtype}; it must be one of {', '.join(_eight.NUMBERS)}")
    shape, full = _quantize.shape_of_scales(x.shape, keys_per_descale, heads_per_descale)
    of_x = _dtypes.sixteen_bits("x", _name(x.dtype), str)
    x = x if _expressible(x) else _contiguous("x", x)
    out, computes = np.empty(x.shape, dtype), descale is None
    if computes:
        # The library writes the scales of rows alone.
        descale = np.empty(shape, np.float32) if x.shape[1] else np.ones(shape, np.float32)
    descale, *_ = scales("descale", descale, x)
    if descale.ndim and descale.shape != shape:
        raise InvalidArgumentError(f"descale has shape {descale.shape}; it must be a number or {shape}")
    place = (descale.ctypes.data, full[1] * full[2], full[2], 1) if descale.ndim else (descale.ctypes.data, 0, 0, 0)
    params = _quantize.pack(
        of_x, number, x.shape, _ref(x), _ref(out), place, keys_per_descale, heads_per_descale, computes,
        rotation_seed,
    )  # fmt: skip
    context(CPU).quantize(params, None)
    return out, descale


def rotate(x, seed):
    expect_array("x", x, "the others")
    _quantize.expect_rows(x.shape)
    of_x = _dtypes.sixteen_bits("x", _name(x.dtype), str)
    x = x if _expressible(x) else _contiguous("x", x)
    out = np.empty(x.shape, x.dtype)
    context(CPU).quantize(_quantize.pack_rotation(of_x, x.shape, _ref(x), _ref(out), seed), None)
    return out


def describe(q, k, v, opts, features, backward):
    """The arguments of the calls that read no data.

    (device, dtype number, sizes, tensor refs of q, k and v, packed features, packed pages, packed
    block mask, packed starts of keys, packed types and scales of 8 bits)
    """
    number, kv_number, arrays = _of_dtypes(q, k, v, features, backward)
    dims = _features.sizes(features, arrays[0].shape, *_eight.key_shapes(*arrays[1:], features), _this, arrays[0])
    packed, _kept = _features.pack(features, opts, dims, *arrays[:2], _this)
    pages, _table = _features.pack_pages(features, arrays[1], arrays[0], _this)
    blocks, _lists = _block_mask.pack(features, dims, arrays[0], _this, backward)
    key_starts, _starts = _features.pack_key_starts(features, arrays[1], arrays[0], _this)
    out_dtype = _out_dtype(q)
    out_number = _number("out", out_dtype) if out_dtype != q.dtype else 0
    eight, _scales = _eight.pack(features, number, kv_number, out_number, dims, arrays[1].shape, _this, q)
    return CPU, number, dims, [_ref(x) for x in arrays], packed, pages, blocks, key_starts, eight


def resolve_seed(seed, dropout_p):
    if not dropout_p:
        return _call.NO_SEED
    if seed is None:
        # NumPy's global generator, so that numpy.random.seed reproduces a run.
        return (int(np.random.randint(0, 1 << 63, dtype=np.int64)), 0, 0, 0)
    pair = _call.integer_seed(seed)
    if pair is None:
        raise InvalidArgumentError(f"seed is {shown(seed)}; it must be an int or a pair of ints (seed, offset)")
    return (*pair, 0, 0)


def vector(name, array, kind, q):
    """(array, address) of a contiguous array of dtype `kind`."""
    expect_array(name, array)
    if array.dtype != np.dtype(kind):
        raise InvalidArgumentError(f"{name} is {array.dtype}; it must be {kind}")
    array = _contiguous(name, array)
    return array, array.ctypes.data


def scores(name, array, shape, q):
    """(array, ref), broadcast to one element a score; the bits of a row are not broadcast."""
    expect_array(name, array)
    dtypes = {"bias": (_out_dtype(q),), "mask": (np.dtype(bool), np.dtype(np.uint8)), "mask_bits": (np.dtype(np.uint8),)}
    if array.dtype not in dtypes[name]:
        raise InvalidArgumentError(f"{name} is {array.dtype}; it must be {' or '.join(map(str, dtypes[name]))}")
    if name == "mask_bits":
        if array.shape[-1:] != shape[-1:]:
            raise InvalidArgumentError(f"{name} has shape {array.shape}; it must broadcast to {shape} without broadcasting the last dim")
        if array.strides[-1] != 1:
            array = _contiguous(name, array)
    if any(stride < 0 or stride % array.itemsize for stride in array.strides) or array.ctypes.data % array.itemsize:
        array = _contiguous(name, array)
    try:
        return array, _scores_ref(np.broadcast_to(array, shape))
    except ValueError:
        raise InvalidArgumentError(f"{name} has shape {array.shape}; it must broadcast to {shape}") from None


def longest(name, cu_seqlens, q):
    """The length of the longest sequence."""
    return int(np.diff(vector(name, cu_seqlens, "int32", q)[0]).max(initial=0))


def expect_array(name, array, like="q"):
    if not isinstance(array, np.ndarray):
        raise TypeError(f"{name} is a {type(array).__name__}; it must be a NumPy array, as {like} is")
    _refuse_masked(name, array)


def _refuse_masked(name, array):
    if isinstance(array, np.ma.MaskedArray):
        raise TypeError(f"{name} is a masked array, whose mask would be lost; fill it and pass the argument mask")


def _contiguous(name, array):
    """The array, or a copy if it is not contiguous or not aligned to its element size."""
    _refuse_masked(name, array)
    array = np.ascontiguousarray(array)
    # ascontiguousarray returns a contiguous array as it is, even misaligned or with a negative
    # stride along a dim of size 1 or without elements. A copy has neither.
    return array.copy() if array.ctypes.data % array.itemsize or min(array.strides, default=0) < 0 else array


def _like_lse(name, array):
    """A contiguous array of fp32, as an lse is."""
    expect_array(name, array)
    if array.dtype != np.float32:
        raise InvalidArgumentError(f"{name} is {array.dtype}; it must be float32")
    return _contiguous(name, array)


def _scores_ref(array):
    return (array.ctypes.data, *(stride // array.itemsize for stride in array.strides))


def _inputs(**arrays):
    """The dtype's number and the arrays, by `_in_place`."""
    dtype = arrays["q"].dtype
    for name, array in arrays.items():
        expect_array(name, array)
        if array.dtype != dtype:
            raise InvalidArgumentError(f"{name} is {array.dtype}; it must be {dtype}, as q is")
    return _number("q", dtype), _in_place(arrays)


def _in_place(arrays):
    """The arrays of a dict of names; one that strides cannot express is copied."""
    return [x if _expressible(x) else _contiguous(name, x) for name, x in arrays.items()]


def _of_dtypes(q, k, v, features, backward=False):
    """(dtype number of q, that of k and v if only they have 8 bits or int4, else 0, the arrays)."""
    arrays = {"q": q, "k": k, "v": v}
    for name, array in arrays.items():
        expect_array(name, array)
    number, of_keys = _dtypes.numbers([_name(x.dtype) for x in arrays.values()], None if features is None else features.int4_group, str, backward)
    return number, of_keys, _in_place(arrays)


def _out_dtype(q):
    """The dtype of the output, and of bias."""
    if q.dtype.name not in _eight.NUMBERS:
        return q.dtype
    import ml_dtypes

    return np.dtype(getattr(ml_dtypes, _dtypes.of_out(q.dtype.name)))


def scales(name, given, q):
    """(what to keep, address, shape, strides in elements) of fp32 scales."""
    if not isinstance(given, np.ndarray):
        given = np.array(_call.scale(name, given, "float32 array"), np.float32)
    if given.dtype != np.float32:
        raise InvalidArgumentError(f"{name} is {given.dtype}; it must be float32")
    given = _contiguous(name, given).reshape(given.shape)
    return given, given.ctypes.data, given.shape, [stride // 4 for stride in given.strides]


def _dtype(given):
    try:
        return np.dtype(given)
    except (TypeError, ValueError):
        raise InvalidArgumentError(f"dtype is {given!r}; it must be a NumPy dtype, or one of ml_dtypes once that is imported") from None


def _name(dtype):
    """The dtype's name. Dtypes with swapped bytes have a different name, which has no number."""
    return dtype.name if dtype.isnative else str(dtype)


def _number(name, dtype):
    number = _call.DTYPES.get(_name(dtype))
    if number is None:
        raise InvalidArgumentError(f"{name} is {dtype}; it must be float16, float32 or ml_dtypes.bfloat16")
    return number


def _expressible(array):
    """Whether the last dim is contiguous and every stride is a nonnegative number of elements."""
    if array.ndim not in (3, 4):
        return True
    size = array.itemsize
    return (
        array.strides[-1] == size
        and all(stride >= 0 and stride % size == 0 for stride in array.strides)
        and array.ctypes.data % size == 0
    )


def _ref(array):
    """(address, stride_batch, stride_seqlen, stride_head); without a batch its stride is 0."""
    size = array.itemsize
    if array.ndim not in (3, 4):
        return _call.NULL
    *batch, seqlen, head, _ = (stride // size for stride in array.strides)
    return (array.ctypes.data, *(batch or (0,)), seqlen, head)


def _launch(run, params):
    size = run.workspace_bytes(params)
    if not size:
        run.launch(params, None, 0, None)
        return
    memory = np.empty(size + _call.WORKSPACE_ALIGNMENT, np.uint8)
    address = memory.ctypes.data
    run.launch(params, address + -address % _call.WORKSPACE_ALIGNMENT, size, None)


_this = sys.modules[__name__]
