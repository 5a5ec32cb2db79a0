"""`flashtune.jax` on the CPU, and on a GPU where JAX sees one.

The oracle judges results and gradients under jit by the error rule.
"""

import functools
import os
import pkgutil
import subprocess
import sys
from pathlib import Path

import flashtune
import flashtune.jax
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from judge import assert_close

HEADS = 4
DTYPES = ["float32", "float16", "bfloat16"]
GENERATOR = np.random.default_rng(7)


def has_gpu():
    # Without a plugin there is no need to start JAX's threads while tests are collected.
    if not any(module.name.startswith("jax_cuda") for module in pkgutil.iter_modules()):
        return False
    try:
        return bool(jax.devices("cuda"))
    except RuntimeError:
        return False


@pytest.fixture(params=["cpu", "cuda"] if has_gpu() else ["cpu"], autouse=True)
def device(request):
    """Each test runs on the CPU, and on a GPU where JAX sees one."""
    with jax.default_device(jax.devices(request.param)[0]):
        yield request.param


def normal(*shape, dtype="float32", seed=0):
    return np.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32), jnp.dtype(dtype))


def tensors(batch=2, heads_kv=2, seqlen_q=61, seqlen_k=83, head_dim=40, head_dim_v=24, dtype="float32"):
    """(q, k, v, dout)"""
    return (
        normal(batch, seqlen_q, HEADS, head_dim, dtype=dtype, seed=1),
        normal(batch, seqlen_k, heads_kv, head_dim, dtype=dtype, seed=2),
        normal(batch, seqlen_k, heads_kv, head_dim_v, dtype=dtype, seed=3),
        normal(batch, seqlen_q, HEADS, head_dim_v, dtype=dtype, seed=4),
    )


SLOPES = np.array([0.5, 0.1, 0.03, 0.0], np.float32)
SINKS = np.array([-1.0, 0.0, 2.0, 1.0], np.float32)
# For scores of (2, 4, 61, 83).
FEATURES = {
    "plain": {},
    "causal": dict(causal=True),
    "top-left window": dict(causal="top-left", window=(16, 0), softmax_scale=0.2),
    "window": dict(window=(20, 7), softcap=1.3),
    "slopes of each batch entry": dict(alibi_slopes=np.abs(normal(2, HEADS)), causal=True),
    "bias of keys": dict(bias=normal(1, 1, 1, 83)),
    "mask and dropout": dict(mask=GENERATOR.random((2, 1, 1, 83)) < 0.6, dropout_p=0.2, seed=(11, 5)),
    "all": dict(
        window=(30, 11), softcap=2.0, alibi_slopes=SLOPES, bias=normal(2, 1, 61, 83), sinks=SINKS, dropout_p=0.1,
        mask=GENERATOR.random((1, HEADS, 61, 83)) < 0.8, seed=(1 << 40 | 3, 1 << 50 | 9),
    ),
}  # fmt: skip
DIFFERENTIABLE = ("bias", "sinks")


def both_passes(function, q, k, v, dout, options):
    """Results by the oracle's names, compiled, with a gradient into lse; and that gradient."""
    arrays = {name: options[name] for name in DIFFERENTIABLE if name in options}
    static = {name: value for name, value in options.items() if name not in arrays}

    @jax.jit
    def run(q, k, v, arrays, dout, dlse):
        (out, lse), pullback = jax.vjp(
            lambda q, k, v, arrays: function(q, k, v, return_lse=True, **static, **arrays), q, k, v, arrays
        )
        return out, lse, pullback((dout, dlse))

    lse_shape = q.shape[:-2] if "cu_seqlens_q" not in options else (q.shape[0],)
    lse_shape = (*lse_shape[:-1], HEADS, lse_shape[-1])
    dlse = normal(*lse_shape, seed=5)
    out, lse, (dq, dk, dv, more) = run(q, k, v, arrays, dout, dlse)
    return dict(out=out, lse=lse, dq=dq, dk=dk, dv=dv, **{f"d{name}": x for name, x in more.items()}), dlse


