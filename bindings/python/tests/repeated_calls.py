"""Tensors of the tests of repeated calls, and what they compare."""

import torch
from flashtune import _torch_drafts
from oracle_torch import random
from test_torch import working_dtype

BATCH, SEQLEN, HEADS, DIM = 2, 48, 4, 32


def tensors(device, *shapes, dtype=None, seed=0):
    shapes = shapes or ((BATCH, SEQLEN, HEADS, DIM),) * 3
    return random(*shapes, dtype=dtype or working_dtype(device), device=device, seed=seed)


def fresh(call):
    """The result of a call that finds no draft."""
    functions = {name: getattr(_torch_drafts, name) for name in ("repeat", "_keep", "alias", "forget", "count")}
    _torch_drafts.start()
    try:
        return call()
    finally:
        for name, function in functions.items():
            setattr(_torch_drafts, name, function)


def assert_equal(found, expected):
    found, expected = ([x] if isinstance(x, torch.Tensor) else x for x in (found, expected))
    assert len(found) == len(expected)
    for one, other in zip(found, expected):
        assert one.dtype == other.dtype and one.stride() == other.stride()
        assert torch.equal(one, other)


def gradients(out, inputs, seed=9):
    generator = torch.Generator().manual_seed(seed)
    return torch.autograd.grad(out, inputs, torch.randn(out.shape, generator=generator).to(out))


def varlen(device, seed=0):
    q, k, v = tensors(device, *((60, HEADS, DIM),) * 3, seed=seed)
    return q, k, v, torch.tensor([0, 25, 60], dtype=torch.int32, device=device)
