"""Block masks: lists of the blocks of scores that count, and their params.

The lists are named as in torch's FlexAttention. Any object with these attributes works, such as a
`torch.nn.attention.flex_attention.BlockMask`.
"""

import operator
import sys
from typing import Any, NamedTuple

from . import _structs
from ._errors import InvalidArgumentError, shown

_pack = _structs.packer(_structs.BLOCK_MASK).pack
NONE = bytes(_structs.packer(_structs.BLOCK_MASK).size)
"""The packed block mask of a call without one."""


class BlockMask(NamedTuple):
    """For each block of queries its blocks of keys, and transposed.

    Arrays are int32 (batch, heads, rows) and (batch, heads, rows, blocks). batch and heads are 1 if
    the lists are the same for all.
    """

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
    """Makes the argument block_mask of `attention` from a dense map.

    blocks: bool (ceil(seqlen_q / block_q), ceil(seqlen_k / block_k)), or (batch, heads, …) of
        these; batch and heads may be 1. True: the block counts, and causal, window and mask hide
        keys in it. A NumPy or JAX array, or a torch tensor on the device of the call.
    full: in the same shape, the blocks that skip the mask. They need not be True in `blocks`.
    block_size: (queries, keys) of a block, or one number for both. Multiples of 16; 128 is fastest.
    """
    size = _size(block_size)
    _expect_blocks(blocks=blocks, full=blocks if full is None else full)
    if full is not None:
        _expect_alike(blocks, full)
    if full is not None and tuple(full.shape) != tuple(blocks.shape):
        raise InvalidArgumentError(f"full has shape {tuple(full.shape)}; it must be that of blocks, {tuple(blocks.shape)}")
    partial = blocks if full is None else blocks & ~full
    lists = [*_lists(partial), *_lists(partial, transposed=True)]
    if full is not None:
        lists += [*_lists(full), *_lists(full, transposed=True)]
    return BlockMask(size, *lists)


def size_of(mask):
    """(block_q, block_k) of a block mask."""
    return _size(mask.BLOCK_SIZE, "block_mask.BLOCK_SIZE")


def _size(block_size, name="block_size"):
    """(block_q, block_k) from a pair of integers of any type, or from one integer for both."""
    try:
        return (operator.index(block_size),) * 2
    except TypeError:
        pass
    try:
        block_q, block_k = map(operator.index, block_size)
        return block_q, block_k
    except (TypeError, ValueError):
        raise InvalidArgumentError(f"{name} is {shown(block_size)}; it must be an integer, or a pair (queries, keys)") from None


def _expect_alike(blocks, full):
    """Refuses two arrays of which one is no torch tensor, and tensors on different devices."""
    torch = sys.modules.get("torch")
    kinds = [torch is not None and isinstance(x, torch.Tensor) for x in (blocks, full)]
    if kinds[0] != kinds[1]:
        raise TypeError(f"full is a {type(full).__name__}; it must be a {type(blocks).__name__}, as blocks is")
    if kinds[0] and full.device != blocks.device:
        raise InvalidArgumentError(f"full is on {full.device}; it must be on {blocks.device}, as blocks is")


def _expect_blocks(**arrays):
    for name, blocks in arrays.items():
        shape, dtype = tuple(getattr(blocks, "shape", ())), getattr(blocks, "dtype", None)
        if hasattr(blocks, "filled"):
            raise TypeError(f"{name} is a masked array, whose mask would be lost; fill it")
        if len(shape) not in (2, 4) or "bool" not in str(dtype):
            found = type(blocks).__name__ if dtype is None else f"{dtype} of shape {shape}"
            raise InvalidArgumentError(
                f"{name} is {found}; it must be a NumPy or JAX array or a torch tensor of bool, (rows, columns) or (batch, heads, rows, columns)"
            )


def _lists(blocks, transposed=False):
    """(num_blocks, indices) of the rows, or of the columns."""
    if len(blocks.shape) == 2:
        blocks = blocks[None, None]
    blocks = blocks.swapaxes(-1, -2) if transposed else blocks
    numpy, jax = sys.modules.get("numpy"), sys.modules.get("jax")
    if numpy is not None and isinstance(blocks, numpy.ndarray):
        order = numpy.argsort(~blocks, axis=-1, kind="stable")
        return blocks.sum(-1).astype("int32"), order.astype("int32")
    if jax is not None and isinstance(blocks, jax.Array):
        return blocks.sum(-1).astype("int32"), (~blocks).argsort(axis=-1, stable=True).astype("int32")
    return blocks.sum(-1).int().contiguous(), (~blocks).int().argsort(dim=-1, stable=True).int().contiguous()


def pack(features, dims, q, lib, backward):
    """(packed block mask, arrays that must live until the launch). q is the array."""
    if features is None or features.block_mask is None:
        return NONE, ()
    mask, (side, other) = features.block_mask, ("q", "kv") if backward else ("kv", "q")
    try:
        block_q, block_k = size_of(mask)
        names = [prefix + side + suffix for prefix in ("", "full_") for suffix in ("_num_blocks", "_indices")]
        arrays = [getattr(mask, name) for name in names]
    except AttributeError as error:
        raise InvalidArgumentError(f"block_mask is {type(mask).__name__}; it must be like a FlexAttention BlockMask: {error}") from None
    batch_size, num_heads_q, _, seqlen_q, seqlen_k, *_ = dims
    if not all(0 < size < 1 << 63 for size in (block_q, block_k)):
        raise InvalidArgumentError(f"block_mask.BLOCK_SIZE is {mask.BLOCK_SIZE!r}; its numbers must be positive and below 2**63")
    blocks_q, blocks_k = -(-seqlen_q // block_q), -(-seqlen_k // block_k)
    rows, columns = (blocks_k, blocks_q) if backward else (blocks_q, blocks_k)
    _expect_columns(mask, f"{other}_num_blocks", columns)
    kept, addresses = [], []

    def take(at, *sizes):
        """The array's shape. Each of `sizes` is a number, a pair of allowed numbers, or None."""
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

    # Lists are shared along dimensions of size 1, and the full lists along the same dimensions.
    counts = take(0, (batch_size, 1), (num_heads_q, 1), rows)
    indices = take(1, *counts, None)
    take(2, *counts)
    take(3, *indices)
    batches, heads, _, max_blocks = indices

    def strides(row):
        return rows * row * heads if batches > 1 else 0, rows * row if heads > 1 else 0

    return _pack(block_q, block_k, *addresses, *strides(1), *strides(max_blocks), max_blocks, max_blocks), kept


def _expect_columns(mask, name, columns):
    """Checks the number of columns, which only the other pass's lists show, if there are any."""
    shape = getattr(getattr(mask, name, None), "shape", None)
    if shape is not None and tuple(shape)[-1:] != (columns,):
        raise InvalidArgumentError(f"block_mask.{name} has shape {tuple(shape)}; it must end in {columns}, the blocks of that side")


def _expect_shape(name, shape, sizes):
    allowed = [size if isinstance(size, tuple) else (size,) for size in sizes]
    if len(shape) != len(allowed) or not all(of == (None,) or size in of for size, of in zip(shape, allowed)):
        wanted = ", ".join("blocks" if of == (None,) else " or ".join(map(str, of)) for of in allowed)
        raise InvalidArgumentError(f"block_mask.{name} has shape {shape}; it must be ({wanted})")
    return shape
