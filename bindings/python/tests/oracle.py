"""Plain attention in NumPy: in fp64 as the truth, and in fp32 rounded to a dtype at each step as
the yardstick.

It implements the dropout mask from its documentation (Philox4x32-10 on seed, offset, head, row and
key) and shares no code with the library.
"""

import numpy as np


class Result:
    def __init__(self, out, lse, dq=None, dk=None, dv=None, dbias=None, dsinks=None):
        self.out, self.lse, self.dq, self.dk, self.dv = out, lse, dq, dk, dv
        self.dbias, self.dsinks = dbias, dsinks


def attention(
    q, k, v, dout=None, causal=False, softmax_scale=None, dropout_p=0.0, seed=(0, 0), window=None, softcap=0.0,
    alibi_slopes=None, bias=None, mask=None, sinks=None, dlse=None, rounded_to=None, first_batch=0,
):  # fmt: skip
    """The result of fp64 maths, or with `rounded_to` of fp32 maths with every product and weight
    rounded.

    Dropout depends on first_batch, the number of the first batch entry.
    """
    work = np.float64 if rounded_to is None else np.float32

    def rounded(x):
        return x if rounded_to is None else x.astype(rounded_to).astype(work)

    q, k, v = (x.astype(work).transpose(0, 2, 1, 3) for x in (q, k, v))
    batch_size, num_heads, seqlen_q, seqlen_k = *q.shape[:3], k.shape[2]
    group = num_heads // k.shape[1]
    k_all, v_all = np.repeat(k, group, 1), np.repeat(v, group, 1)
    scale = work(q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale)
    scores = rounded(q @ k_all.swapaxes(2, 3)) * scale
    slope = work(1)
    if softcap:
        capped = np.tanh(scores / work(softcap))
        scores, slope = work(softcap) * capped, 1 - capped * capped
    if alibi_slopes is not None:
        distance = np.abs(np.arange(seqlen_q)[:, None] + seqlen_k - seqlen_q - np.arange(seqlen_k))
        slopes = np.broadcast_to(alibi_slopes.astype(work), (batch_size, num_heads))
        scores = scores - slopes[:, :, None, None] * distance.astype(work)
    if bias is not None:
        scores = scores + bias.astype(work)
    visible = seen(seqlen_q, seqlen_k, causal, window)
    visible = np.broadcast_to(visible if mask is None else visible & (mask != 0), scores.shape)
    scores = np.where(visible, scores, work(-np.inf))
    sink = work(-np.inf) if sinks is None else sinks.astype(work)[None, :, None, None]
    top = np.maximum(scores.max(-1, keepdims=True, initial=-np.inf), sink)
    top = np.where(np.isneginf(top), work(0), top)
    weights = np.exp(scores - top)
    total = weights.sum(-1, keepdims=True) + np.exp(sink - top)
    with np.errstate(divide="ignore"):
        lse = (top + np.log(total))[..., 0]
    probabilities = rounded(weights / np.where(total == 0, work(1), total))
    keep = np.ones_like(probabilities)
    if dropout_p:
        keep = kept(first_batch + batch_size, num_heads, seqlen_q, seqlen_k, dropout_p, *seed)[first_batch:]
        keep = keep * work(keep_scale(dropout_p))
    out = rounded(rounded(probabilities * keep) @ v_all)
    if dout is None:
        return Result(out.transpose(0, 2, 1, 3), lse)

    dout = dout.astype(work).transpose(0, 2, 1, 3)
    dv_all = rounded((rounded(probabilities * keep)).swapaxes(2, 3) @ dout)
    dprobabilities = rounded(dout @ v_all.swapaxes(2, 3)) * keep
    delta = (dout * out).sum(-1, keepdims=True)
    if dlse is not None:
        delta = delta - dlse.astype(work)[..., None]
    dscores = rounded(probabilities * (dprobabilities - delta))
    dbias = None if bias is None else _summed(dscores, bias.shape)
    dsinks = None
    if sinks is not None:
        # A row without keys has only the sink, or not even that.
        share = np.exp(sink[..., 0] - np.where(np.isneginf(lse), 0, lse))
        dsinks = -(share * delta[..., 0]).sum((0, 2))
    dscores = rounded(dscores * slope) * scale
    dq = rounded(dscores @ k_all)
    dk_all = rounded(dscores.swapaxes(2, 3) @ q)
    dk, dv = (x.reshape(*k.shape[:2], group, *x.shape[2:]).sum(2) for x in (dk_all, dv_all))
    rows = (x.transpose(0, 2, 1, 3) for x in (dq, rounded(dk), rounded(dv)))
    return Result(out.transpose(0, 2, 1, 3), lse, *rows, dbias, dsinks)


