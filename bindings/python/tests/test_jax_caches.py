"""`flashtune.jax` in 8 bits and int4, over caches and pages: the results of NumPy's calls.

NumPy's calls run on the CPU backend, which the other tests compare with fp64.
"""

import flashtune
import flashtune.jax
import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("ml_dtypes")

import test_varlen_eight_bits as eight  # noqa: E402
from test_jax import device  # noqa: E402, F401

BATCH, HEADS, HEADS_KV, DIM, KEYS = 3, 4, 2, 64, 96
GENERATOR = np.random.default_rng(3)
USED = np.array([96, 17, 40], np.int32)


def normal(*shape, dtype=np.float16):
    return GENERATOR.standard_normal(shape, np.float32).astype(dtype)


def compare(name, device, arrays, static=None, **more):  # noqa: F811
    """The call of this name under jit, with traced arrays, and the same call of NumPy's face."""
    static = static or {}
    out, lse = jax.jit(lambda arrays, more: getattr(flashtune.jax, name)(*arrays, return_lse=True, **static, **more))(arrays, more)
    expected = getattr(flashtune, name)(*arrays, return_lse=True, **static, **more)
    assert out.dtype == expected[0].dtype and out.shape == expected[0].shape
    if device == "cpu":
        for actual, of_numpy in zip((out, lse), expected):
            np.testing.assert_array_equal(np.asarray(actual, np.float32), of_numpy.astype(np.float32))
    # In e4m3 weights are rounded to 3 bits of mantissa.
    bound = 2**-4 if arrays[0].dtype == jnp.float8_e4m3fn else 2**-7
    assert eight.error(np.asarray(out), expected[0].astype(np.float64)) < bound


def refuse_scales_of_keys(name, device):  # noqa: F811
    if device != "cpu" and name == "of keys":
        pytest.skip("on a GPU q in e4m3 has no scales of each key")


@pytest.mark.parametrize("name", eight.SCALES)
def test_packed_e4m3_equals_numpys_call(name, device):  # noqa: F811
    refuse_scales_of_keys(name, device)
    given = dict(q_descale=eight.scales("of heads", 3), k_descale=eight.scales(name, 1), v_descale=eight.scales(name, 2))
    traced = {n: x for n, x in given.items() if isinstance(x, np.ndarray)}
    static = dict(causal=True, max_seqlen_q=40, max_seqlen_k=170, **{n: x for n, x in given.items() if n not in traced})
    compare("attention_varlen", device, eight.packed(), static, **eight.PACKED, **traced)


@pytest.mark.parametrize("name", eight.SCALES)
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "int8"])
def test_padded_keys_of_eight_bits_equal_numpys_call(dtype, name, device):  # noqa: F811
    q, k, v = eight.packed(jnp.dtype(dtype), np.float16)
    given = {n: eight.scales(name, seed) for seed, n in ((1, "k_descale"), (2, "v_descale"))}
    if name == "of keys":
        given = {n: eight.padded(x, fill=1) for n, x in given.items()}
    lengths = dict(cu_seqlens_q=eight.CU_SEQLENS[0], seqused_k=np.array(eight.LENGTHS_K, np.int32))
    traced = {n: x for n, x in given.items() if isinstance(x, np.ndarray)}
    static = dict(max_seqlen_q=40, **{n: x for n, x in given.items() if n not in traced})
    compare("attention_varlen", device, (q, eight.padded(k), eight.padded(v)), static, **lengths, **traced)


def test_dense_e4m3_has_bfloat16_results_features_and_no_gradient(device):  # noqa: F811
    q, k, v = (normal(BATCH, 40, heads, DIM, dtype=jnp.float8_e4m3fn) for heads in (HEADS, HEADS_KV, HEADS_KV))
    bias = normal(BATCH, HEADS, 40, 40, dtype=jnp.bfloat16)
    of_heads = np.full((BATCH, HEADS_KV), 0.5, np.float32)
    static = dict(causal=True, softcap=5.0, v_descale=0.25)
    compare("attention", device, (q, k, v), static, q_descale=of_heads, k_descale=of_heads, bias=bias)
    with pytest.raises(ValueError, match="bias is float8_e4m3fn; it must be bfloat16"):
        flashtune.jax.attention(q, k, v, bias=bias.astype(q.dtype))
    with pytest.raises(NotImplementedError, match="k is float8_e4m3fn, which has no backward pass"):
        jax.grad(lambda bias: flashtune.jax.attention(q, k, v, bias=bias).sum().astype(jnp.float32))(bias)


