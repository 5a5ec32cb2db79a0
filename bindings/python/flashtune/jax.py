"""Attention on JAX arrays, on the CPU and on NVIDIA GPUs, under `jit`, `grad` and `vmap`.

Each pass is one call through `jax.ffi`. The library itself exports the handlers, so nothing is
compiled. Importing this module registers them under the names flashtune_forward,
flashtune_backward and flashtune_quantize. A process that runs an exported program must import it
first.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from . import _attention as _public
from . import _block_mask, _call, _dtypes, _eight, _features, _jax_arrays, _jax_axes, _jax_eight, _structs
from ._context import CPU, context
from ._errors import FlashtuneError, InvalidArgumentError, UnsupportedError
from ._library import library

_OLDEST = (0, 7)
_BITS = {
    "alibi_slopes": _structs.FEATURE_ALIBI,
    "bias": _structs.FEATURE_BIAS,
    "mask": _structs.FEATURE_MASK,
    "sinks": _structs.FEATURE_SINKS,
    "cu_seqlens_q": _structs.FEATURE_CU_SEQLENS_Q,
    "cu_seqlens_k": _structs.FEATURE_CU_SEQLENS_K,
    "seqused_q": _structs.FEATURE_SEQUSED_Q,
    "seqused_k": _structs.FEATURE_SEQUSED_K,
    "block_table": _structs.FEATURE_PAGED,
    "mask_bits": _structs.FEATURE_MASK_BITS,
    "kv_num_blocks": _structs.FEATURE_BLOCK_MASK,
    "cache_batch_idx": _structs.FEATURE_CACHE_BATCH_IDX,
    "leftpad_k": _structs.FEATURE_LEFTPAD_K,
}
"""The feature bits by the first operand of each, in their order."""
_LISTS = {side: tuple(p + side + s for p in ("", "full_") for s in ("_num_blocks", "_indices")) for side in ("kv", "q")}
"""The lists of a block mask, which the forward pass reads by kv and the backward pass by q."""
_DESCALES = ("q_descale", "k_descale", "v_descale")
_ARRAYS = tuple(name for name in _BITS if name != "kv_num_blocks")
_ORDER = ("seed", *_ARRAYS[:-2], *_LISTS["kv"], *_LISTS["q"], *_ARRAYS[-2:], *_DESCALES)
"""The operands after q, k and v, in the order in which the handlers take them."""

_SCORES = ("window", "softcap", "alibi_slopes", "bias", "mask", "sinks", "mask_bits", *_DESCALES)
_VARLEN = (*_SCORES, *_features.LENGTHS, "max_seqlen_q", "max_seqlen_k")
_CACHES = ("block_table", "cache_batch_idx", "leftpad_k", "num_splits", "int4_group")


def attention(
    q, k, v, *, causal=False, softmax_scale=None, dropout_p=0.0, seed=None, deterministic=False, return_lse=False,
    batch_invariant=False, **features,
):  # fmt: skip
    """`flashtune.attention` on JAX arrays, with the same arguments.

    q is (batch, seqlen_q, heads_q, dim), k (batch, seqlen_k, heads_kv, dim) and v (batch, seqlen_k,
    heads_kv, dim_v); heads_q must be a multiple of heads_kv. The result is out, or (out, lse) with
    return_lse. q, k, v, bias and sinks get gradients. Numbers, strings and flags are static.

    seed: with dropout_p, a key of `jax.random`, a uint32 array of 2 or 4 elements (seed, offset),
        an int or a pair of ints. An array or key may be traced. There is no default.
    features: window, softcap, alibi_slopes, bias, mask, mask_bits, sinks, block_mask and the
        descales. A block mask has JAX or NumPy arrays, and its BLOCK_SIZE is static.
    """
    opts = _call.options(causal, softmax_scale, dropout_p, deterministic, batch_invariant)
    return _attention(q, k, v, opts, seed, return_lse, _taken(features, (*_SCORES, "block_mask")))


def attention_varlen(
    q, k, v, *, causal=False, softmax_scale=None, dropout_p=0.0, seed=None, deterministic=False, return_lse=False,
    batch_invariant=False, **features,
):  # fmt: skip
    """`flashtune.attention_varlen` on JAX arrays, with the same arguments.

    max_seqlen_q and max_seqlen_k are static. With cu_seqlens, None stands for the number of packed
    rows, because lengths may be traced; an upper bound that is closer runs faster.
    """
    opts = _call.options(causal, softmax_scale, dropout_p, deterministic, batch_invariant)
    return _attention(q, k, v, opts, seed, return_lse, _taken(features, _VARLEN))


def attention_kvcache(
    q, k_cache, v_cache, *, causal=False, softmax_scale=None, return_lse=False, batch_invariant=False, **features
):  # fmt: skip
    """`flashtune.attention_kvcache` on JAX arrays, with the same arguments, without a gradient.

    max_seqlen_q, max_seqlen_k, num_splits and int4_group are static. The lengths and tables may be
    traced.
    """
    opts = _call.options(causal, softmax_scale, 0.0, False, batch_invariant)
    allowed = tuple(name for name in _VARLEN if name != "cu_seqlens_k") + _CACHES
    return _attention(q, k_cache, v_cache, opts, None, return_lse, _taken(features, allowed))


def dot_product_attention(
    query, key, value, bias=None, mask=None, *, scale=None, is_causal=False, query_seq_lengths=None,
    key_value_seq_lengths=None, local_window_size=None,
):  # fmt: skip
    """`jax.nn.dot_product_attention` with its arguments and masks: both causal masks and windows
    begin at the top left. Messages about sizes call the arrays q, k, v, seqused_q and seqused_k.
    """
    arrays = [_jax_arrays.array(name, x) for name, x in (("query", query), ("key", key), ("value", value))]
    for name, x in zip(("query", "key", "value"), arrays):
        if x.ndim not in (3, 4) or x.ndim != arrays[0].ndim or x.dtype != arrays[0].dtype:
            expected = f"{arrays[0].dtype} of (batch, seqlen, heads, dim) or (seqlen, heads, dim), all three alike"
            raise InvalidArgumentError(f"{name} is {x.dtype} of shape {x.shape}; it must be {expected}")
    for name, x in (("query_seq_lengths", query_seq_lengths), ("key_value_seq_lengths", key_value_seq_lengths)):
        if x is not None:
            _jax_arrays.expect_array(name, x)
    has_batch = arrays[0].ndim != 3
    q, k, v = arrays if has_batch else (x[None] for x in arrays)
    window = local_window_size
    if isinstance(window, int):
        window = (window, window)
    if window is not None and is_causal:
        window = (window[0], 0)
    if bias is not None:
        bias = _jax_arrays.array("bias", bias)
        if jnp.issubdtype(bias.dtype, jnp.complexfloating):
            raise InvalidArgumentError(f"bias is {bias.dtype}; it must be real")
        bias = bias.astype(q.dtype)
    opts = _call.options("top-left" if _call.flag("is_causal", is_causal) else False, scale, 0.0)
    features = dict(window=window, bias=bias, mask=mask, seqused_q=query_seq_lengths, seqused_k=key_value_seq_lengths)
    out = _attention(q, k, v, opts, None, False, features, _structs.WINDOW_TOP_LEFT)
    return out if has_batch else out[0]


def attention_fp8(
    q, k, v, *, causal=False, softmax_scale=None, window=None, softcap=0.0, sinks=None, rotation_seed=None
):  # fmt: skip
    """`flashtune.attention_fp8` on JAX arrays, with the same arguments: an fp8 forward pass and a
    16-bit backward pass. All but the arrays are static.
    """
    if window is not None and not isinstance(window, int):
        window = tuple(window)
    passes = (_prepared, _forward, _backward)
    static = _jax_eight.Static(passes, _call.options(causal, softmax_scale, 0.0), window, softcap, rotation_seed)
    sinks = () if sinks is None else (_jax_arrays.array("sinks", sinks),)
    # They vary before the function with a gradient of its own, so that the gradient of a replicated
    # array is summed over the mesh.
    q, k, v, *sinks = _jax_axes.vary([*_jax_eight.checked(q, k, v), *sinks])
    return _jax_eight.attention_fp8(static, q, k, v, sinks[0] if sinks else None)


def quantize(x, dtype, *, descale=None, keys_per_descale=0, heads_per_descale=1, rotation_seed=None):
    """`flashtune.quantize` of a JAX array, with the same arguments, without a gradient.

    x and descale may be traced.
    """
    return _jax_eight.quantize(x, dtype, descale, keys_per_descale, heads_per_descale, rotation_seed)


def rotate(x, seed):
    """`flashtune.rotate` of a JAX array, without a gradient. seed is static."""
    return _jax_eight.rotate(x, seed)


def _taken(features, allowed):
    for name in features:
        if name not in allowed:
            raise TypeError(f"unexpected keyword argument {name!r}")
    return features


class _Problem(NamedTuple):
    """All that is static. It is hashable, so traces are shared."""

    attributes: tuple
    """Pairs (name, number) of a handler's attributes."""
    deterministic: int
    batch_invariant: int
    names: tuple
    """The operands after q, k and v."""
    out_dtype: str
    head_dim_v: int
    lse_shape: tuple
    return_lse: bool
    has_unused_q: bool
    """Some rows of q may belong to no sequence. Nothing writes their results."""
    has_unused_k: bool
    forward_only: Any
    """Why there is no backward pass, or None."""
    vmap_method: str


