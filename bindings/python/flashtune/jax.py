"""Attention on JAX arrays, on the CPU and on NVIDIA GPUs, under `jit`, `grad` and `vmap`.

Each pass is one call through `jax.ffi`. The library itself exports the handlers, so nothing is
compiled. Importing this module registers them under the names flashtune_forward and
flashtune_backward; a process that runs an exported program must import it first.
"""

import functools
import sys
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from . import _call, _features, _jax_axes, _structs
from ._context import CPU, context
from ._errors import FlashtuneError, InvalidArgumentError, UnsupportedError
from ._library import library

_OLDEST = (0, 7)
_OPERANDS = {
    "alibi_slopes": _structs.FEATURE_ALIBI,
    "bias": _structs.FEATURE_BIAS,
    "mask": _structs.FEATURE_MASK,
    "sinks": _structs.FEATURE_SINKS,
    "cu_seqlens_q": _structs.FEATURE_CU_SEQLENS_Q,
    "cu_seqlens_k": _structs.FEATURE_CU_SEQLENS_K,
    "seqused_q": _structs.FEATURE_SEQUSED_Q,
    "seqused_k": _structs.FEATURE_SEQUSED_K,
}
"""The arrays of features in the order in which the handlers take them, by their bits."""


def attention(
    q, k, v, *, causal=False, softmax_scale=None, dropout_p=0.0, seed=None, deterministic=False, return_lse=False,
    window=None, softcap=0.0, alibi_slopes=None, bias=None, mask=None, sinks=None, batch_invariant=False,
    **unsupported,
):  # fmt: skip
    """`flashtune.attention` on JAX arrays, with the same arguments.

    q is (batch, seqlen_q, heads_q, dim), k (batch, seqlen_k, heads_kv, dim) and v (batch, seqlen_k,
    heads_kv, dim_v); heads_q must be a multiple of heads_kv. The result is out, or (out, lse) with
    return_lse. q, k, v, bias and sinks get gradients. Numbers, strings and flags are static.

    seed: with dropout_p, a key of `jax.random`, a uint32 array of 2 or 4 elements (seed, offset),
        an int or a pair of ints. An array or key may be traced. There is no default.
    mask_bits, block_mask and the arguments of caches are not supported.
    """
    _refuse(unsupported)
    return _attention(
        q, k, v, causal, softmax_scale, dropout_p, seed, deterministic, return_lse, batch_invariant, None,
        dict(window=window, softcap=softcap, alibi_slopes=alibi_slopes, bias=bias, mask=mask, sinks=sinks),
    )  # fmt: skip


def attention_varlen(
    q, k, v, *, cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None, seqused_k=None, max_seqlen_q=None, max_seqlen_k=None,
    causal=False, softmax_scale=None, dropout_p=0.0, seed=None, deterministic=False, return_lse=False,
    window=None, softcap=0.0, alibi_slopes=None, bias=None, mask=None, sinks=None, batch_invariant=False,
    **unsupported,
):  # fmt: skip
    """`flashtune.attention_varlen` on JAX arrays, with the same arguments.

    max_seqlen_q and max_seqlen_k are static. With cu_seqlens, None stands for the number of packed
    rows, because lengths may be traced; an upper bound that is closer runs faster.
    """
    _refuse(unsupported)
    return _attention(
        q, k, v, causal, softmax_scale, dropout_p, seed, deterministic, return_lse, batch_invariant, None,
        dict(
            window=window, softcap=softcap, alibi_slopes=alibi_slopes, bias=bias, mask=mask, sinks=sinks,
            cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, seqused_q=seqused_q, seqused_k=seqused_k,
            max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k,
        ),
    )  # fmt: skip


