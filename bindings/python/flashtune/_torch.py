"""Attention on torch tensors, on the CPU or on CUDA's current stream, with autograd.

Outputs and workspace come from torch's allocator on the current stream, and random seeds from torch's generators as
a tensor that the kernels read at launch: a call can be captured into a CUDA graph, each replay draws a new mask, and
`torch.manual_seed` reproduces it.
"""

import torch
from torch.autograd.function import once_differentiable

from . import _call
from ._context import CPU, context
from ._errors import InvalidArgumentError, UnsupportedError

_NUMBERS = {getattr(torch, name): number for name, number in _call.DTYPES.items()}
_FLOAT32 = torch.float32
# What the library asks of a workspace's address; torch's CPU allocator promises less, its CUDA allocator more.
_ALIGNMENT = 256

if hasattr(torch._C, "_cuda_getCurrentRawStream"):
    # A tenth of the time of torch.cuda.current_stream(), which builds a Stream object.
    _current_stream = torch._C._cuda_getCurrentRawStream
else:

    def _current_stream(device):
        return torch.cuda.current_stream(device).cuda_stream


def attention(q, k, v, causal, softmax_scale, dropout_p, seed, deterministic, return_lse):
    """out or (out, lse), differentiable with respect to q, k and v."""
    _expect_tensors(k=k, v=v)
    opts = _call.options(causal, softmax_scale, dropout_p, deterministic)
    if torch.compiler.is_compiling():
        from . import _torch_ops

        return _torch_ops.attention(q, k, v, opts, seed, return_lse)
    seed = resolve_seed(seed, dropout_p, q)
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        return _Attention.apply(q, k, v, opts, seed, return_lse)
    out, lse = launch_forward(q, k, v, opts, seed, want_lse=return_lse)
    return (out, lse) if return_lse else out


def attention_forward(q, k, v, causal, softmax_scale, dropout_p, seed):
    """(out, lse) without autograd."""
    _expect_tensors(k=k, v=v)
    opts = _call.options(causal, softmax_scale, dropout_p)
    with torch.no_grad():
        return launch_forward(q, k, v, opts, resolve_seed(seed, dropout_p, q))


def attention_backward(dout, q, k, v, out, lse, causal, softmax_scale, dropout_p, seed, deterministic):
    """(dq, dk, dv) without autograd."""
    _expect_tensors(k=k, v=v, out=out, lse=lse, dout=dout)
    opts = _call.options(causal, softmax_scale, dropout_p, deterministic)
    with torch.no_grad():
        return launch_backward(dout, q, k, v, out, lse, opts, resolve_seed(seed, dropout_p, q))


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, opts, seed, return_lse):
        out, lse = launch_forward(q, k, v, opts, seed)
        _save(ctx, q, k, v, out, lse, opts, seed)
        if not return_lse:
            return out
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx, dout, _dlse=None):
        q, k, v, out, lse, opts, seed = _saved(ctx)
        dq, dk, dv = launch_backward(dout, q, k, v, out, lse, opts, seed)
        return dq, dk, dv, None, None, None


class PackedAttention(torch.autograd.Function):
    """Attention whose k and v, or q, k and v, are slices of one tensor's third dim; so are their gradients."""

    @staticmethod
    def forward(ctx, q, packed, opts, seed, return_lse):
        ctx.separate_q = q is not None
        queries, k, v = _slices(q, packed)
        out, lse = launch_forward(queries, k, v, opts, seed)
        _save(ctx, q, packed, None, out, lse, opts, seed)
        if not return_lse:
            return out
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx, dout, _dlse=None):
        q, packed, _, out, lse, opts, seed = _saved(ctx)
        dq = torch.empty_like(q, memory_format=torch.contiguous_format) if ctx.separate_q else None
        dpacked = torch.empty_like(packed, memory_format=torch.contiguous_format)
        launch_backward(dout, *_slices(q, packed), out, lse, opts, seed, _slices(dq, dpacked))
        return dq, dpacked, None, None, None


def _slices(q, packed):
    """(q, k, v) of a packed pair or, where q is None, of a packed triple."""
    return packed.unbind(2) if q is None else (q, *packed.unbind(2))


def _save(ctx, q, k, v, out, lse, opts, seed):
    # A seed read from device memory must live, unchanged, until backward has read it again.
    tensor = seed if isinstance(seed, torch.Tensor) else None
    ctx.save_for_backward(q, k, v, out, lse, tensor)
    ctx.opts = opts
    ctx.seed = None if tensor is not None else seed


def _saved(ctx):
    *tensors, seed = ctx.saved_tensors
    return (*tensors, ctx.opts, ctx.seed if seed is None else seed)


def launch_forward(q, k, v, opts, seed, want_lse=True):
    """(out, lse or None). `seed` is what `resolve_seed` returned."""
    dtype = q.dtype
    device, number = _check_same(q, dtype, k=k, v=v)
    q, k, v = _expressible(q), _expressible(k), _expressible(v)
    dims = _call.sizes(q.shape, k.shape, v.shape)
    batch_size, num_heads_q, _, seqlen_q, _, _, head_dim_v = dims
    out = q.new_empty((batch_size, seqlen_q, num_heads_q, head_dim_v))
    lse = q.new_empty((batch_size, num_heads_q, seqlen_q), dtype=_FLOAT32) if want_lse else None
    params = _call.forward(
        number, opts, dims, _seed_fields(seed), _ref(q), _ref(k), _ref(v), _ref(out), lse.data_ptr() if want_lse else 0
    )
    _launch(context(device).forward, params, q, device)
    return out, lse


