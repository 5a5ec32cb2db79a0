"""The geometry of context parallelism: which keys a block of queries sees, and merging of parts.

Knows tensors of (batch, seqlen, heads, dim) and flashtune's calls, but no process group.

A sequence is cut into equal chunks. A `Piece` is one call: rows of this rank's queries over rows of
some keys, with the mask that the global positions give. Its slices count from the first row of the
tensors that it is applied to.
"""

from typing import Any, NamedTuple

import torch

from . import _attention


class Piece(NamedTuple):
    """queries, keys: slices of rows. causal, window: as flashtune takes them."""

    queries: slice
    keys: slice
    causal: bool = False
    window: Any = None


def chunks(rank, size, layout):
    """The numbers of the chunks of a rank, in order.

    "zigzag" cuts the sequence into 2 * size chunks and gives each rank an early and a late one, so
    that a causal mask leaves all ranks the same work. "contiguous" cuts it into size chunks.
    """
    return (rank, 2 * size - 1 - rank) if layout == "zigzag" else (rank,)


def pieces(mine, others, rows, causal, window):
    """The pieces of queries in the chunks `mine` over keys in `others`, of `rows` each."""
    left, right = (None, None) if window is None else (None if side in (None, -1) else side for side in window)
    right = 0 if causal else right
    if left is None and right is None:
        return [Piece(slice(0, rows * len(mine)), slice(0, rows * len(others)))]
    if left is None and right == 0:
        return _causal_pieces(mine, others, rows)
    found = []
    for at, a in enumerate(mine):
        for other, b in enumerate(others):
            found += _shifted(at * rows, other * rows, rows, (a - b) * rows, left, right)
    return found


def pieces_of_whole(mine, size, rows, causal, window):
    """The pieces of queries in the chunks `mine` over all keys in order."""
    left, right = (None, None) if window is None else (None if side in (None, -1) else side for side in window)
    right, seqlen = 0 if causal else right, rows * size
    width, found = rows // len(mine), []
    for at, chunk in enumerate(mine):
        begin, end = chunk * width, (chunk + 1) * width
        first = 0 if left is None else max(0, begin - left)
        last = seqlen if right is None else min(seqlen, end + right)
        # The diagonal of a window is that of the last query and the last key.
        moved = last - end
        window = (None if left is None else left + moved, None if right is None else right - moved)
        is_causal = right == 0
        window = (window[0], None) if is_causal else window
        window = None if window == (None, None) else window
        found.append(Piece(slice(at * width, (at + 1) * width), slice(first, last), is_causal, window))
    return found


def _causal_pieces(mine, others, rows):
    if mine == others:  # Chunks are in rising order, so the main diagonal is the mask.
        whole = slice(0, rows * len(mine))
        return [Piece(whole, whole, causal=True)]
    seen = [(at, sum(b < a for b in others)) for at, a in enumerate(mine)]
    # Queries that see the same keys are one piece. Zigzag chunks of two ranks give exactly one.
    found = {}
    for at, count in seen:
        if count:
            found.setdefault(count, []).append(at)
    return [Piece(slice(min(at) * rows, (max(at) + 1) * rows), slice(0, count * rows)) for count, at in found.items()]


def _shifted(query, key, rows, shift, left, right):
    """The piece of two chunks whose first query is `shift` rows behind the first key, if any.

    Query i sees the keys from i + shift - left to i + shift + right. A call sees them relative to
    i, so rows that a side of the window cannot express are cut off.
    """
    before = None if left is None else left - shift
    after = None if right is None else right + shift
    skipped_keys = 0 if before is None else max(0, -before)
    skipped_queries = 0 if after is None else max(0, -after)
    cut = skipped_keys + skipped_queries
    if cut >= rows:
        return []
    queries = slice(query + skipped_queries, query + rows - skipped_keys)
    keys = slice(key + skipped_keys, key + rows - skipped_queries)
    # Both cuts move the diagonal by as much towards the side that was cut.
    before = None if before is None else before + skipped_keys - skipped_queries
    after = None if after is None else after + skipped_queries - skipped_keys
    width = rows - cut
    window = tuple(None if side is None or side >= width - 1 else side for side in (before, after))
    return [Piece(queries, keys, window=None if window == (None, None) else window)]