def check(function, reference, q, k, v, dout, **options):
    dtype = q.dtype
    if "bias" in options:
        options["bias"] = options["bias"].astype(dtype)
    actual, dlse = both_passes(function, q, k, v, dout, options)
    exact = reference(q, k, v, dout, dlse=dlse, **options)
    naive = reference(q, k, v, dout, dlse=dlse, rounded_to=dtype, **options)
    lse = np.asarray(actual.pop("lse"))
    for name, value in actual.items():
        values = [np.asarray(x, np.float64) for x in (value, getattr(naive, name), getattr(exact, name))]
        assert_close(name, *values, dtype.name, gradient=name != "out")
    finite = np.isfinite(exact.lse)
    assert (np.isneginf(lse) == ~finite).all()
    np.testing.assert_allclose(lse[finite], exact.lse[finite], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FEATURES)
def test_both_passes_are_within_the_error_rule(name, dtype):
    check(flashtune.jax.attention, oracle.attention, *tensors(dtype=dtype), **FEATURES[name])


def test_a_mask_of_bits_equals_the_mask_in_both_passes():
    q, k, v, dout = tensors()
    mask = GENERATOR.random((2, 1, 61, 83)) < 0.7
    masks = dict(mask=mask), dict(mask_bits=np.packbits(mask, axis=-1, bitorder="little"))
    of_bytes, of_bits = (both_passes(flashtune.jax.attention, q, k, v, dout, options)[0] for options in masks)
    for name, expected in of_bytes.items():
        np.testing.assert_array_equal(of_bits[name], expected)


BLOCKS = GENERATOR.random((2, HEADS, 4, 6)) < 0.6
BLOCK_MASKS = {
    "shared": (BLOCKS[0, 0], None),
    "of heads": (BLOCKS[:1], None),
    "of all": (BLOCKS, None),
    "with full blocks": (BLOCKS, BLOCKS & (GENERATOR.random(BLOCKS.shape) < 0.5)),
}


@pytest.mark.parametrize("library", [np, jnp], ids=["numpy", "jax"])
@pytest.mark.parametrize("name", BLOCK_MASKS)
def test_block_masks_are_right_in_both_passes(name, library):
    blocks, full = (None if x is None else library.asarray(x) for x in BLOCK_MASKS[name])

    def attention(*arrays, mask, **options):
        return flashtune.jax.attention(*arrays, block_mask=flashtune.block_mask(blocks, full, block_size=16), **options)

    blocks_of = np.broadcast_to(BLOCK_MASKS[name][0], (2, HEADS, 4, 6))
    listed = blocks_of.repeat(16, 2).repeat(16, 3)[:, :, :61, :83]
    check(attention, oracle.attention, *tensors(), mask=listed)


def test_a_traced_block_mask_serves_many_masks():
    q, k, v, _ = tensors()
    size = (16, 16)

    @jax.jit
    def run(lists):
        return flashtune.jax.attention(q, k, v, causal=True, block_mask=flashtune._block_mask.BlockMask(size, *lists))

    for blocks in BLOCKS[0, :2]:
        mask = flashtune.block_mask(blocks, block_size=16)
        np.testing.assert_allclose(run(mask[1:]), flashtune.attention(q, k, v, causal=True, block_mask=mask), atol=2e-5)
    forward_alone = mask._replace(q_num_blocks=None, q_indices=None)
    with pytest.raises(ValueError, match="block_mask.q_num_blocks is None; the backward pass needs it"):
        jax.grad(lambda q: flashtune.jax.attention(q, k, v, block_mask=forward_alone).sum())(q)


