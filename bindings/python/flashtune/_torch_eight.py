"""Quantising torch tensors to 8 bits, and rotating them."""

import torch

from . import _quantize, _torch_launch
from ._context import CPU, context
from ._errors import InvalidArgumentError


def quantize(x, dtype, descale, keys_per_descale, heads_per_descale, rotation_seed):
    """(numbers, scales) without autograd."""
    if torch.compiler.is_dynamo_compiling():
        from ._torch_untraced import untraced

        return untraced(quantize, x, dtype, descale, keys_per_descale, heads_per_descale, rotation_seed)
    number = _torch_launch.EIGHT.get(dtype) if isinstance(dtype, torch.dtype) else None
    if number is None:
        allowed = ", ".join(map(str, _torch_launch.EIGHT))
        raise InvalidArgumentError(f"dtype is {dtype}; it must be one of {allowed}")
    shape, full = _quantize.shape_of_scales(x.shape, keys_per_descale, heads_per_descale)
    device, of_x = _torch_launch.sixteen_bits("x", x)
    x = _torch_launch.expressible(x.detach())
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    computes = descale is None
    if computes:
        # The library writes the scales of rows alone.
        descale = (x.new_empty if x.shape[1] else x.new_ones)(shape, dtype=torch.float32)
    descale, *_ = _torch_launch.scales("descale", descale, x)
    if descale.dim() and tuple(descale.shape) != shape:
        raise InvalidArgumentError(f"descale has shape {tuple(descale.shape)}; it must be a number or {shape}")
    at = _torch_launch.scales_ref(descale, bool(keys_per_descale))
    if computes:
        # A written array has no shared elements, not even in a dim of size 1.
        at = (descale.data_ptr(), full[1] * full[2], full[2], 1)
    params = _quantize.pack(
        of_x, number, x.shape, _torch_launch.ref(x), _torch_launch.ref(out), at, keys_per_descale, heads_per_descale, computes,
        rotation_seed,
    )  # fmt: skip
    _launch(params, device)
    return out, descale


def rotate(x, seed):
    """The rotated rows without autograd."""
    if torch.compiler.is_dynamo_compiling():
        from ._torch_untraced import untraced

        return untraced(rotate, x, seed)
    _quantize.expect_rows(x.shape)
    device, of_x = _torch_launch.sixteen_bits("x", x)
    x = _torch_launch.expressible(x.detach())
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(_quantize.pack_rotation(of_x, x.shape, _torch_launch.ref(x), _torch_launch.ref(out), seed), device)
    return out


def _launch(params, device):
    context(device).quantize(params, None if device == CPU else _torch_launch.current_stream(device))
