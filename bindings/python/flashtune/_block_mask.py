"""Block masks: which blocks of scores count, as lists with the names of torch's FlexAttention, and as the params have them.

Any object with those attributes will do, so that a `torch.nn.attention.flex_attention.BlockMask` works as it is.
"""

import operator
import sys
from typing import Any, NamedTuple

from . import _structs
from ._errors import InvalidArgumentError

_pack = _structs.packer(_structs.BLOCK_MASK).pack
NONE = bytes(_structs.packer(_structs.BLOCK_MASK).size)
"""The packed part of a call without a block mask."""


class BlockMask(NamedTuple):
    """Of each block of queries its blocks of keys, and transposed; int32 (batch, heads, rows) and (batch, heads, rows, blocks),
    of batch and heads 1 where lists are the same."""

    BLOCK_SIZE: tuple
    kv_num_blocks: Any
    kv_indices: Any
    q_num_blocks: Any
    q_indices: Any
    full_kv_num_blocks: Any = None
    full_kv_indices: Any = None
    full_q_num_blocks: Any = None
    full_q_indices: Any = None


def block_mask(blocks, full=None, *, block_size=128):
    """The argument block_mask of `attention` from a dense map.

    blocks: of bool, (ceil(seqlen_q / block_q), ceil(seqlen_k / block_k)), or (batch, heads, …) of those with 1 for any number of
        either: which blocks are looked at, by causal, window and mask as ever. NumPy or torch, on the device of the call.
    full: likewise, the blocks in which mask is not looked at; they need not be among `blocks`.
    block_size: queries and keys of a block, or a number for both; multiples of 16, fastest of 128.
    """
    size = _size(block_size)
    _expect_blocks(blocks=blocks, full=blocks if full is None else full)
    if full is not None and tuple(full.shape) != tuple(blocks.shape):
        raise InvalidArgumentError(f"full has shape {tuple(full.shape)}; it must be that of blocks, {tuple(blocks.shape)}")
    partial = blocks if full is None else blocks & ~full
    lists = [*_lists(partial), *_lists(partial, transposed=True)]
    if full is not None:
        lists += [*_lists(full), *_lists(full, transposed=True)]
    return BlockMask(size, *lists)


def _size(block_size, name="block_size"):
    """(block_q, block_k) of a pair of integers of any type, or of one for both."""
    try:
        return (operator.index(block_size),) * 2
    except TypeError:
        pass
    try:
        block_q, block_k = map(operator.index, block_size)
        return block_q, block_k
    except (TypeError, ValueError):
        raise InvalidArgumentError(f"{name} is {block_size!r}; it must be an integer, or one for queries and one for keys") from None


def _expect_blocks(**arrays):
    for name, blocks in arrays.items():
        shape, dtype = tuple(getattr(blocks, "shape", ())), getattr(blocks, "dtype", None)
        if len(shape) not in (2, 4) or "bool" not in str(dtype):
            found = type(blocks).__name__ if dtype is None else f"{dtype} of shape {shape}"
            raise InvalidArgumentError(
                f"{name} is {found}; it must be a NumPy array or a torch tensor of bool, (rows, columns) or (batch, heads, rows, columns)"
            )


def _lists(blocks, transposed=False):
    """(num_blocks, indices) of the rows, or of the columns."""
    if len(blocks.shape) == 2:
        blocks = blocks[None, None]
    blocks = blocks.swapaxes(-1, -2) if transposed else blocks
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(blocks, numpy.ndarray):
        order = numpy.argsort(~blocks, axis=-1, kind="stable")
        return blocks.sum(-1).astype("int32"), order.astype("int32")
    return blocks.sum(-1).int().contiguous(), (~blocks).int().argsort(dim=-1, stable=True).int().contiguous()


def pack(features, dims, q, lib, backward):
    """(the packed part of the params, what must live until the launch). q is the array."""
    if features is None or features.block_mask is None:
        return NONE, ()
    mask, (side, other) = features.block_mask, ("q", "kv") if backward else ("kv", "q")
    try:
        block_q, block_k = _size(mask.BLOCK_SIZE, "block_mask.BLOCK_SIZE")
        names = [prefix + side + suffix for prefix in ("", "full_") for suffix in ("_num_blocks", "_indices")]
        arrays = [getattr(mask, name) for name in names]
    except AttributeError as error:
        raise InvalidArgumentError(f"block_mask is {type(mask).__name__}; it must be like a FlexAttention BlockMask: {error}") from None
    batch_size, num_heads_q, _, seqlen_q, seqlen_k, *_ = dims
    if min(block_q, block_k) < 1:
        raise InvalidArgumentError(f"block_mask.BLOCK_SIZE is {mask.BLOCK_SIZE!r}; it must be of positive numbers")
    blocks_q, blocks_k = -(-seqlen_q // block_q), -(-seqlen_k // block_k)
    rows, columns = (blocks_k, blocks_q) if backward else (blocks_q, blocks_k)
    _expect_columns(mask, f"{other}_num_blocks", columns)
    kept, addresses = [], []

    def take(at, *sizes):
        """The shape of an array, which must be of `sizes`: a number, a pair of which either will do, or None for any."""
        name, array = names[at], arrays[at]
        if array is None and name.startswith("full_"):
            addresses.append(0)
            return None
        if array is None:
            raise InvalidArgumentError(f"block_mask.{name} is None; this pass needs it")
        array, address = lib.vector(f"block_mask.{name}", array, "int32", q)
        kept.append(array)
        addresses.append(address)
        return _expect_shape(name, tuple(array.shape), sizes)

    # Lists are the same along dimensions of size 1, full ones along those of the others.
    counts = take(0, (batch_size, 1), (num_heads_q, 1), rows)
    indices = take(1, *counts, None)
    take(2, *counts)
    take(3, *indices)
    batches, heads, _, max_blocks = indices

    def strides(row):
        return rows * row * heads if batches > 1 else 0, rows * row if heads > 1 else 0

    return _pack(block_q, block_k, *addresses, *strides(1), *strides(max_blocks), max_blocks, max_blocks), kept


def _expect_columns(mask, name, columns):
    """The lists of this pass do not say how many columns they are of; those of the other pass do, where they are there."""
    shape = getattr(getattr(mask, name, None), "shape", None)
    if shape is not None and tuple(shape)[-1:] != (columns,):
        raise InvalidArgumentError(f"block_mask.{name} has shape {tuple(shape)}; it must end in {columns}, the blocks of that side")


def _expect_shape(name, shape, sizes):
    allowed = [size if isinstance(size, tuple) else (size,) for size in sizes]
    if len(shape) != len(allowed) or not all(of == (None,) or size in of for size, of in zip(shape, allowed)):
        wanted = ", ".join("blocks" if of == (None,) else " or ".join(map(str, of)) for of in allowed)
        raise InvalidArgumentError(f"block_mask.{name} has shape {shape}; it must be ({wanted})")
    return shape