LENGTHS_Q, LENGTHS_K = [13, 0, 61, 30], [40, 17, 83, 9]
CU_SEQLENS = [np.cumsum([0, *lengths]).astype(np.int32) for lengths in (LENGTHS_Q, LENGTHS_K)]
USED = [np.array(lengths, np.int32) for lengths in ([5, 13, 0, 20], [25, 0, 60, 8])]
VARLEN = {
    "both packed": dict(zip(("cu_seqlens_q", "cu_seqlens_k"), CU_SEQLENS)),
    "queries packed": dict(cu_seqlens_q=CU_SEQLENS[0], max_seqlen_q=61),
    "padded": dict(seqused_q=USED[0], seqused_k=USED[1]),
}


@pytest.mark.parametrize("features", [dict(causal=True), dict(sinks=SINKS, dropout_p=0.2, seed=(1, 2))], ids=["causal", "more"])
@pytest.mark.parametrize("name", VARLEN)
def test_varlen_sequences_equal_each_sequence_alone_and_unused_rows_are_zero(name, features):
    q, k, v, dout = tensors(batch=4)
    if "cu_seqlens_q" in VARLEN[name]:
        q, dout = (x.reshape(-1, *x.shape[2:])[: sum(LENGTHS_Q) + 3] for x in (q, dout))
    if "cu_seqlens_k" in VARLEN[name]:
        k, v = (x.reshape(-1, *x.shape[2:])[: sum(LENGTHS_K) + 5] for x in (k, v))

    def reference(*arrays, max_seqlen_q=None, **options):
        return oracle.varlen(*arrays, **options)

    check(flashtune.jax.attention_varlen, reference, q, k, v, dout, **VARLEN[name], **features)


def test_alibi_slopes_have_no_gradient():
    with pytest.raises(flashtune.UnsupportedError, match="alibi_slopes has no gradient"):
        jax.grad(lambda slopes: flashtune.jax.attention(Q, K, V, alibi_slopes=slopes).sum())(jnp.asarray(SLOPES))
    stopped = jax.grad(lambda q: flashtune.jax.attention(q, K, V, alibi_slopes=jnp.asarray(SLOPES)).sum())(jnp.asarray(Q))
    assert jnp.isfinite(stopped).all() and (stopped != 0).any()


def test_seeds_may_be_numpy_integers_and_p_less_than_any_float32():
    plain, seeded = (flashtune.jax.attention(Q, K, V, dropout_p=0.2, seed=seed) for seed in (3, np.int64(3)))
    assert (plain == seeded).all()
    assert (flashtune.jax.attention(Q, K, V, dropout_p=1e-46, seed=1) == flashtune.jax.attention(Q, K, V)).all()


def test_a_traced_seed_changes_the_mask_without_a_new_trace():
    q, k, v, _ = tensors()
    traces = []

    @jax.jit
    def run(seed):
        traces.append(seed)
        return flashtune.jax.attention(q, k, v, dropout_p=0.3, seed=seed)

    halves = np.array([[3, 0], [4, 7]], np.uint32)
    for low, high in halves:
        expected = flashtune.attention(q, k, v, dropout_p=0.3, seed=int(low) | int(high) << 32)
        np.testing.assert_allclose(run(np.array([low, high], np.uint32)), expected, atol=2e-5)
    assert len(traces) == 1
    key = jax.random.key(5)
    from_key = flashtune.jax.attention(q, k, v, dropout_p=0.3, seed=key)
    np.testing.assert_array_equal(from_key, run(jax.random.key_data(key)))


@pytest.mark.skipif(not has_gpu(), reason="JAX sees no GPU, so all tests of this file ran on the CPU alone")
def test_cpu_and_gpu_drop_the_same_weights():
    q = np.zeros((2, 96, HEADS, 32), np.float32)
    identity = np.broadcast_to(np.eye(96, dtype=np.float32)[:, None], (2, 96, HEADS, 96))
    outs = [
        flashtune.jax.attention(*(jax.device_put(x, jax.devices(name)[0]) for x in (q, q, identity)), dropout_p=0.4, seed=9)
        for name in ("cpu", "cuda")
    ]
    np.testing.assert_array_equal(*(np.asarray(out) != 0 for out in outs))


