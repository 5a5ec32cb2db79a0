"""Attention on NumPy arrays, by the CPU backend: fp32, fp16, and bf16 as `ml_dtypes.bfloat16`."""

import numpy as np

from . import _call
from ._context import CPU, context
from ._errors import InvalidArgumentError

# What the library asks of a workspace's address; NumPy promises less.
_ALIGNMENT = 256


def attention(q, k, v, causal, softmax_scale, dropout_p, seed, deterministic, return_lse):
    """out or (out, lse). There are no gradients here that `deterministic` could be about; it is only checked."""
    _call.options(causal, softmax_scale, dropout_p, deterministic)
    out, lse = attention_forward(q, k, v, causal, softmax_scale, dropout_p, seed)
    return (out, lse) if return_lse else out


def attention_forward(q, k, v, causal, softmax_scale, dropout_p, seed):
    """(out, lse)"""
    opts = _call.options(causal, softmax_scale, dropout_p)
    number, (q, k, v) = _inputs(q=q, k=k, v=v)
    dims = _call.sizes(q.shape, k.shape, v.shape)
    batch_size, num_heads_q, _, seqlen_q, _, _, head_dim_v = dims
    out = np.empty((batch_size, seqlen_q, num_heads_q, head_dim_v), q.dtype)
    lse = np.empty((batch_size, num_heads_q, seqlen_q), np.float32)
    params = _call.forward(
        number, opts, dims, resolve_seed(seed, dropout_p), _ref(q), _ref(k), _ref(v), _ref(out), lse.ctypes.data
    )
    _launch(context(CPU).forward, params)
    return out, lse


def attention_backward(dout, q, k, v, out, lse, causal, softmax_scale, dropout_p, seed, deterministic):
    """(dq, dk, dv)"""
    opts = _call.options(causal, softmax_scale, dropout_p, deterministic)
    number, (q, k, v, out, dout) = _inputs(q=q, k=k, v=v, out=out, dout=dout)
    dims = _call.sizes(q.shape, k.shape, v.shape)
    batch_size, num_heads_q, _, seqlen_q, _, _, head_dim_v = dims
    _call.expect_shape("out", out.shape, (batch_size, seqlen_q, num_heads_q, head_dim_v))
    _call.expect_shape("dout", dout.shape, out.shape)
    _call.expect_shape("lse", np.shape(lse), (batch_size, num_heads_q, seqlen_q))
    lse = np.ascontiguousarray(lse, np.float32)
    dq, dk, dv = (np.empty(x.shape, x.dtype) for x in (q, k, v))
    params = _call.backward(
        number, opts, dims, resolve_seed(seed, dropout_p), _ref(q), _ref(k), _ref(v), _ref(out), lse.ctypes.data,
        _ref(dout), _ref(dq), _ref(dk), _ref(dv),
    )  # fmt: skip
    _launch(context(CPU).backward, params)
    return dq, dk, dv


def describe(q, k, v):
    """(device, dtype number, sizes, tensor refs of q, k, v) for the calls that read no data."""
    number, arrays = _inputs(q=q, k=k, v=v)
    return CPU, number, _call.sizes(*(x.shape for x in arrays)), [_ref(x) for x in arrays]


def resolve_seed(seed, dropout_p):
    if not dropout_p:
        return _call.NO_SEED
    if seed is None:
        # NumPy's global generator, so that numpy.random.seed reproduces a run.
        return (int(np.random.randint(0, 1 << 63, dtype=np.int64)), 0, 0, 0)
    pair = _call.integer_seed(int(seed) if isinstance(seed, np.integer) else seed)
    if pair is None:
        raise InvalidArgumentError(f"seed is {seed!r}; it must be an int or a pair of ints (seed, offset)")
    return (*pair, 0, 0)


def _inputs(**arrays):
    """The dtype's number, and the arrays in a form that strides can express, copied only where they are not."""
    dtype = arrays["q"].dtype
    for name, array in arrays.items():
        if not isinstance(array, np.ndarray):
            raise TypeError(f"{name} is a {type(array).__name__}; it must be a NumPy array, as q is")
        if array.dtype != dtype:
            raise InvalidArgumentError(f"{name} is {array.dtype}; it must be {dtype}, as q is")
    number = _call.DTYPES.get(dtype.name)
    if number is None or not dtype.isnative:
        raise InvalidArgumentError(f"q is {dtype}; it must be float16, float32 or ml_dtypes.bfloat16")
    return number, [x if _expressible(x) else np.ascontiguousarray(x) for x in arrays.values()]


def _expressible(array):
    """Whether the last dim is contiguous and every stride a nonnegative number of elements."""
    if array.ndim != 4:
        return True
    size = array.itemsize
    return (
        array.strides[3] == size
        and all(stride >= 0 and stride % size == 0 for stride in array.strides)
        and array.ctypes.data % size == 0
    )


def _ref(array):
    size = array.itemsize
    strides = array.strides
    if len(strides) != 4:
        return _call.NULL
    return (array.ctypes.data, strides[0] // size, strides[1] // size, strides[2] // size)


def _launch(run, params):
    size = run.workspace_bytes(params)
    if not size:
        run.launch(params, None, 0, None)
        return
    memory = np.empty(size + _ALIGNMENT, np.uint8)
    address = memory.ctypes.data
    run.launch(params, address + -address % _ALIGNMENT, size, None)