def _attention(q, k, v, opts, seed, return_lse, keywords, alignment=None):
    problem, arrays = _prepared(q, k, v, opts, seed, return_lse, keywords, alignment)
    return _apply(problem, *arrays)


def _prepared(q, k, v, opts, seed, return_lse, keywords, alignment=None):
    """(the problem, (q, k, v, the operands after them))"""
    q, k, v = (_jax_arrays.array(name, x) for name, x in (("q", q), ("k", k), ("v", v)))
    keywords = _jax_arrays.converted(keywords, _ARRAYS)
    for side, x in (("q", q), ("k", k)):
        if keywords.get(f"cu_seqlens_{side}") is not None and keywords.get(f"max_seqlen_{side}") is None and x.ndim:
            keywords[f"max_seqlen_{side}"] = x.shape[0]
    features = _features.of(**keywords) or _features.Features()
    numbers = _dtypes.numbers([x.dtype.name for x in (q, k, v)], features.int4_group, str)
    dims = _features.sizes(features, q.shape, *_eight.key_shapes(k, v, features), _jax_arrays, q)
    blocks, scales = _checked(opts, features, numbers, dims, q, k)
    arrays = {name: getattr(features, name) for name in _ARRAYS if getattr(features, name) is not None}
    arrays |= {name: _scales_of(x.reshape(shape), dims[0], scales) for name, (x, shape) in scales.arrays.items()}
    arrays |= blocks
    if np.float32(opts[2]):
        arrays["seed"] = _seed(seed)
    names = tuple(name for name in _ORDER if name in arrays)
    is_narrow = bool(scales.arrays or numbers[1])
    problem = _Problem(
        _attributes(opts, features, names, dims, alignment, scales.keys_per_descale), opts[3], opts[4], names,
        _dtypes.of_out(q.dtype.name), dims[-1], _features.lse_shape(features, q.shape, dims),
        _call.flag("return_lse", return_lse),
        0 in dims or features.cu_seqlens_q is not None or features.seqused_q is not None,
        0 in dims or features.cu_seqlens_k is not None or features.seqused_k is not None,
        f"k is {k.dtype}, which has no backward pass" if is_narrow else _public.forward_only(features),
        _vmap_method(arrays, dims[0]),
    )  # fmt: skip
    # Outside of `_apply`, so that the gradient of a replicated array is summed over the mesh.
    q, k, v, *extras = _jax_axes.vary([q, k, v, *(arrays[name] for name in names)])
    return problem, (q, k, v, tuple(extras))


