"""JAX arrays as `_features`, `_block_mask` and `_eight` take those of any library.

Their values may be traced, so only shapes and dtypes are read. The handlers fill in the addresses.
"""

import jax
import jax.numpy as jnp
import numpy as np

from . import _call, _dtypes
from ._block_mask import BlockMask
from ._errors import InvalidArgumentError


def array(name, given):
    expect_array(name, given)
    return jnp.asarray(given)


def expect_array(name, given):
    if not isinstance(given, (jax.Array, np.ndarray)):
        raise TypeError(f"{name} is a {type(given).__name__}; it must be a JAX or NumPy array")
    if jnp.issubdtype(given.dtype, jax.dtypes.extended):
        raise InvalidArgumentError(f"{name} is {given.dtype}; it must be an array of numbers")


def converted(keywords, names):
    """The keyword arguments with JAX arrays in place of those of `names` and of a block mask."""
    made = {**keywords, **{name: array(name, keywords[name]) for name in names if keywords.get(name) is not None}}
    if made.get("sinks") is not None:
        if not jnp.issubdtype(made["sinks"].dtype, jnp.floating):
            raise InvalidArgumentError(f"sinks is {made['sinks'].dtype}; it must be a floating point dtype")
        made["sinks"] = made["sinks"].astype(jnp.float32)
    for name in ("bias", "mask", "mask_bits"):
        if made.get(name) is not None:
            made[name] = made[name].reshape((1,) * (4 - made[name].ndim) + made[name].shape)
    mask = made.get("block_mask")
    # `_block_mask` says what another object lacks.
    if mask is not None and all(hasattr(mask, name) for name in BlockMask._fields):
        lists = {name: getattr(mask, name) for name in BlockMask._fields[1:]}
        lists = {name: None if x is None else array(f"block_mask.{name}", x) for name, x in lists.items()}
        made["block_mask"] = BlockMask(mask.BLOCK_SIZE, **lists)
    return made


def vector(name, given, kind, q):
    if given.dtype != np.dtype(kind):
        raise InvalidArgumentError(f"{name} is {given.dtype}; it must be {kind}")
    return given, 0


def scores(name, given, shape, q):
    dtypes = {"bias": (_dtypes.of_out(q.dtype.name),), "mask": ("bool", "uint8"), "mask_bits": ("uint8",)}[name]
    if given.dtype.name not in dtypes:
        raise InvalidArgumentError(f"{name} is {given.dtype}; it must be {' or '.join(dtypes)}")
    if len(given.shape) != 4 or any(size not in (1, whole) for size, whole in zip(given.shape, shape)):
        raise InvalidArgumentError(f"{name} has shape {given.shape}; it must broadcast to {shape}")
    if name == "mask_bits" and given.shape[-1] != shape[-1]:
        raise InvalidArgumentError(f"{name} has shape {given.shape}; it must broadcast to {shape} without broadcasting the last dim")
    strides = [0 if size == 1 else stride for size, stride in zip(given.shape, _strides(given.shape))]
    return given, (0, *strides)


def scales(name, given, q):
    if not isinstance(given, (jax.Array, np.ndarray)):
        given = np.float32(_call.scale(name, given, "float32 array"))
    given = jnp.asarray(given)
    if given.dtype != jnp.float32:
        raise InvalidArgumentError(f"{name} is {given.dtype}; it must be float32")
    return given, 0, given.shape, _strides(given.shape)


def _strides(shape):
    return [int(np.prod(shape[axis + 1 :])) for axis in range(len(shape))]