def dot_product_attention(
    query, key, value, bias=None, mask=None, *, scale=None, is_causal=False, query_seq_lengths=None,
    key_value_seq_lengths=None, local_window_size=None,
):  # fmt: skip
    """`jax.nn.dot_product_attention` with its arguments and masks: both causal masks and windows
    begin at the top left.
    """
    arrays = [_array(name, x) for name, x in (("query", query), ("key", key), ("value", value))]
    has_batch = arrays[0].ndim != 3
    q, k, v = arrays if has_batch else (x[None] for x in arrays)
    window = local_window_size
    if isinstance(window, int):
        window = (window, window)
    if window is not None and is_causal:
        window = (window[0], 0)
    if bias is not None:
        bias = _array("bias", bias)
        if jnp.issubdtype(bias.dtype, jnp.complexfloating):
            raise InvalidArgumentError(f"bias is {bias.dtype}; it must be real")
        bias = bias.astype(q.dtype)
    out = _attention(
        q, k, v, "top-left" if is_causal else False, scale, 0.0, None, False, False, False, _structs.WINDOW_TOP_LEFT,
        dict(window=window, bias=bias, mask=mask, seqused_q=query_seq_lengths, seqused_k=key_value_seq_lengths),
    )  # fmt: skip
    return out if has_batch else out[0]


class _Problem(NamedTuple):
    """All that is static. It is hashable, so traces are shared."""

    attributes: tuple
    """Pairs (name, number) of a handler's attributes."""
    deterministic: int
    batch_invariant: int
    names: tuple
    """The operands after q, k and v."""
    lse_shape: tuple
    return_lse: bool
    has_unused_q: bool
    """Some rows of q may belong to no sequence. Nothing writes their results."""
    has_unused_k: bool
    vmap_method: str


def _attention(
    q, k, v, causal, softmax_scale, dropout_p, seed, deterministic, return_lse, batch_invariant, alignment, keywords
):  # fmt: skip
    opts = _call.options(causal, softmax_scale, dropout_p, deterministic, batch_invariant)
    q, k, v = (_array(name, x) for name, x in (("q", q), ("k", k), ("v", v)))
    for name, x in (("k", k), ("v", v)):
        if x.dtype != q.dtype:
            raise InvalidArgumentError(f"{name} is {x.dtype}; it must be {q.dtype}, as q is")
    arrays = {name: _array(name, keywords[name]) for name in _OPERANDS if keywords.get(name) is not None}
    if "sinks" in arrays:
        if not jnp.issubdtype(arrays["sinks"].dtype, jnp.floating):
            raise InvalidArgumentError(f"sinks is {arrays['sinks'].dtype}; it must be a floating point dtype")
        arrays["sinks"] = arrays["sinks"].astype(jnp.float32)
    for name in ("bias", "mask"):
        if name in arrays:
            arrays[name] = arrays[name].reshape((1,) * (4 - arrays[name].ndim) + arrays[name].shape)
    for side, x in (("q", q), ("k", k)):
        if f"cu_seqlens_{side}" in arrays and keywords.get(f"max_seqlen_{side}") is None:
            keywords[f"max_seqlen_{side}"] = x.shape[0]
    features = _features.of(**{**keywords, **arrays})
    dims = _features.sizes(features, q.shape, k.shape, v.shape, _this, q)
    packed, _ = _features.pack(features, opts, dims, q, k, _this)
    _expect_supported(opts, dims, q, k, v, packed)
    if np.float32(opts[2]):
        arrays["seed"] = _seed(seed)

    batch_size, _, _, seqlen_q, seqlen_k, *_ = dims
    number, left, right = _structs.WINDOW_NONE, 0, 0
    if features is not None and features.window is not None:
        is_top_left = opts[0] == _structs.CAUSAL_TOP_LEFT
        number = alignment or (_structs.WINDOW_TOP_LEFT if is_top_left else _structs.WINDOW_BOTTOM_RIGHT)
        left, right = features.window
    names = tuple(name for name in ("seed", *_OPERANDS) if name in arrays)
    problem = _Problem(
        (
            ("causal", opts[0]), ("softmax_scale", np.float32(opts[1])), ("dropout_p", np.float32(opts[2])),
            ("features", sum(_OPERANDS.get(name, 0) for name in names)), ("window", number), ("window_left", left),
            ("window_right", right), ("softcap", np.float32(0 if features is None else features.softcap)),
            ("seqlen_q", seqlen_q), ("seqlen_k", seqlen_k),
        ),
        opts[3], opts[4], names, _features.lse_shape(features, q.shape, dims), bool(return_lse),
        0 in dims or "cu_seqlens_q" in arrays or "seqused_q" in arrays,
        0 in dims or "cu_seqlens_k" in arrays or "seqused_k" in arrays,
        _vmap_method(arrays, batch_size),
    )  # fmt: skip
    # Outside of `_apply`, so that the gradient of a replicated array is summed over the mesh.
    q, k, v, *extras = _jax_axes.vary([q, k, v, *(arrays[name] for name in names)])
    return _apply(problem, q, k, v, tuple(extras))