def launch_backward(dout, q, k, v, out, lse, opts, seed, gradients=None):
    """(dq, dk, dv), written into `gradients` where given."""
    dtype = q.dtype
    device, number = _check_same(q, dtype, k=k, v=v, out=out, dout=dout)
    q, k, v, out, dout = _expressible(q), _expressible(k), _expressible(v), _expressible(out), _expressible(dout)
    dims = _call.sizes(q.shape, k.shape, v.shape)
    batch_size, num_heads_q, _, seqlen_q, _, _, head_dim_v = dims
    _call.expect_shape("out", out.shape, (batch_size, seqlen_q, num_heads_q, head_dim_v))
    _call.expect_shape("dout", dout.shape, (batch_size, seqlen_q, num_heads_q, head_dim_v))
    _call.expect_shape("lse", lse.shape, (batch_size, num_heads_q, seqlen_q))
    if lse.dtype != _FLOAT32 or lse.device != q.device:
        raise InvalidArgumentError(f"lse is {lse.dtype} on {lse.device}; it must be torch.float32 on {q.device}")
    lse = lse.contiguous()
    dq, dk, dv = gradients or (q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape))
    params = _call.backward(
        number, opts, dims, _seed_fields(seed), _ref(q), _ref(k), _ref(v), _ref(out), lse.data_ptr(),
        _ref(dout), _ref(dq), _ref(dk), _ref(dv),
    )  # fmt: skip
    _launch(context(device).backward, params, q, device)
    return dq, dk, dv


def describe(q, k, v):
    """(device, dtype number, sizes, tensor refs of q, k, v) for the calls that read no data."""
    _expect_tensors(k=k, v=v)
    device, number = _check_same(q, q.dtype, k=k, v=v)
    tensors = [_expressible(x) for x in (q, k, v)]
    return device, number, _call.sizes(*(x.shape for x in tensors)), [_ref(x) for x in tensors]


def resolve_seed(seed, dropout_p, q):
    """What a launch reads: None without dropout, a pair of ints, or an int64 tensor (seed, offset) beside q."""
    if not dropout_p:
        return None
    if seed is None:
        # Drawn on the device by the default generator, so that nothing waits and a graph replay draws anew.
        return torch.empty(2, dtype=torch.int64, device=q.device).random_()
    if isinstance(seed, torch.Tensor):
        if seed.dtype != torch.int64 or tuple(seed.shape) != (2,) or seed.device != q.device:
            found = f"{seed.dtype} of shape {tuple(seed.shape)} on {seed.device}"
            raise InvalidArgumentError(f"seed is {found}; a tensor must be torch.int64 (seed, offset) on {q.device}")
        return seed.contiguous()
    pair = _call.integer_seed(seed)
    if pair is None:
        raise InvalidArgumentError(f"seed is {seed!r}; it must be an int, a pair of ints or a tensor (seed, offset)")
    return pair


def _seed_fields(seed):
    if seed is None:
        return _call.NO_SEED
    if isinstance(seed, torch.Tensor):
        address = seed.data_ptr()
        return (0, 0, address, address + 8)
    return (*seed, 0, 0)


def _expect_tensors(**tensors):
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} is a {type(tensor).__name__}; it must be a torch tensor, as q is")


def _check_same(q, dtype, **others):
    """(device, dtype number) of q, once all others are known to agree."""
    device = q.device
    for name, tensor in others.items():
        if tensor.dtype != dtype or tensor.device != device:
            expected = f"{dtype} on {device}, as q is"
            raise InvalidArgumentError(f"{name} is {tensor.dtype} on {tensor.device}; it must be {expected}")
    number = _NUMBERS.get(dtype)
    if number is None:
        raise InvalidArgumentError(f"q is {dtype}; it must be torch.float16, torch.bfloat16 or torch.float32")
    if device.type == "cuda":
        return device.index, number
    if device.type == "cpu":
        return CPU, number
    raise UnsupportedError(f"q is on {device}; flashtune runs on cuda and cpu tensors")


def _expressible(tensor):
    """The tensor, or a copy where its last dim is not contiguous."""
    return tensor if tensor.dim() != 4 or tensor.stride(3) == 1 else tensor.contiguous()


def _ref(tensor):
    stride_batch, stride_seqlen, stride_head, _ = tensor.stride()
    return (tensor.data_ptr(), stride_batch, stride_seqlen, stride_head)


def _launch(run, params, q, device):
    size = run.workspace_bytes(params)
    if device == CPU:
        if not size:
            return run.launch(params, None, 0, None)
        memory = torch.empty(size + _ALIGNMENT, dtype=torch.uint8)
        address = memory.data_ptr()
        return run.launch(params, address + -address % _ALIGNMENT, size, None)
    if not size:
        return run.launch(params, None, 0, _current_stream(device))
    memory = torch.empty(size, dtype=torch.uint8, device=q.device)
    return run.launch(params, memory.data_ptr(), size, _current_stream(device))
