"""Who is measured: functions (q, k, v, causal, dropout_p) -> out on (batch, seqlen, heads, dim) torch tensors.

Causal aligns to the bottom right corner: the last query sees the last key.
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
NAMES = ["cudnn", "fa2", "efficient", "fa4", "flashtune"]


def load(names):
    """The peers that this machine has, and a reason for each that it has not."""
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
    if name == "fa4":
        from flash_attn.cute import flash_attn_func

        def fa4(q, k, v, causal, dropout_p):
            if dropout_p:
                raise NotImplementedError("FA4 has no dropout")
            out = flash_attn_func(q, k, v, causal=causal)
            return out[0] if isinstance(out, tuple) else out

        return fa4
    if name == "flashtune":
        import flashtune

        return lambda q, k, v, causal, dropout_p: flashtune.attention(q, k, v, causal=causal, dropout_p=dropout_p)
    raise ValueError(f"no peer is called {name}; there are {', '.join([*_SDPA, 'fa4', 'flashtune'])}")


def sdpa(name):
    """PyTorch's scaled_dot_product_attention by one of its backends."""
    backend = _SDPA[name]

    def attend(q, k, v, causal, dropout_p):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        mask = None
        if causal and q.shape[2] != k.shape[2]:
            # SDPA's own causal mask is of the top left corner.
            mask, causal = _bottom_right(backend, q.shape[2], k.shape[2], q.dtype, q.device), False
        with sdpa_kernel(backend):
            out = F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=causal, dropout_p=dropout_p, enable_gqa=q.shape[1] != k.shape[1]
            )
        return out.transpose(1, 2)

    return attend


@functools.lru_cache(maxsize=8)
def _bottom_right(backend, seqlen_q, seqlen_k, dtype, device):
    """A causal mask as the backend can take it: FA2 has it built in, the others add a tensor, made once."""
    if backend == SDPBackend.FLASH_ATTENTION:
        return causal_lower_right(seqlen_q, seqlen_k)
    hidden = torch.full((seqlen_q, seqlen_k), -torch.inf, dtype=dtype, device=device)
    return hidden.triu(seqlen_k - seqlen_q + 1)


def flashtune_backward_call(q, k, v, causal, dropout_p, dout):
    """A function without arguments that calls the C library's flashtune_backward on the current stream, with all memory at hand."""
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