VMAPS = {
    "folded into the batch": {},
    "with lengths": dict(seqused_k=USED[1][:2]),
    "with a whole bias": dict(bias=normal(2, 1, 61, 83)),
    "with bits": dict(mask_bits=GENERATOR.integers(1, 256, (2, 1, 61, 11), np.uint8)),
    "with blocks": dict(block_mask=flashtune.block_mask(BLOCKS, block_size=16)),
    "one by one with shared blocks": dict(block_mask=flashtune.block_mask(BLOCKS[0, 0], block_size=16)),
    "one by one": dict(alibi_slopes=SLOPES, sinks=SINKS),
    "one by one with dropout": dict(dropout_p=0.2, seed=3),
    "one by one with a bias of keys": dict(bias=normal(83)),
}


@pytest.mark.parametrize("name", VMAPS)
def test_vmap_equals_a_loop_in_both_passes(name):
    options = VMAPS[name]
    function = flashtune.jax.attention_varlen if "seqused_k" in options else flashtune.jax.attention
    q, k, v, _ = tensors()
    many = np.stack([q, 2 * q, -q]), np.stack([v, v + 1, 3 * v])

    def loss(q, v):
        return jnp.sin(function(q, k, v, causal=True, **options)).sum()

    gradients = jax.jit(jax.vmap(jax.grad(loss, (0, 1))))(*many)
    single = jax.jit(jax.grad(loss, (0, 1)))
    for index in range(3):
        for actual, expected in zip(gradients, single(many[0][index], many[1][index])):
            np.testing.assert_allclose(actual[index], expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("shape", [(2, 1, 9, 11), (11,)], ids=["folded", "one by one"])
def test_vmap_of_the_gradient_of_a_bias_equals_a_loop(shape):
    q, k, v, _ = tensors(seqlen_q=9, seqlen_k=11)
    biases = normal(3, *shape)

    def loss(bias):
        return jnp.sin(flashtune.jax.attention(q, k, v, bias=bias)).sum()

    for actual, bias in zip(jax.vmap(jax.grad(loss))(biases), biases):
        np.testing.assert_allclose(actual, jax.grad(loss)(bias), rtol=2e-5, atol=2e-5)


def test_nested_vmap_folds_twice():
    q, k, v, _ = tensors(batch=1, seqlen_q=9)
    many = np.stack([np.stack([q, 2 * q]), np.stack([3 * q, 4 * q])])
    out = jax.vmap(jax.vmap(lambda q: flashtune.jax.attention(q, k, v)))(many)
    expected = flashtune.jax.attention(4 * q, k, v)
    np.testing.assert_allclose(out[1, 1], expected, rtol=2e-5, atol=2e-5)


def test_scan_and_checkpoint_have_the_gradients_of_a_plain_loop():
    q, k, v, _ = tensors(heads_kv=HEADS, seqlen_k=61, head_dim_v=40)

    def layer(x, _):
        return x + flashtune.jax.attention(x, k, v, causal=True), None

    def scanned(q):
        return jnp.sin(jax.lax.scan(jax.checkpoint(layer), q, length=3)[0]).sum()

    def unrolled(q):
        return jnp.sin(functools.reduce(lambda x, _: layer(x, None)[0], range(3), q)).sum()

    np.testing.assert_allclose(jax.jit(jax.grad(scanned))(q), jax.grad(unrolled)(q), rtol=1e-4, atol=1e-4)


def test_the_gradient_of_a_bias_is_computed_where_it_is_asked_for_alone():
    """With deterministic, the library refuses the gradient of a broadcast bias."""
    q, k, v, _ = tensors()
    bias = normal(1, 1, 1, 83)

    def run(q, bias):
        return flashtune.jax.attention(q, k, v, bias=bias, deterministic=True).sum()

    assert np.isfinite(jax.grad(run)(q, bias)).all()
    with pytest.raises(Exception, match="deterministic"):
        jax.block_until_ready(jax.grad(run, 1)(q, bias))


JAX_CALLS = {
    "plain": {},
    "causal": dict(is_causal=True, scale=0.3),
    "windows": dict(local_window_size=(7, 3)),
    "causal window": dict(local_window_size=9, is_causal=True, lengths=61),
    "lengths": dict(query_seq_lengths=USED[0][:2], key_value_seq_lengths=np.array([25, 83], np.int32)),
    "bias and mask": dict(bias=normal(1, HEADS, 61, 83), mask=GENERATOR.random((2, 1, 61, 83)) < 0.8),
}


@pytest.mark.parametrize("name", JAX_CALLS)
def test_dot_product_attention_is_that_of_jax(name):
    if name == "windows" and jax.__version_info__ < (0, 9):
        pytest.skip("this JAX aligns windows of unequal lengths in another way")
    options = dict(JAX_CALLS[name])
    q, k, v, _ = tensors(head_dim_v=40, seqlen_k=options.pop("lengths", 83))
    actual = jax.jit(lambda *x: flashtune.jax.dot_product_attention(*x, **options))(q, k, v)
    with jax.default_matmul_precision("highest"):
        expected = jax.nn.dot_product_attention(q, k, v, **options, implementation="xla")
    np.testing.assert_allclose(actual, expected, rtol=2e-5, atol=2e-5)
    if name == "causal":
        single = flashtune.jax.dot_product_attention(q[0], k[0], v[0], **options)
        np.testing.assert_allclose(single, expected[0], rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("empty", ["batch", "seqlen_q", "seqlen_k"])
def test_empty_tensors_give_zeros(empty):
    q, k, v, dout = tensors(**{empty: 0})
    actual, _ = both_passes(flashtune.jax.attention, q, k, v, dout, dict(sinks=SINKS))
    for name in ("out", "dq", "dk", "dv"):
        assert not np.asarray(actual[name]).any()
    if empty != "seqlen_k":
        assert not np.asarray(actual["dsinks"]).any()


Q, K, V, _ = tensors()
BAD = {
    "q is float": (lambda f: f(*(x.astype("int32") for x in (Q, K, V))), ValueError, "q is int32; it must be float16 or bfloat16 or float32 or float8_e4m3fn"),
    "list": (lambda f: f([1.0], K, V), TypeError, "q is a list; it must be a JAX or NumPy array"),
    "dtypes": (lambda f: f(Q, K.astype("float16"), V), ValueError, "k is float16; it must be float32, as q is"),
    "dims": (lambda f: f(Q[0], K, V), ValueError, "q has shape"),
    "heads": (lambda f: f(Q[:, :, :3], K, V), ValueError, "num_heads_q"),
    "bias": (lambda f: f(Q, K, V, bias=normal(5)), ValueError, "bias has shape"),
    "mask": (lambda f: f(Q, K, V, mask=normal(83)), ValueError, "mask is float32"),
    "slopes": (lambda f: f(Q, K, V, alibi_slopes=normal(3)), ValueError, "alibi_slopes has shape"),
    "sinks": (lambda f: f(Q, K, V, sinks=SINKS.astype("complex64")), ValueError, "sinks is complex64; it must be a floating"),
    "causal": (lambda f: f(Q, K, V, causal="middle"), ValueError, "causal is 'middle'"),
    "window": (lambda f: f(Q, K, V, causal=True, window=(3, 3)), ValueError, "window_right"),
    "seed": (lambda f: f(Q, K, V, dropout_p=0.1), ValueError, "seed is None"),
    "traced scale": (lambda f: jax.jit(lambda s: f(Q, K, V, softmax_scale=s))(0.5), ValueError, "softmax_scale is"),
    "block mask": (lambda f: f(Q, K, V, block_mask=1), ValueError, "block_mask is int; it must be like a FlexAttention BlockMask"),
    "bits": (lambda f: f(Q, K, V, mask_bits=np.ones((61, 10), np.uint8)), ValueError, "mask_bits has shape (1, 1, 61, 10); it must broadcast"),
    "both masks": (lambda f: f(Q, K, V, mask_bits=Q, mask=Q), ValueError, "mask and mask_bits are both given"),
    "scales": (lambda f: f(Q, K, V, k_descale=1.0), ValueError, "k_descale is given; it must be None, since k has not 8 bits"),
    "pages": (lambda f: f(Q, K, V, block_table=Q), TypeError, "unexpected keyword argument 'block_table'"),
    "key": (lambda f: f(Q, jax.random.key(1), V), ValueError, "k is key<fry>; it must be an array of numbers"),
    "flag": (lambda f: f(Q, K, V, return_lse=1), ValueError, "return_lse is 1; it must be False or True"),
    "unknown": (lambda f: f(Q, K, V, colour=1), TypeError, "'colour'"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused_while_the_program_is_traced(name):
    call, kind, message = BAD[name]
    with pytest.raises(kind) as caught:
        call(flashtune.jax.attention)
    assert message in str(caught.value)


def test_a_complex_bias_is_refused():
    with pytest.raises(ValueError, match="bias is complex64; it must be real"):
        flashtune.jax.dot_product_attention(Q, Q, Q, bias=normal(1, 1, 1, 1).astype("complex64"))


@pytest.mark.parametrize(
    "change, kind, words",
    [
        (dict(query=Q[0, 0]), ValueError, r"query is float32 of shape \(4, 40\); it must be float32 of \(batch, seqlen, heads, dim\)"),
        (dict(key=K[0]), ValueError, r"key is float32 of shape \(83, 2, 40\); it must be"),
        (dict(value=V.astype("float16")), ValueError, "value is float16 of shape .*; it must be float32 of"),
        (dict(query_seq_lengths=[1]), TypeError, "query_seq_lengths is a list; it must be a JAX or NumPy array"),
        (dict(is_causal="x"), ValueError, "is_causal is 'x'; it must be False or True"),
    ],
)
def test_a_wrong_argument_of_jaxs_function_is_named(change, kind, words):
    with pytest.raises(kind, match=words):
        flashtune.jax.dot_product_attention(**dict(query=Q, key=K, value=V) | change)


def test_varlen_refuses_lengths_that_do_not_fit():
    packed = Q.reshape(-1, *Q.shape[2:])
    with pytest.raises(ValueError, match=r"q has shape \(\); it must be \(total, heads, dim\)"):
        flashtune.jax.attention_varlen(np.zeros((), np.float32), K, V, cu_seqlens_q=np.zeros(3, np.int32))
    with pytest.raises(ValueError, match="k is of 2 sequences and cu_seqlens_q of 3"):
        flashtune.jax.attention_varlen(packed, K, V, cu_seqlens_q=np.zeros(4, np.int32))
    with pytest.raises(ValueError, match="cu_seqlens_q is float32; it must be int32"):
        flashtune.jax.attention_varlen(packed, K, V, cu_seqlens_q=normal(3))


RUN_TIME = {
    "an attribute": (dict(colour=np.int64(1)), (Q, K, V), "attribute colour is unknown"),
    "a type of number": (dict(causal=np.float32(1)), (Q, K, V), "attribute causal is unknown to this version of flashtune, or"),
    "a feature": (dict(features=np.int64(1 << 20)), (Q, K, V), "attribute features has bits 0x100000"),
    "a missing block table": (dict(features=np.int64(1 << 10)), (Q, K, V), "the call has 3 arguments; block_table must be argument 3"),
    "a missing operand": (dict(features=np.int64(8)), (Q, K, V), "the call has 3 arguments; sinks must be argument 3"),
    "an operand too many": ({}, (Q, K, V, Q), "argument 3 must be the initial value of result 0"),
    "a shape": ({}, (Q, K[:1], V), "k has shape [1, 83, 2, 40]; it must be [2, 83, 2, 40]"),
    "a dtype": ({}, (Q, K, V.astype("float16")), "v has shape"),
    "a rank": ({}, (Q[0], K, V), "q has shape [61, 4, 40]; it must have at least 4 dimensions"),
    "a range": (dict(causal=np.int64(7)), (Q, K, V), "causal is 7"),
}


@pytest.mark.parametrize("name", RUN_TIME)
def test_the_handler_refuses_calls_that_flashtune_did_not_make(name):
    attributes, operands, message = RUN_TIME[name]
    shape = jax.ShapeDtypeStruct((2, 61, HEADS, 24), np.float32)
    with pytest.raises(Exception) as caught:
        jax.block_until_ready(jax.ffi.ffi_call("flashtune_forward", shape)(*operands, **attributes))
    assert message in str(caught.value)


SHARDED = """
import flashtune.jax, jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, PartitionSpec as P

q, sinks = jax.random.normal(jax.random.key(0), (4, 33, 4, 16)), jnp.arange(4.0)

def loss(q, sinks):
    return jnp.sin(flashtune.jax.attention(q, q, q, causal=True, sinks=sinks, bias=sinks[:, None, None]))

mesh = Mesh(np.array(jax.devices("cpu")[:2]), ("x",))
sharded = jax.shard_map(loss, mesh=mesh, in_specs=(P("x"), P()), out_specs=P("x"))
actual, expected = (jax.jit(jax.grad(lambda *x: f(*x).sum(), (0, 1)))(q, sinks) for f in (sharded, loss))
for a, b in zip(actual, expected):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)

def narrow(q, scales):
    return flashtune.jax.attention(q, q, q, causal=True, q_descale=scales, k_descale=scales, v_descale=0.5)

def of_e4m3(q, sinks):
    return jnp.sin(flashtune.jax.attention_fp8(q, q, q, causal=True, sinks=sinks))

half = q.astype(jnp.bfloat16)
sharded = jax.shard_map(of_e4m3, mesh=mesh, in_specs=(P("x"), P()), out_specs=P("x"))
actual, expected = (jax.jit(jax.grad(lambda *x: f(*x).astype("float32").sum(), (0, 1)))(half, sinks) for f in (sharded, of_e4m3))
for a, b in zip(actual, expected):
    np.testing.assert_allclose(np.asarray(a, np.float32), np.asarray(b, np.float32), rtol=2e-2, atol=2e-2)

q, scales = q.astype(jnp.float8_e4m3fn), jnp.linspace(0.5, 1.0, 16).reshape(4, 4)
sharded = jax.shard_map(narrow, mesh=mesh, in_specs=(P("x"), P("x")), out_specs=P("x"))
np.testing.assert_array_equal(*(np.asarray(jax.jit(f)(q, scales), np.float32) for f in (sharded, narrow)))
print("equal")
"""


def test_shard_map_sums_the_gradients_of_replicated_arrays(device):
    if device != "cpu":
        pytest.skip("two devices are made of the CPU")
    done = in_a_new_process(SHARDED, XLA_FLAGS="--xla_force_host_platform_device_count=2", JAX_PLATFORMS="cpu")
    assert done.stdout == "equal\n", done.stderr


def in_a_new_process(program, **more):
    package = Path(flashtune.__file__).parent.parent
    environment = {**os.environ, "PYTHONPATH": str(package), **more}
    return subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=120)


def test_the_package_imports_jax_at_the_first_use_of_its_module(device):
    if device != "cpu":
        pytest.skip("an import does not depend on the device")
    program = "import sys, flashtune\nassert 'jax' not in sys.modules\nflashtune.jax.attention\nassert 'jax' in sys.modules"
    done = in_a_new_process(program)
    assert done.returncode == 0, done.stderr


def test_an_old_jax_is_refused_in_one_sentence(device):
    if device != "cpu":
        pytest.skip("an import does not depend on the device")
    program = "import jax\njax.__version_info__ = (0, 6, 2)\njax.__version__ = '0.6.2'\nimport flashtune.jax"
    done = in_a_new_process(program)
    assert done.stderr.splitlines()[-1].endswith("this is jax 0.6.2; flashtune.jax needs jax 0.7 or later"), done.stderr
