"""Attention written down plainly in NumPy: fp64 for the truth, fp32 rounded to a dtype at each step for the yardstick.

Also the dropout mask from its documentation (Philox4x32-10 on seed, offset, head, row and key), written anew so that
nothing is shared with what it tests.
"""

import numpy as np


class Result:
    def __init__(self, out, lse, dq=None, dk=None, dv=None):
        self.out, self.lse, self.dq, self.dk, self.dv = out, lse, dq, dk, dv


def attention(q, k, v, dout=None, causal=False, softmax_scale=None, dropout_p=0.0, seed=(0, 0), rounded_to=None):
    """The result by fp64 maths; with `rounded_to` by fp32 maths, every product and weight rounded to that dtype."""
    work = np.float64 if rounded_to is None else np.float32

    def rounded(x):
        return x if rounded_to is None else x.astype(rounded_to).astype(work)

    q, k, v = (x.astype(work).transpose(0, 2, 1, 3) for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    k_all, v_all = np.repeat(k, group, 1), np.repeat(v, group, 1)
    scale = work(q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale)
    seen = _seen(q.shape[2], k.shape[2], causal)
    scores = np.where(seen, rounded(q @ k_all.swapaxes(2, 3)) * scale, work(-np.inf))
    row_max = scores.max(-1, keepdims=True, initial=-np.inf)
    empty = ~seen.any(-1)
    weights = np.where(seen, np.exp(scores - np.where(np.isneginf(row_max), work(0), row_max)), work(0))
    total = weights.sum(-1, keepdims=True)
    with np.errstate(divide="ignore"):
        lse = np.where(empty, -np.inf, (row_max + np.log(total))[..., 0])
    probabilities = rounded(weights / np.where(total == 0, work(1), total))
    keep = np.ones_like(probabilities)
    if dropout_p:
        keep = mask(q.shape[0], q.shape[1], q.shape[2], k.shape[2], dropout_p, *seed) * work(keep_scale(dropout_p))
    out = rounded(rounded(probabilities * keep) @ v_all)
    if dout is None:
        return Result(out.transpose(0, 2, 1, 3), lse)

    dout = dout.astype(work).transpose(0, 2, 1, 3)
    dv_all = rounded((rounded(probabilities * keep)).swapaxes(2, 3) @ dout)
    dprobabilities = rounded(dout @ v_all.swapaxes(2, 3)) * keep
    delta = (dout * out).sum(-1, keepdims=True)
    dscores = rounded(probabilities * (dprobabilities - delta)) * scale
    dq = rounded(dscores @ k_all)
    dk_all = rounded(dscores.swapaxes(2, 3) @ q)
    dk, dv = (x.reshape(*k.shape[:2], group, *x.shape[2:]).sum(2) for x in (dk_all, dv_all))
    return Result(*(x.transpose(0, 2, 1, 3) if x.ndim == 4 else x for x in (out, lse, dq, rounded(dk), rounded(dv))))


def _seen(seqlen_q, seqlen_k, causal):
    rows, keys = np.arange(seqlen_q)[:, None], np.arange(seqlen_k)[None, :]
    if not causal:
        return np.ones((seqlen_q, seqlen_k), bool)
    shift = 0 if causal == "top-left" else seqlen_k - seqlen_q
    return keys <= rows + shift


def threshold(dropout_p):
    return min(int(np.floor(float(np.float32(dropout_p)) * 65536 + 0.5)), 65535)


def keep_scale(dropout_p):
    return 65536 / (65536 - threshold(dropout_p))


def mask(batch_size, num_heads_q, seqlen_q, seqlen_k, dropout_p, seed, offset):
    """True where a score is kept: (batch, heads_q, seqlen_q, seqlen_k)."""
    head = np.arange(batch_size * num_heads_q, dtype=np.uint64).reshape(-1, 1, 1)
    row = np.arange(seqlen_q, dtype=np.uint64).reshape(1, -1, 1)
    key = np.arange(seqlen_k, dtype=np.uint64).reshape(1, 1, -1)
    shape = (batch_size * num_heads_q, seqlen_q, seqlen_k)
    counter = [
        np.broadcast_to(part, shape).copy()
        for part in (key // 16 * 4 + key % 8 // 2, row // 16 * 8 + row % 8, head, np.uint64(offset & 0xFFFFFFFF))
    ]
    words = philox(counter, [seed & 0xFFFFFFFF, (seed >> 32) ^ (offset >> 32)])
    word = np.broadcast_to(row % 16 // 8 + 2 * (key % 16 // 8), shape)
    chosen = np.choose(word.astype(np.intp), words)
    draw = (chosen >> (16 * (key % 2))) & np.uint64(0xFFFF)
    return (draw >= threshold(dropout_p)).reshape(batch_size, num_heads_q, seqlen_q, seqlen_k)


def philox(counter, key):
    """Philox4x32-10 (Salmon et al., SC 2011) on arrays of 32-bit numbers held in uint64."""
    low = np.uint64(0xFFFFFFFF)
    shift = np.uint64(32)
    for _ in range(10):
        a, b = counter[0] * np.uint64(0xD2511F53), counter[2] * np.uint64(0xCD9E8D57)
        counter = [
            (b >> shift) ^ counter[1] ^ np.uint64(key[0]),
            b & low,
            (a >> shift) ^ counter[3] ^ np.uint64(key[1]),
            a & low,
        ]
        key = [(key[0] + 0x9E3779B9) & 0xFFFFFFFF, (key[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return counter