def varlen(
    q, k, v, dout, cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None, seqused_k=None, bias=None, mask=None,
    alibi_slopes=None, dlse=None, **options,
):  # fmt: skip
    """`attention` of one sequence after the other.

    Unused rows are 0 and have an lse of -infinity.
    """
    places_q, places_k = _places(q, cu_seqlens_q, seqused_q), _places(k, cu_seqlens_k, seqused_k)
    num_heads = q.shape[-2]
    lse_shape = (q.shape[0], num_heads, q.shape[1]) if cu_seqlens_q is None else (num_heads, q.shape[0])
    result = Result(np.zeros((*q.shape[:-1], v.shape[-1])), np.full(lse_shape, -np.inf), *(np.zeros(x.shape) for x in (q, k, v)))
    result.dbias = None if bias is None else np.zeros(bias.shape)
    result.dsinks = None if options.get("sinks") is None else np.zeros(num_heads)
    for b, (at_q, at_k) in enumerate(zip(places_q, places_k)):
        seqlens = len(q[at_q]), len(k[at_k])
        lse_at = (b, slice(None), at_q[-1]) if cu_seqlens_q is None else (slice(None), at_q[-1])
        of_scores = [None if x is None else x[_part(x.shape, b, seqlens)] for x in (bias, mask)]
        slopes = alibi_slopes if alibi_slopes is None or alibi_slopes.ndim == 1 else alibi_slopes[b : b + 1]
        one = attention(
            *(x[None] for x in (q[at_q], k[at_k], v[at_k], dout[at_q])), bias=of_scores[0], mask=of_scores[1],
            alibi_slopes=slopes, dlse=None if dlse is None else dlse[lse_at][None], first_batch=b, **options,
        )  # fmt: skip
        result.out[at_q], result.lse[lse_at], result.dq[at_q] = one.out[0], one.lse[0], one.dq[0]
        result.dk[at_k], result.dv[at_k] = one.dk[0], one.dv[0]
        if bias is not None:
            result.dbias[_part(bias.shape, b, seqlens)] += one.dbias
        if result.dsinks is not None:
            result.dsinks += one.dsinks
    return result


def _places(tensor, cu_seqlens, seqused):
    """The index of each sequence's used rows."""
    if cu_seqlens is None:
        used = [tensor.shape[1]] * tensor.shape[0] if seqused is None else seqused
        return [(b, slice(0, int(rows))) for b, rows in enumerate(used)]
    used = np.diff(cu_seqlens) if seqused is None else seqused
    return [(slice(int(start), int(start + rows)),) for start, rows in zip(cu_seqlens, used)]


def _part(shape, b, seqlens):
    """The index of one sequence's part in a tensor that broadcasts to (batch, heads, seqlen_q,
    seqlen_k).
    """
    rows = (slice(None) if size == 1 else slice(0, seqlen) for size, seqlen in zip(shape[2:], seqlens))
    return (slice(None) if shape[0] == 1 else slice(b, b + 1), slice(None), *rows)


def _summed(gradient, shape):
    axes = tuple(axis for axis, size in enumerate(shape) if size == 1)
    return gradient.sum(axes, keepdims=True)


def seen(seqlen_q, seqlen_k, causal, window=None):
    """True where causal and window let a row see a key: (seqlen_q, seqlen_k)."""
    rows, keys = np.arange(seqlen_q)[:, None], np.arange(seqlen_k)[None, :]
    after = keys - rows - (0 if causal == "top-left" else seqlen_k - seqlen_q)
    left, right = (-1 if side is None else side for side in window or (-1, -1))
    visible = np.ones((seqlen_q, seqlen_k), bool)
    if causal:
        visible &= after <= 0
    if right >= 0:
        visible &= after <= right
    if left >= 0:
        visible &= after >= -left
    return visible


def threshold(dropout_p):
    return min(int(np.floor(float(np.float32(dropout_p)) * 65536 + 0.5)), 65535)


def keep_scale(dropout_p):
    return 65536 / (65536 - threshold(dropout_p))


def kept(batch_size, num_heads_q, seqlen_q, seqlen_k, dropout_p, seed, offset):
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
    """Philox4x32-10 (Salmon et al., SC 2011) on arrays of 32-bit numbers in uint64."""
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