def halves(found):
    """Two lists of pieces that together are the pieces of a rank's queries over its own keys.

    The first is the smaller one: it has the earlier queries, which see few keys if causal.
    """
    if len(found) == 1 and found[0].window is None:
        (piece,) = found
        first, middle, last = piece.queries.start, (piece.queries.start + piece.queries.stop) // 2, piece.queries.stop
        # The diagonal ends at the last row and the last key, of the earlier queries as of all.
        keys = slice(piece.keys.start, piece.keys.stop - (last - middle)) if piece.causal else piece.keys
        if first < middle:
            return [piece._replace(queries=slice(first, middle), keys=keys)], [piece._replace(queries=slice(middle, last))]
    return found[:-1], found[-1:]


class Sum:
    """The output and LSE over the keys seen so far.

    The first part over some rows is taken as it is. Further parts are merged with it in fp32.
    """

    def __init__(self, q, dim_v):
        self.out = self.lse = None
        self._q, self._dim_v, self._seen = q, dim_v, []

    def add(self, rows, out, lse):
        """Merges a part over other keys into these rows. Each is weighted by its LSE."""
        if self.out is None and out.shape[1] == self._q.shape[1]:
            self.out, self.lse = out, lse
        elif any(rows.start < seen.stop and seen.start < rows.stop for seen in self._seen):
            self._merge(rows, out, lse)
        else:
            self._begin()
            self.out[:, rows], self.lse[..., rows] = out, lse
        self._seen.append(rows)

    def result(self):
        """(out in q's dtype, lse)"""
        self._begin()
        return self.out.to(self._q.dtype), self.lse

    def _begin(self):
        if self.out is None:
            batch, seqlen, heads, _ = self._q.shape
            self.out = self._q.new_zeros(batch, seqlen, heads, self._dim_v)
            self.lse = self._q.new_full((batch, heads, seqlen), -torch.inf, dtype=torch.float32)

    def _merge(self, rows, out, lse):
        self.out = self.out.float()
        before = self.lse[..., rows]
        # It is NaN where neither part has seen a key; both outputs are 0 there.
        weight = torch.sigmoid(lse - before).nan_to_num_()
        self.out[:, rows].lerp_(out.float(), weight.transpose(1, 2)[..., None])
        before.copy_(torch.logaddexp(before, lse))


def add_forward(total, found, q, k, v, scale, softcap):
    """Adds the pieces of q over k and v to the `Sum`."""
    for piece in found:
        out, lse = _attention.attention_forward(
            q[:, piece.queries], k[:, piece.keys], v[:, piece.keys], softmax_scale=scale, softcap=softcap, causal=piece.causal,
            window=piece.window,
        )  # fmt: skip
        total.add(piece.queries, out, lse)


def backward(found, dout, q, k, v, out, lse, dlse, scale, softcap, deterministic):
    """The pieces' gradients of q, k and v.

    out and lse are those over all keys, so that each piece has the weights of the whole softmax.
    """
    gradients = []
    for piece in found:
        rows, keys = piece.queries, piece.keys
        parts = _attention.attention_backward(
            dout[:, rows], q[:, rows], k[:, keys], v[:, keys], out[:, rows], lse[..., rows],
            dlse=None if dlse is None else dlse[..., rows], softmax_scale=scale, softcap=softcap, causal=piece.causal,
            window=piece.window, deterministic=deterministic,
        )  # fmt: skip
        gradients.append(parts)
    return gradients


def add_backward(totals, found, gradients):
    """Adds the pieces' gradients to the fp32 totals of q, k and v."""
    for piece, parts in zip(found, gradients):
        for total, part, rows in zip(totals, parts, (piece.queries, piece.keys, piece.keys)):
            total[:, rows] += part