def _checked(opts, features, numbers, dims, q, k):
    """(the lists of the block mask by name, the scales).

    The library's sentence is raised while the program is traced, not when it runs.
    """
    lib, out = _jax_arrays, _dtypes.of_out(q.dtype.name)
    packed, _ = _features.pack(features, opts, dims, q, k, lib)
    pages, _ = _features.pack_pages(features, k, q, lib)
    starts, _ = _features.pack_key_starts(features, k, q, lib)
    lists, _ = _block_mask.pack(features, dims, q, lib, backward=False)
    out_number = 0 if out == q.dtype.name else _call.DTYPES[out]
    eight, scales = _eight.pack(features, *numbers, out_number, dims, k.shape, lib, q)
    null = _call.NULL
    context(CPU).forward.supported(
        _call.forward(numbers[0], opts, dims, _call.NO_SEED, null, null, null, null, 0, packed, pages, lists, starts, eight)
    )  # fmt: skip
    mask, blocks = features.block_mask, {}
    if mask is not None:
        if mask.q_num_blocks is not None:
            _block_mask.pack(features, dims, q, lib, backward=True)
        blocks = {name: getattr(mask, name) for names in _LISTS.values() for name in names}
    return {name: x for name, x in blocks.items() if x is not None}, scales


def _scales_of(array, batch_size, scales):
    """Scales of whole sequences get a batch, so that `vmap` can add to it."""
    entries, rows, heads = array.shape
    is_shared = entries == 1 and rows == 1 and scales.keys_per_descale != 1
    return jnp.broadcast_to(array, (batch_size, rows, heads)) if is_shared else array