@pytest.mark.parametrize("shape", [(), (BATCH, HEADS_KV), (BATCH, KEYS, HEADS_KV)], ids=str)
def test_vmap_of_eight_bits_equals_a_loop(shape, device):  # noqa: F811
    q, k, v = normal(2, BATCH, 5, HEADS, DIM), *(normal(2, BATCH, KEYS, HEADS_KV, DIM, dtype=jnp.float8_e5m2) for _ in range(2))
    scales = GENERATOR.uniform(0.5, 1.5, (2, *shape)).astype(np.float32)

    def run(q, k, v, scale):
        return flashtune.jax.attention_varlen(q, k, v, k_descale=scale, seqused_k=USED)

    outs = jax.jit(jax.vmap(run))(q, k, v, scales)
    for at in range(2):
        alone = np.asarray(jax.jit(run)(q[at], k[at], v[at], scales[at]), np.float64)
        # On a GPU the larger batch may have another kernel.
        assert eight.error(np.asarray(outs[at]), alone) < (2**-8 if device != "cpu" else 2**-52)


def cache(dtype=np.float16):
    return normal(5, KEYS, HEADS_KV, DIM, dtype=dtype), normal(5, KEYS, HEADS_KV, DIM, dtype=dtype)


@pytest.mark.parametrize("dtype", ["float16", "int8"])
def test_entries_and_left_padding_equal_numpys_call(dtype, device):  # noqa: F811
    places = dict(cache_batch_idx=np.array([4, 0, 2], np.int32), leftpad_k=np.array([3, 0, 40], np.int32), seqused_k=USED)
    if dtype == "int8":
        places |= {n: GENERATOR.uniform(0.5, 1.5, (5, KEYS, HEADS_KV)).astype(np.float32) for n in ("k_descale", "v_descale")}
    for q, static in ((normal(BATCH, 1, HEADS, DIM), dict(num_splits=2)), (normal(BATCH, 7, HEADS, DIM), dict(causal=True))):
        compare("attention_kvcache", device, (q, *cache(jnp.dtype(dtype))), static, **places)


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
def test_pages_equal_numpys_call(dtype, device):  # noqa: F811
    k, v = (x.reshape(-1, 16, HEADS_KV, DIM) for x in cache(jnp.dtype(dtype)))
    table = GENERATOR.permutation(len(k))[: BATCH * 6].reshape(BATCH, 6).astype(np.int32)
    more = dict(block_table=table, seqused_k=USED)
    if dtype != "bfloat16":
        more |= dict(k_descale=np.full((BATCH, HEADS_KV), 0.5, np.float32))
    for static in ({}, dict(max_seqlen_k=96)):
        compare("attention_kvcache", device, (normal(BATCH, 3, HEADS, DIM, dtype=jnp.bfloat16), k, v), static, **more)
    packed = normal(9, HEADS, DIM, dtype=jnp.bfloat16)
    offsets = np.array([0, 2, 2, 9], np.int32)
    compare("attention_kvcache", device, (packed, k, v), dict(causal=True, max_seqlen_q=7), cu_seqlens_q=offsets, **more)


@pytest.mark.parametrize("group", [32, 64])
def test_rows_of_int4_equal_numpys_call(group, device):  # noqa: F811
    rows = flashtune.int4_row_bytes(DIM, group)
    caches = [np.zeros((BATCH, KEYS, HEADS_KV, rows), np.uint8) for _ in range(2)]
    new = [normal(BATCH, KEYS, HEADS_KV, DIM) for _ in range(2)]
    flashtune.kv_append(*caches, *new, np.zeros(BATCH, np.int32), int4_group=group)
    q = normal(BATCH, 2, HEADS, DIM)
    compare("attention_kvcache", device, (q, *caches), dict(causal=True, int4_group=group), seqused_k=USED)


