"""Plain attention in differentiable torch operations, in the dtype of its inputs."""

import oracle
import torch
import torch.nn.functional as F
from judge import assert_close
from torch.nn.attention import SDPBackend, sdpa_kernel


def plain(
    q, k, v, bias=None, sinks=None, causal=False, softmax_scale=None, keep=None, window=None, softcap=0.0, alibi_slopes=None,
    mask=None, return_lse=False,
):  # fmt: skip
    """Products and weights have the inputs' dtype.

    `keep`, the scaled dropout mask, multiplies the weights.
    """
    q, k, v = _by_head(q, k, v)
    seqlen_q, seqlen_k = q.shape[2], k.shape[2]
    seen = torch.from_numpy(oracle.seen(seqlen_q, seqlen_k, causal, window)).to(q.device)
    seen = seen if mask is None else seen & mask
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    scores = q @ k.transpose(2, 3) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if alibi_slopes is not None:
        rows, keys = torch.arange(seqlen_q, device=q.device)[:, None], torch.arange(seqlen_k, device=q.device)
        scores = scores - alibi_slopes.to(q.dtype)[..., None, None] * (rows + seqlen_k - seqlen_q - keys).abs()
    if bias is not None:
        scores = scores + bias
    scores = scores.masked_fill(~seen, torch.finfo(q.dtype).min)
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(*scores.shape[:3], 1)], -1)
    # A row without keys has equal scores; the product makes its weights 0 and its gradients finite.
    weights = scores.softmax(-1)[..., :seqlen_k] * seen
    out = ((weights if keep is None else weights * keep) @ v).transpose(1, 2)
    return (out, scores.logsumexp(-1)) if return_lse else out


def math_backend(q, k, v, causal=False, softmax_scale=None):
    """torch's SDPA with its math backend."""
    q, k, v = _by_head(q, k, v)
    seen = torch.from_numpy(oracle.seen(q.shape[2], k.shape[2], causal)).to(q.device)
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=softmax_scale).transpose(1, 2)


def _by_head(q, k, v):
    group = q.shape[2] // k.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)


def with_gradients(function, tensors, dout, **options):
    """[out, gradient of each tensor]"""
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    out = function(*leaves, **options)
    return [out, *torch.autograd.grad(out, leaves, dout.to(out.dtype))]


def judge(function, tensors, dout, names=("q", "k", "v"), exact=plain, **options):
    """Judges a function's output and gradients. `options` go to the plain versions too."""
    dtype = str(tensors[0].dtype).removeprefix("torch.")
    truth = with_gradients(exact, [x.double() for x in tensors], dout, **options)
    naive = with_gradients(plain, tensors, dout, **options)
    actual = with_gradients(function, tensors, dout)
    for name, *versions in zip(("out", *("d" + name for name in names)), actual, naive, truth):
        arrays = (x.detach().double().cpu().numpy() for x in versions)
        assert versions[0].dtype == tensors[0].dtype
        assert_close(name, *arrays, dtype, gradient=name != "out")


def random(*shapes, dtype, device, seed=0):
    """Normal tensors of these shapes, with the same values on every device."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]
