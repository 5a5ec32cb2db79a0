"""Block masks on NumPy arrays by the CPU backend: against the equal dense mask, and refused
arguments.
"""

from types import SimpleNamespace

import flashtune
import numpy as np
import pytest
from test_features import check, normal
from test_numpy import DTYPES

GENERATOR = np.random.default_rng(17)
F32 = DTYPES[0]
BATCH, HEADS, SEQLEN_Q, SEQLEN_K, BLOCK = 2, 4, 150, 280, (32, 48)
ROWS, COLUMNS = 5, 6


def spread(blocks):
    """Expands blocks to one element for each score."""
    return np.repeat(np.repeat(blocks, BLOCK[0], -2), BLOCK[1], -1)[..., :SEQLEN_Q, :SEQLEN_K]


def inputs(dtype):
    shapes = [(BATCH, SEQLEN_Q, HEADS, 40), (BATCH, SEQLEN_K, 2, 40), (BATCH, SEQLEN_K, 2, 24), (BATCH, SEQLEN_Q, HEADS, 24)]
    return [normal(*shape).astype(dtype) for shape in shapes]


def random_blocks(*shape):
    return GENERATOR.random((*shape, ROWS, COLUMNS)) < 0.4


def both_passes(q, k, v, dout, **options):
    out, lse = flashtune.attention_forward(q, k, v, **options)
    return out, lse, *flashtune.attention_backward(dout, q, k, v, out, lse, **options)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("shape", [(), (1, 1), (1, HEADS), (BATCH, 1), (BATCH, HEADS)], ids=str)
def test_a_block_mask_equals_its_dense_mask(shape, dtype):
    blocks = random_blocks(*shape)
    mask = np.broadcast_to(spread(blocks), (BATCH, HEADS, SEQLEN_Q, SEQLEN_K))
    tensors = inputs(dtype)
    listed = both_passes(*tensors, block_mask=flashtune.block_mask(blocks, block_size=BLOCK), causal=True)
    dense = both_passes(*tensors, mask=mask, causal=True)
    tolerance = 1e-5 if dtype == F32 else 2e-2
    for one, other in zip(listed, dense):
        np.testing.assert_allclose(one.astype(np.float64), other.astype(np.float64), rtol=tolerance, atol=tolerance)
    # The dense mask itself agrees with the definition.
    check(*tensors, dtype, mask=mask, causal=True)


def test_full_blocks_skip_the_mask():
    blocks, full = random_blocks(1, HEADS), random_blocks(1, HEADS)
    mask = GENERATOR.random((1, HEADS, SEQLEN_Q, SEQLEN_K)) < 0.6
    tensors = inputs(F32)
    block_mask = flashtune.block_mask(blocks, full, block_size=BLOCK)
    listed = both_passes(*tensors, block_mask=block_mask, mask=mask, window=(90, 30))
    dense = both_passes(*tensors, mask=spread(full) | (spread(blocks) & mask), window=(90, 30))
    for one, other in zip(listed, dense):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


def test_any_object_with_the_names_of_flex_attention_works():
    made = flashtune.block_mask(random_blocks(BATCH, 1), block_size=BLOCK)
    alike = SimpleNamespace(**made._asdict(), mask_mod=None)
    tensors = inputs(F32)
    for one, other in zip(both_passes(*tensors, block_mask=made), both_passes(*tensors, block_mask=alike)):
        assert (one == other).all()


def test_rows_without_a_block_see_nothing():
    blocks = random_blocks()
    blocks[1] = False
    q, k, v, dout = inputs(F32)
    out, lse, dq, *_ = both_passes(q, k, v, dout, block_mask=flashtune.block_mask(blocks, block_size=BLOCK))
    rows = slice(BLOCK[0], 2 * BLOCK[0])
    assert (out[:, rows] == 0).all() and (dq[:, rows] == 0).all() and np.isneginf(lse[:, :, rows]).all()