@pytest.mark.parametrize(
    "change, kind, words",
    [
        (dict(q_descale=1.0), ValueError, "q_descale is given; it must be None, since q has not 8 bits"),
        (dict(k_descale=np.ones((BATCH, 3), np.float32)), ValueError, r"k_descale has shape \(3, 3\); it must be a number, \(3, 2\)"),
        (dict(k_descale=np.ones((BATCH, 2), np.float16)), ValueError, "k_descale is float16; it must be float32"),
        (dict(v_descale=0.0), ValueError, "v_descale is 0.0; it must be a number that is finite and above 0"),
        (dict(v_descale="x"), ValueError, "v_descale is 'x'; it must be a number"),
        (dict(int4_group=32), ValueError, "k is int8; it must be uint8 with int4_group"),
        (dict(int4_group=5), ValueError, "int4_group is 5; it must be 32 or 64"),
        (dict(block_table=np.zeros((2, 2), np.int32)), ValueError, "q is of 3 sequences and seqused_k of|block_table is of 2"),
        (dict(block_table=np.zeros((3, 2))), ValueError, "block_table is float"),
        (dict(cache_batch_idx=USED, block_table=USED), ValueError, "cache_batch_idx and block_table are both given"),
        (dict(num_splits=-1), ValueError, "num_splits is -1"),
        (dict(cu_seqlens_k=USED), TypeError, "unexpected keyword argument 'cu_seqlens_k'"),
    ],
)
def test_wrong_arguments_are_refused_while_the_program_is_traced(change, kind, words):
    q, (k, v) = normal(BATCH, 1, HEADS, DIM), (x[:BATCH] for x in cache(np.int8))
    with pytest.raises(kind, match=words):
        jax.jit(lambda q: flashtune.jax.attention_kvcache(q, k, v, **change)).trace(q)


@pytest.mark.parametrize("value", [0.0, -1.0, np.inf, np.nan])
def test_scales_without_meaning_are_refused_by_the_cpu(value, device):  # noqa: F811
    if device != "cpu":
        pytest.skip("a GPU does not check the values of scales")
    q, (k, v) = normal(BATCH, 1, HEADS, DIM), (x[:BATCH] for x in cache(np.int8))
    with pytest.raises(Exception, match="k_descale of sequence 0, key 0 and head 0 is .*; a scale must be finite and above 0"):
        jax.block_until_ready(flashtune.jax.attention_kvcache(q, k, v, k_descale=np.full((BATCH, HEADS_KV), value, np.float32)))


def test_caches_have_no_gradient():
    q, (k, v) = normal(BATCH, 1, HEADS, DIM), cache()
    entries = np.array([4, 0, 2], np.int32)
    with pytest.raises(NotImplementedError, match="cache_batch_idx is given; the backward pass has neither caches"):
        jax.grad(lambda q: flashtune.jax.attention_kvcache(q, k, v, cache_batch_idx=entries).sum())(q)


HANDLER = {
    "a group of int4": (dict(int4_group=np.int64(5)), (), "attribute int4_group is 5; it must be 0, 32 or 64"),
    "a width of int4": (dict(int4_group=np.int64(32)), (np.uint8,), "k has shape [3, 96, 2, 64]; it must be [3, 96, 2, 48]"),
    "the keys of a scale": (dict(keys_per_descale=np.int64(2)), (np.int8,), "attribute keys_per_descale is 2; it must be 0, 1 or 128"),
    "missing scales": ({}, (np.int8,), "the call has 3 arguments; k_descale must be argument 3"),
    "scales of a shape": ({}, (np.int8, np.ones((3, 3), np.float32)), "k_descale has shape [3, 3]; it must broadcast to [] + [3, 1, 2]"),
    "blocks of nothing": (dict(features=np.int64(1 << 12)), (), "attributes block_q and block_k are 0 and 0"),
    "pages for fewer keys": (
        dict(features=np.int64(1 << 10), seqlen_k=np.int64(300)), (np.float16, np.zeros((3, 3), np.int32)),
        "attribute seqlen_k is 300; block_table has 3 pages of 96 keys",
    ),
    "a forward pass's own": (dict(features=np.int64(1 << 10)), None, "which the forward pass alone has"),
    "eight bits backward": ({}, (np.int8,), "which have no backward pass"),
}  # fmt: skip


@pytest.mark.parametrize("name", HANDLER)
def test_the_handler_refuses_calls_that_flashtune_did_not_make(name):
    attributes, more, message = HANDLER[name]
    q, out = normal(BATCH, 1, HEADS, DIM), jax.ShapeDtypeStruct((BATCH, 1, HEADS, DIM), np.float16)
    k = np.zeros((BATCH, KEYS, HEADS_KV, DIM), more[0] if more else np.float16)
    backward = more is None or "backward" in name
    operands = (q, k, k, q, np.zeros((BATCH, HEADS, 1), np.float32), q) if backward else (q, k, k, *(more or ())[1:])
    with pytest.raises(Exception) as caught:
        jax.block_until_ready(jax.ffi.ffi_call("flashtune_backward" if backward else "flashtune_forward", out)(*operands, **attributes))
    assert message in str(caught.value)