def _vmap_method(arrays, batch_size):
    """Whether the handlers can take a further dimension of all arrays as a part of the batch."""
    has_batch = all(
        name in ("seqused_q", "seqused_k") or (name in ("bias", "mask") and array.shape[0] == batch_size)
        for name, array in arrays.items()
    )
    return "broadcast_all" if has_batch else "sequential"


def _expect_supported(opts, dims, q, k, v, packed):
    """Raises the library's sentence while the program is traced, not when it runs."""
    number = _call.DTYPES.get(q.dtype.name)
    if number is None:
        raise InvalidArgumentError(f"q is {q.dtype}; it must be float16, bfloat16 or float32")
    null = _call.NULL
    context(CPU).forward.supported(
        _call.forward(number, opts, dims, _call.NO_SEED, null, null, null, null, 0, packed)
    )  # fmt: skip


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _apply(problem, q, k, v, extras):
    results = _forward(problem, q, k, v, extras, problem.return_lse)
    return tuple(results) if problem.return_lse else results[0]


def _apply_forward(problem, q, k, v, extras):
    is_perturbed = {name: x.perturbed for name, x in zip(problem.names, extras)}
    if is_perturbed.get("alibi_slopes"):
        raise UnsupportedError("alibi_slopes has no gradient; pass jax.lax.stop_gradient(alibi_slopes)")
    q, k, v = (x.value for x in (q, k, v))
    extras = tuple(x.value for x in extras)
    out, lse = _forward(problem, q, k, v, extras, want_lse=True)
    # The structure of the residuals is static, values are not. None: bias needs no gradient.
    want_dbias = () if is_perturbed.get("bias") else None
    return ((out, lse) if problem.return_lse else out), (q, k, v, out, lse, extras, want_dbias)


def _apply_backward(problem, residuals, gradients):
    q, k, v, out, lse, extras, want_dbias = residuals
    dout, dlse = gradients if problem.return_lse else (gradients, None)
    if isinstance(dout, jax.custom_derivatives.SymbolicZero):
        dout = jnp.zeros(out.shape, out.dtype)
    if isinstance(dlse, jax.custom_derivatives.SymbolicZero):
        dlse = None
    dq, dk, dv, more = _backward(problem, q, k, v, out, lse, dout, dlse, extras, want_dbias is not None)
    of_extras = (more.get(name) for name in problem.names)
    return dq, dk, dv, tuple(None if d is None else d.astype(x.dtype) for d, x in zip(of_extras, extras))


_apply.defvjp(_apply_forward, _apply_backward, symbolic_zeros=True)


def _forward(problem, q, k, v, extras, want_lse):
    results = [((*q.shape[:-1], v.shape[-1]), q.dtype, 0)]
    if want_lse:
        results.append((problem.lse_shape, np.float32, -np.inf))
    first = 0 if problem.has_unused_q else len(results)
    attributes = {**dict(problem.attributes), "batch_invariant": problem.batch_invariant}
    return _run("flashtune_forward", problem, (q, k, v, *extras), results, first, attributes)


def _backward(problem, q, k, v, out, lse, dout, dlse, extras, want_dbias):
    """(dq, dk, dv, gradients of extras by name)"""
    arrays = dict(zip(problem.names, extras))
    results = [(x.shape, x.dtype, 0) for x in (q, k, v)]
    attributes = {**dict(problem.attributes), "deterministic": problem.deterministic}
    names = []
    if "sinks" in arrays:
        names.append("sinks")
        results.append((arrays["sinks"].shape, np.float32, 0))
    first = len(results)
    if want_dbias:
        names.append("bias")
        results.append((arrays["bias"].shape, np.float32, 0))
        attributes["features"] += _structs.FEATURE_DBIAS
    if problem.has_unused_q or problem.has_unused_k:
        first = 0
    operands = [q, k, v, out, lse, dout]
    if dlse is not None:
        operands.append(dlse)
        attributes["features"] += _structs.FEATURE_DLSE
    dq, dk, dv, *more = _run("flashtune_backward", problem, (*operands, *extras), results, first, attributes)
    return dq, dk, dv, dict(zip(names, more))