def test_invalid_block_masks_are_refused_by_name():
    made = flashtune.block_mask(random_blocks(1, HEADS), block_size=BLOCK)
    q, k, v, _ = inputs(F32)

    def refused(word, block_mask, **options):
        with pytest.raises(flashtune.InvalidArgumentError, match=word):
            flashtune.attention(q, k, v, block_mask=block_mask, **options)

    with pytest.raises(TypeError, match="blocks is a masked array, whose mask would be lost"):
        flashtune.block_mask(np.ma.masked_array(np.ones((2, 2), bool)))
    refused("block_mask.BLOCK_SIZE is .*; its numbers must be positive", made._replace(BLOCK_SIZE=(1 << 70, 16)))
    refused("block_mask is str", "causal")
    refused("block_mask.kv_indices is None", made._replace(kv_indices=None))
    refused("block_mask.kv_num_blocks is int64", made._replace(kv_num_blocks=made.kv_num_blocks.astype(np.int64)))
    refused("block_mask.kv_num_blocks has shape", made._replace(kv_num_blocks=made.kv_num_blocks[:, :3]))
    refused("block_mask.kv_indices has shape", made._replace(kv_indices=made.kv_indices[:, :1]))
    refused("block_mask.full_kv_indices has shape", flashtune.block_mask(*[random_blocks(1, 1)] * 2, block_size=BLOCK)._replace(
        full_kv_indices=made.kv_indices))  # fmt: skip
    refused("block_mask.BLOCK_SIZE is", made._replace(BLOCK_SIZE=(0, 48)))
    refused("block_mask.BLOCK_SIZE is", made._replace(BLOCK_SIZE=(32, 48, 64)))
    refused("block_mask.indices.* must be from 0 to 5", made._replace(kv_indices=made.kv_indices + 6))
    # Lists for too few keys: the last block would never be seen.
    short = flashtune.block_mask(random_blocks(1, HEADS)[..., :-1], block_size=BLOCK)
    refused("block_mask.q_num_blocks has shape .* must end in 6", short)
    refused("block_mask.kv_num_blocks has shape", flashtune.block_mask(random_blocks(1, HEADS)[..., :-1, :], block_size=BLOCK))
    refused("block_mask", flashtune.block_mask(random_blocks(1, HEADS).swapaxes(-1, -2), block_size=BLOCK))
    # Without the other pass's lists there is nothing to check.
    flashtune.attention(q, k, v, block_mask=made._replace(q_num_blocks=None, q_indices=None))


def test_lists_of_too_few_queries_are_refused_backward_too():
    q, k, v, dout = inputs(F32)
    out, lse = flashtune.attention_forward(q, k, v)
    short = flashtune.block_mask(random_blocks(1, HEADS)[..., :-1, :], block_size=BLOCK)
    with pytest.raises(flashtune.InvalidArgumentError, match="block_mask.kv_num_blocks has shape .* must end in 5"):
        flashtune.attention_backward(dout, q, k, v, out, lse, block_mask=short)


def test_blocks_must_be_bool_and_block_size_integers():
    def refused(word, *arguments, **options):
        with pytest.raises(flashtune.InvalidArgumentError, match=word):
            flashtune.block_mask(*arguments, **options)

    ones = np.ones((2, 2), bool)
    refused("blocks is float64 of shape", np.ones((2, 2)))
    refused("blocks is bool of shape", np.ones(4, bool))
    refused("blocks is list", [[True]])
    refused("full is list", ones, [[True, True], [True, True]])
    refused("full has shape", ones, ones[:1])
    for size in ("128", 128.0, (128,), (128, 64.0), None):
        refused("block_size is", ones, block_size=size)
    for size in (np.int64(128), [np.int32(128), 128], np.array([128, 128])):
        assert flashtune.block_mask(ones, block_size=size).BLOCK_SIZE == (128, 128)
