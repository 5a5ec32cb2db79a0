"""Quantising and rotating JAX arrays, and attention with an fp8 forward pass.

The handler flashtune_quantize does what `flashtune.quantize` and `flashtune.rotate` do. The forward
pass of `attention_fp8` reads e4m3 copies of q, k and v, and its backward pass the arrays
themselves, with out and lse of the forward pass.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from . import _call, _dtypes, _eight, _jax_arrays, _jax_axes, _quantize, _structs
from ._errors import InvalidArgumentError


def quantize(x, dtype, descale, keys_per_descale, heads_per_descale, rotation_seed):
    """(numbers, scales)"""
    x, dtype = jax.lax.stop_gradient(_jax_arrays.array("x", x)), jnp.dtype(dtype)
    if dtype.name not in _eight.NUMBERS:
        raise InvalidArgumentError(f"dtype is {dtype}; it must be one of {', '.join(_eight.NUMBERS)}")
    shape, full = _quantize.shape_of_scales(x.shape, keys_per_descale, heads_per_descale)
    given, results = [], [(x.shape, dtype)]
    if descale is None:
        results.append((full, jnp.float32))
    else:
        descale = jax.lax.stop_gradient(_jax_arrays.scales("descale", descale, x)[0])
        if descale.ndim and descale.shape != shape:
            raise InvalidArgumentError(f"descale has shape {descale.shape}; it must be a number or {shape}")
        given.append(jnp.broadcast_to(descale.reshape(full) if descale.ndim else descale, full))
    attributes = dict(keys_per_descale=keys_per_descale, heads_per_descale=heads_per_descale, **_rotation(rotation_seed))
    _dtypes.sixteen_bits("x", x.dtype.name, str)
    if 0 in x.shape:
        # The library writes the scales of rows alone.
        return jnp.zeros(x.shape, dtype), jnp.ones(shape, jnp.float32) if descale is None else descale
    numbers, *made = _run([x, *given], results, attributes)
    return numbers, made[0].reshape(shape) if made else descale


def rotate(x, seed):
    x = jax.lax.stop_gradient(_jax_arrays.array("x", x))
    _quantize.expect_rows(x.shape)
    _dtypes.sixteen_bits("x", x.dtype.name, str)
    return x if 0 in x.shape else _run([x], [(x.shape, x.dtype)], _rotation(seed, "seed"))[0]


def _rotation(seed, name="rotation_seed"):
    kind, _, number = _quantize.rotation(seed, name)
    # XLA has no attributes of 64 bits without a sign.
    return dict(rotation=kind, rotation_seed=number - (number >> 63 << 64))


def _run(operands, results, attributes):
    arrays = _jax_axes.vary(operands)
    results = [_jax_axes.result(shape, dtype, arrays[0]) for shape, dtype in results]
    call = jax.ffi.ffi_call("flashtune_quantize", results, vmap_method="broadcast_all")
    return call(*arrays, **{name: np.int64(number) for name, number in attributes.items()})


class Static(NamedTuple):
    """The static part of a call of `attention_fp8`. It is hashable."""

    passes: Any
    """(prepared, forward, backward) of `flashtune.jax`."""
    opts: tuple
    window: Any
    softcap: float
    rotation_seed: Any


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def attention_fp8(static, q, k, v, sinks):
    return _forward(static, q, k, v, sinks)[0]


def _features(static, sinks, **more):
    return dict(window=static.window, softcap=static.softcap, sinks=sinks, **more)


def _forward(static, q, k, v, sinks):
    prepared, forward, _ = static.passes
    seed = static.rotation_seed
    inputs = {"q": (q, q.shape[2] // k.shape[2], seed), "k": (k, 1, seed), "v": (v, 1, None)}
    quantized = {name: quantize(x, "float8_e4m3fn", None, 0, heads, seed) for name, (x, heads, seed) in inputs.items()}
    scales = {f"{name}_descale": scales for name, (_, scales) in quantized.items()}
    numbers = [numbers for numbers, _ in quantized.values()]
    problem, arrays = prepared(*numbers, static.opts, None, True, _features(static, sinks, **scales))
    return forward(problem._replace(out_dtype=q.dtype.name), *arrays, True)


def _forward_rule(static, q, k, v, sinks):
    out, lse = _forward(static, q, k, v, sinks)
    return out, (q, k, v, out, lse, sinks)


def _backward_rule(static, residuals, dout):
    q, k, v, out, lse, sinks = residuals
    prepared, _, backward = static.passes
    problem, (q, k, v, extras) = prepared(q, k, v, static.opts, None, False, _features(static, sinks))
    dq, dk, dv, more = backward(problem, q, k, v, out, lse, dout, None, extras, False)
    return dq, dk, dv, None if sinks is None else more["sinks"].astype(sinks.dtype)


attention_fp8.defvjp(_forward_rule, _backward_rule)


def checked(q, k, v):
    """The arrays, of 16 bits and (batch, seqlen, heads, dim)."""
    arrays = [_jax_arrays.array(name, x) for name, x in (("q", q), ("k", k), ("v", v))]
    for name, x in zip(("q", "k", "v"), arrays):
        if x.ndim != 4:
            raise InvalidArgumentError(f"{name} has shape {x.shape}; it must be (batch, seqlen, heads, dim)")
        _dtypes.sixteen_bits(name, x.dtype.name, str)
    q, k, v = arrays
    if k.shape[2] == 0 or q.shape[2] % k.shape[2]:
        raise InvalidArgumentError(f"k has shape {k.shape}; the {q.shape[2]} heads of q must be a multiple of its heads")
    return q, k, v