def _run(target, problem, operands, results, first, attributes):
    """Calls a handler. Results are (shape, dtype, initial value); before `first` they need none."""
    initial = [jnp.full(shape, value, dtype) for shape, dtype, value in results[first:]]
    arrays = _jax_axes.vary([*operands, *initial])
    call = jax.ffi.ffi_call(
        target,
        [_jax_axes.result(shape, dtype, arrays[0]) for shape, dtype, _ in results],
        vmap_method=problem.vmap_method,
        input_output_aliases={len(operands) + index: first + index for index in range(len(initial))},
    )
    numbers = {name: np.int64(x) if isinstance(x, int) else x for name, x in attributes.items()}
    return call(*arrays, **numbers)


def _seed(seed):
    """uint32 (4): the halves of the seed and of the offset, low before high."""
    is_array = isinstance(seed, (jax.Array, np.ndarray))
    pair = None if seed is None or is_array else _call.integer_seed(seed)
    if pair is not None:
        return jnp.array([half for number in pair for half in (number & 0xFFFFFFFF, number >> 32)], jnp.uint32)
    if is_array and jnp.issubdtype(seed.dtype, jax.dtypes.prng_key):
        seed = jax.random.key_data(seed)
    if not is_array or seed.dtype != np.uint32 or seed.shape not in ((2,), (4,)):
        raise InvalidArgumentError(
            f"seed is {seed!r}; with dropout_p it must be a key of jax.random, uint32 of shape (2,) or (4,), an int or a pair of ints"
        )
    return jnp.pad(seed, (0, 4 - seed.shape[0]))


def _array(name, array):
    if not isinstance(array, (jax.Array, np.ndarray)):
        raise TypeError(f"{name} is a {type(array).__name__}; it must be a JAX or NumPy array")
    return jnp.asarray(array)


def _refuse(unsupported):
    for name in unsupported:
        if name in _features.Features._fields:
            raise UnsupportedError(f"{name} is given; flashtune.jax does not support it")
        raise TypeError(f"unexpected keyword argument {name!r}")


# What `_features` asks of an array library. The handlers fill in the addresses.


def expect_array(name, array):
    _array(name, array)


def vector(name, array, kind, q):
    if array.dtype != np.dtype(kind):
        raise InvalidArgumentError(f"{name} is {array.dtype}; it must be {kind}")
    return array, 0


def scores(name, array, shape, q):
    dtypes = (q.dtype,) if name == "bias" else (np.dtype(bool), np.dtype(np.uint8))
    if array.dtype not in dtypes:
        raise InvalidArgumentError(f"{name} is {array.dtype}; it must be {' or '.join(map(str, dtypes))}")
    if len(array.shape) != 4 or any(size not in (1, whole) for size, whole in zip(array.shape, shape)):
        raise InvalidArgumentError(f"{name} has shape {array.shape}; it must broadcast to {shape}")
    strides = [0] * 4
    for axis in (3, 2, 1, 0):
        strides[axis] = 0 if array.shape[axis] == 1 else int(np.prod(array.shape[axis + 1 :]))
    return array, (0, *strides)


def _register():
    if jax.__version_info__ < _OLDEST:
        needed = ".".join(map(str, _OLDEST))
        raise UnsupportedError(f"this is jax {jax.__version__}; flashtune.jax needs jax {needed} or later")
    lib = library()
    for name in ("forward", "backward"):
        try:
            handlers = [getattr(lib, f"flashtune_xla_{platform}_{name}") for platform in ("cpu", "cuda")]
        except AttributeError as error:
            raise FlashtuneError(f"the library is older than this package and has no handlers for XLA: {error}") from None
        cpu, cuda = map(jax.ffi.pycapsule, handlers)
        jax.ffi.register_ffi_target(f"flashtune_{name}", cpu, platform="cpu")
        jax.ffi.register_ffi_target(f"flashtune_{name}", {"initialize": cuda, "execute": cuda}, platform="CUDA")


_this = sys.modules[__name__]
_register()
