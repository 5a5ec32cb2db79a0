"""The mesh axes along which arrays vary inside `jax.shard_map`.

A call through `jax.ffi` takes arrays that vary along the same axes, and its results must say
theirs. The names of these things change between versions of JAX, from 0.7 to 0.12.
"""

import jax

_cast = getattr(jax.lax, "pcast", None)


def vary(arrays):
    """The arrays, made to vary along every axis along which one of them does."""
    found = [_axes(x) for x in arrays]
    every = frozenset().union(*found)
    return [_vary(x, tuple(sorted(every - axes, key=str))) for x, axes in zip(arrays, found)]


def result(shape, dtype, like):
    """The description of a result that varies as `like` does."""
    if not _axes(like):
        return jax.ShapeDtypeStruct(shape, dtype)
    of_type = jax.typeof(like)
    name = "manual_axis_type" if hasattr(of_type, "manual_axis_type") else "vma"
    # The axes are those of a mesh, which the sharding names.
    sharding = jax.sharding.NamedSharding(of_type.sharding.mesh, jax.sharding.PartitionSpec())
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding, **{name: getattr(of_type, name)})


def _axes(x):
    of_type = jax.typeof(x)
    manual = getattr(of_type, "manual_axis_type", None)
    return getattr(of_type, "vma", frozenset()) if manual is None else manual.varying


def _vary(x, axes):
    if not axes:
        return x
    return jax.lax.pvary(x, axes) if _cast is None else _cast(x, axes, to="varying")