def _attributes(opts, features, names, dims, alignment, keys_per_descale):
    number, left, right = _structs.WINDOW_NONE, 0, 0
    if features.window is not None:
        is_top_left = opts[0] == _structs.CAUSAL_TOP_LEFT
        number = alignment or (_structs.WINDOW_TOP_LEFT if is_top_left else _structs.WINDOW_BOTTOM_RIGHT)
        left, right = features.window
    block_q, block_k = (0, 0) if features.block_mask is None else _block_mask.size_of(features.block_mask)
    return (
        ("causal", opts[0]), ("softmax_scale", np.float32(opts[1])), ("dropout_p", np.float32(opts[2])),
        ("features", sum(_BITS.get(name, 0) for name in names)), ("window", number), ("window_left", left),
        ("window_right", right), ("softcap", np.float32(features.softcap)), ("seqlen_q", dims[3]), ("seqlen_k", dims[4]),
        ("num_splits", features.num_splits), ("block_q", block_q), ("block_k", block_k),
        ("has_full_blocks", int("full_kv_num_blocks" in names)), ("keys_per_descale", keys_per_descale),
        ("int4_group", features.int4_group or 0),
    )  # fmt: skip


def _vmap_method(arrays, batch_size):
    """Whether the handlers can take a further dimension of all arrays as a part of the batch."""
    vectors = ("seqused_q", "seqused_k", "leftpad_k")
    with_batch = ("bias", "mask", "mask_bits", *_LISTS["kv"], *_LISTS["q"], *_DESCALES)
    has_batch = all(
        name in vectors or (name in with_batch and array.shape[0] == batch_size) for name, array in arrays.items()
    )
    return "broadcast_all" if has_batch else "sequential"


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _apply(problem, q, k, v, extras):
    results = _forward(problem, q, k, v, extras, problem.return_lse)
    return tuple(results) if problem.return_lse else results[0]


def _apply_forward(problem, q, k, v, extras):
    is_perturbed = {name: x.perturbed for name, x in zip(problem.names, extras)}
    if is_perturbed.get("alibi_slopes"):
        raise UnsupportedError("alibi_slopes has no gradient; pass jax.lax.stop_gradient(alibi_slopes)")
    if problem.forward_only is not None and any(x.perturbed for x in (q, k, v, *extras)):
        raise UnsupportedError(f"{problem.forward_only}; pass the result of jax.lax.stop_gradient for each array")
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
    results = [((*q.shape[:-1], problem.head_dim_v), problem.out_dtype, 0)]
    if want_lse:
        results.append((problem.lse_shape, np.float32, -np.inf))
    first = 0 if problem.has_unused_q else len(results)
    attributes = {**dict(problem.attributes), "batch_invariant": problem.batch_invariant}
    extras = _without(problem, extras, _LISTS["q"])
    return _run("flashtune_forward", problem, (q, k, v, *extras), results, first, attributes)


def _without(problem, extras, names):
    return [x for name, x in zip(problem.names, extras) if name not in names]


def _backward(problem, q, k, v, out, lse, dout, dlse, extras, want_dbias):
    """(dq, dk, dv, gradients of extras by name)"""
    arrays = dict(zip(problem.names, extras))
    if "kv_num_blocks" in arrays and "q_num_blocks" not in arrays:
        raise InvalidArgumentError("block_mask.q_num_blocks is None; the backward pass needs it")
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
    operands += _without(problem, extras, _LISTS["kv"])
    dq, dk, dv, *more = _run("flashtune_backward", problem, operands, results, first, attributes)
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


def _register():
    if jax.__version_info__ < _OLDEST:
        needed = ".".join(map(str, _OLDEST))
        raise UnsupportedError(f"this is jax {jax.__version__}; flashtune.jax needs jax {needed} or later")
    lib = library()
    for name in ("forward", "backward", "quantize"):
        try:
            handlers = [getattr(lib, f"flashtune_xla_{platform}_{name}") for platform in ("cpu", "cuda")]
        except AttributeError as error:
            raise FlashtuneError(f"the library is older than this package and has no handlers for XLA: {error}") from None
        cpu, cuda = map(jax.ffi.pycapsule, handlers)
        jax.ffi.register_ffi_target(f"flashtune_{name}", cpu, platform="cpu")
        jax.ffi.register_ffi_target(f"flashtune_{name}", {"initialize": cuda, "execute": cuda}, platform="CUDA")


_register()
