"""`flashtune.jax`'s quantising, rotating and attention with an fp8 forward pass.

NumPy's calls of the same names run on the CPU backend, and quantising has the same bits everywhere.
"""

import flashtune
import flashtune.jax
import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("ml_dtypes")

from test_jax import device, normal  # noqa: E402, F401

BATCH, HEADS, HEADS_KV, DIM, SEQLEN = 2, 4, 2, 64, 150
FORMATS = ["float8_e4m3fn", "float8_e5m2", "int8"]


def equal(actual, expected):
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    np.testing.assert_array_equal(np.asarray(actual, np.float32), expected.astype(np.float32))


@pytest.mark.parametrize("seed", [None, 2**63 + 5])
@pytest.mark.parametrize("keys, group", [(0, 2), (1, 1), (128, 1)])
@pytest.mark.parametrize("name", FORMATS)
def test_quantising_equals_numpys_call(name, keys, group, seed):
    x = normal(BATCH, SEQLEN, HEADS, DIM, dtype="bfloat16")
    static = dict(keys_per_descale=keys, heads_per_descale=group, rotation_seed=seed)
    expected = flashtune.quantize(x, jnp.dtype(name), **static)
    for actual in zip(jax.jit(lambda x: flashtune.jax.quantize(x, name, **static))(x), expected):
        equal(*actual)
    # By given scales: those that were computed, and a number.
    again = jax.jit(lambda x, descale: flashtune.jax.quantize(x, name, descale=descale, **static))(x, expected[1])
    equal(again[0], expected[0])
    equal(flashtune.jax.quantize(x, name, descale=0.25, **static)[0], flashtune.quantize(x, jnp.dtype(name), descale=0.25, **static)[0])


def test_rotating_equals_numpys_call_and_vmap_a_loop():
    x = normal(3, BATCH, 5, HEADS, 80, dtype="float16")
    equal(flashtune.jax.rotate(x[0], 7), flashtune.rotate(x[0], 7))
    equal(jax.vmap(lambda x: flashtune.jax.rotate(x, 7))(x), np.stack([flashtune.rotate(one, 7) for one in x]))
    numbers, scales = jax.vmap(lambda x: flashtune.jax.quantize(x, "int8"))(x)
    for i, one in enumerate(x):
        for actual, expected in zip((numbers[i], scales[i]), flashtune.quantize(one, np.int8)):
            equal(actual, expected)


def test_no_rows_have_scales_of_1():
    numbers, scales = flashtune.jax.quantize(np.empty((BATCH, 0, HEADS, DIM), np.float16), "int8")
    assert numbers.shape == (BATCH, 0, HEADS, DIM)
    equal(scales, np.ones((BATCH, HEADS), np.float32))


def test_bad_arguments_are_refused_while_a_program_is_traced():
    x = normal(BATCH, 5, HEADS, DIM, dtype="float16")
    for message, call in {
        "dtype is float16; it must be one of": lambda: flashtune.jax.quantize(x, np.float16),
        "heads_per_descale is 3; it must divide 4": lambda: flashtune.jax.quantize(x, "int8", heads_per_descale=3),
        "keys_per_descale is 5; it must be 0, 1 or 128": lambda: flashtune.jax.quantize(x, "int8", keys_per_descale=5),
        "descale has shape": lambda: flashtune.jax.quantize(x, "int8", descale=np.ones((BATCH, 3), np.float32)),
        "rotation_seed is -1": lambda: flashtune.jax.quantize(x, "int8", rotation_seed=-1),
        "seed is 'a'": lambda: flashtune.jax.rotate(x, "a"),
        "x is float32": lambda: flashtune.jax.rotate(x.astype(np.float32), 1),
        "q is float32": lambda: flashtune.jax.attention_fp8(*[x.astype(np.float32)] * 3),
        "k has shape": lambda: flashtune.jax.attention_fp8(x, x[:, :, :3], x[:, :, :3]),
    }.items():
        with pytest.raises((ValueError, TypeError), match=message):
            jax.jit(call)()


@pytest.mark.parametrize("has_sinks, seed, dtype", [(False, None, "bfloat16"), (True, 3, "float16")])
def test_attention_fp8_is_near_16_bits_in_both_passes(has_sinks, seed, dtype):
    q, k, v, dout = (normal(BATCH, SEQLEN, heads, DIM, dtype=dtype, seed=i) for i, heads in enumerate((HEADS, HEADS_KV, HEADS_KV, HEADS)))
    static = dict(causal=True, window=(100, None))
    more = dict(sinks=np.array([-1, 0, 2, 1], np.float32)) if has_sinks else {}

    def both(attention, **options):
        def loss(arrays, more):
            return jnp.vdot(attention(*arrays, **static, **options, **more).astype(jnp.float32), dout.astype(jnp.float32))

        of = jax.jit(jax.grad(loss, argnums=(0, 1)))((q, k, v), more)
        return [attention(q, k, v, **static, **options, **more), *of[0], *of[1].values()]

    narrow, wide = both(flashtune.jax.attention_fp8, rotation_seed=seed), both(flashtune.jax.attention)
    errors = []
    for one, other in zip(narrow, wide, strict=True):
        assert one.dtype == other.dtype and one.shape == other.shape
        one, other = (np.asarray(x, np.float64) for x in (one, other))
        errors.append(np.linalg.norm(one - other) / np.linalg.norm(other))
    # e4m3 has 3 bits of mantissa. Some error there must be.
    assert all(0 < error < 2**-3 for error in errors), errors


def test_quantising_has_no_gradient():
    x = normal(BATCH, 5, HEADS, DIM, dtype="float16")
    gradient = jax.grad(lambda x: flashtune.jax.rotate(x, 1).astype(jnp.float32).sum())(jnp.asarray(x))
    assert not gradient.any()
