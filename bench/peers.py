"""The attention implementations that a bench compares, each as a function (q, k, v, causal,
dropout_p) -> out on torch tensors of shape (batch, seqlen, heads, dim). Causal aligns to the bottom
right corner: the last query sees the last key.

PyTorch has cuDNN, FA2 and the memory-efficient kernels. FA3 is `flash_attn_interface` and FA4
`flash_attn.cute`, where these can be imported. This file knows neither problems nor timing.
"""

import functools

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

_SDPA = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "fa2": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
# What bench/attention.py measures unless told otherwise.
NAMES = ["cudnn", "fa2", "efficient", "fa3", "fa4", "flashtune"]


def load(names):
    """{name: function} of the peers that this machine has, and {name: reason} of those that it
    lacks."""
    found, missing = {}, {}
    for name in names:
        try:
            found[name] = _load(name)
        except Exception as error:
            missing[name] = f"{type(error).__name__}: {error}"
    return found, missing


def _load(name):
    if name in _SDPA:
        return sdpa(name)
    if name in _LOADERS:
        return _LOADERS[name]()
    raise ValueError(f"no peer is called {name}; the peers are {', '.join([*_SDPA, *_LOADERS])}")


def _fa3():
    from flash_attn_interface import flash_attn_func

    return _without_dropout("FA3", flash_attn_func)


def _fa4():
    from flash_attn.cute import flash_attn_func

    return _without_dropout("FA4", flash_attn_func)


def _without_dropout(name, flash_attn_func):
    def attend(q, k, v, causal, dropout_p):
        if dropout_p:
            raise NotImplementedError(f"{name} has no dropout")
        out = flash_attn_func(q, k, v, causal=causal)
        # Some versions return (out, lse).
        return out[0] if isinstance(out, tuple) else out

    return attend


def _flashtune():
    import flashtune

    return lambda q, k, v, causal, dropout_p: flashtune.attention(q, k, v, causal=causal, dropout_p=dropout_p)


_LOADERS = {"fa3": _fa3, "fa4": _fa4, "flashtune": _flashtune}


def sdpa(name):
    """PyTorch's scaled_dot_product_attention by one of its backends."""
    backend = _SDPA[name]

    def attend(q, k, v, causal, dropout_p):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        mask = None
        if causal and q.shape[2] != k.shape[2]:
            # SDPA's own causal mask aligns to the top left corner.
            mask, causal = _bottom_right(backend, q.shape[2], k.shape[2], q.dtype, q.device), False
        with sdpa_kernel(backend):
            out = F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=causal, dropout_p=dropout_p, enable_gqa=q.shape[1] != k.shape[1]
            )
        return out.transpose(1, 2)

    return attend


@functools.lru_cache(maxsize=8)
def _bottom_right(backend, seqlen_q, seqlen_k, dtype, device):
    """A causal mask in the form that the backend takes: built in for FA2, else a tensor to add,
    which is made once."""
    if backend == SDPBackend.FLASH_ATTENTION:
        return causal_lower_right(seqlen_q, seqlen_k)
    hidden = torch.full((seqlen_q, seqlen_k), -torch.inf, dtype=dtype, device=device)
    return hidden.triu(seqlen_k - seqlen_q + 1)


def flashtune_backward_call(q, k, v, causal, dropout_p, dout):
    """A function without arguments that calls the C library's flashtune_backward on the current
    stream. All memory that the call needs is allocated before."""
    from flashtune import _call, _torch_launch
    from flashtune._context import context

    ref = _torch_launch.ref
    opts, seed = _call.options(causal, None, dropout_p, False), (1, 2) if dropout_p else None
    out, lse = _torch_launch.launch_forward(q, k, v, opts, seed)
    read = [ref(x) for x in (q, k, v, out)]
    gradients = [torch.empty_like(x) for x in (q, k, v)]
    device, number, dims, *_ = _torch_launch.describe(q, k, v, opts, None, True)
    seed_fields = (*seed, 0, 0) if seed else _call.NO_SEED
    params = _call.backward(
        number, opts, dims, seed_fields, *read, lse.data_ptr(), ref(dout), *(ref(x) for x in gradients)
    )
    run = context(device).backward
    size = run.workspace_bytes(params)
    workspace = torch.empty(size, dtype=torch.uint8, device=q.device)
    held = (q, k, v, out, lse, dout, gradients)
    stream = torch.cuda.current_stream().cuda_stream
    return lambda held=held: run.launch(params, workspace.data_ptr(), size, stream)
