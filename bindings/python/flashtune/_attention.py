"""The public calls: NumPy arrays and torch tensors alike, (batch, seqlen, heads, dim).

Picks the array library by the type of q and leaves the rest to it. Neither is imported before one of its arrays is
handed in, which is when its module is already loaded.
"""

import sys
from collections.abc import Sequence

from . import _call, _features
from ._errors import InvalidArgumentError, UnsupportedError


def module_of(q, name="q"):
    """`_torch` or `_numpy`, whichever knows arrays like q, which messages call `name`."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(q, torch.Tensor):
        from . import _torch

        return _torch
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(q, numpy.ndarray):
        from . import _numpy

        return _numpy
    raise TypeError(f"{name} is a {type(q).__name__}; it must be a NumPy array or a torch tensor")


def attention(
    q, k, v, *, causal=False, softmax_scale=None, dropout_p=0.0, seed=None, deterministic=False, return_lse=False,
    window=None, softcap=0.0, alibi_slopes=None, bias=None, mask=None, sinks=None, mask_bits=None,
    block_mask=None, batch_invariant=False,
):  # fmt: skip
    """softmax(q k^T * softmax_scale) v, exactly; torch tensors that require it get gradients, which have none themselves: a
    double backward pass is refused.

    q is (batch, seqlen_q, heads_q, dim), k (batch, seqlen_k, heads_kv, dim), v (batch, seqlen_k, heads_kv, dim_v), with
    heads_q a multiple of heads_kv. Views are taken as they are when their last dim is contiguous.

    causal: True or "bottom-right" lets the last query see the last key, "top-left" the first query the first key.
    softmax_scale: None means 1/sqrt(dim); else of a magnitude from 2**-100 to 2**100.
    dropout_p: the probability of dropping, rounded to a multiple of 1/65536. The mask is a function of the seed and of each
        score's position alone; the C header has it at dropout_seed.
    seed: an int, a pair (seed, offset), or for torch an int64 tensor (seed, offset) on q's device that is read when the
        kernels run. None draws one from torch's default generator of the device, or NumPy's global one.
    deterministic: True gives gradients of the same bits at every run, which costs time; the output always has them.
    return_lse: returns (out, lse), lse being fp32 (batch, heads_q, seqlen_q), in natural log; it carries a gradient.

    window: (left, right), how many keys before and after its diagonal a query sees, None or -1 for all of that side. The
        diagonal is that of causal, without it the bottom right one; with causal right is 0 or None.
    softcap: scores s become softcap * tanh(s / softcap) before anything is added; 0 means none, else it is from 2**-100 to
        2**100, as the header says.
    alibi_slopes: fp32 (heads_q) or (batch, heads_q); -slope * |i + seqlen_k - seqlen_q - j| is added to scores. No gradient.
    bias: of q's dtype, broadcast to (batch, heads_q, seqlen_q, seqlen_k), added to scores. Its gradient needs memory of its
        own size in fp32. With deterministic it must not be broadcast where it has a gradient.
    mask: of bool or uint8, broadcast as bias; False or 0 hides a key.
    sinks: (heads_q), each head's score to no key, which takes its share of the softmax and is part of lse; fp32, for torch
        any floating point dtype.
    mask_bits: in mask's place, uint8 (..., ceil(seqlen_k / 8)), the others broadcast: the bits of eight keys in each byte, the
        first key's the lowest, as numpy.packbits(mask, axis=-1, bitorder="little") makes them.
    block_mask: which blocks of scores count, as `flashtune.block_mask` makes it or a FlexAttention BlockMask, whose mask_mod is
        not called: what it hides within a block is for causal, window and mask to say. In full blocks mask is not looked at.
        Time is proportional to the blocks. On a GPU not with deterministic, and not under torch.compile.
    batch_invariant: True gives a sequence's output the same bits alone and in any batch, under what the C header's
        batch_invariant says must be equal, which costs time; the gradients' need not. Not with dropout.
    """
    opts = _call.options(causal, softmax_scale, dropout_p, deterministic, batch_invariant)
    features = _features.of(window, softcap, alibi_slopes, bias, mask, sinks, mask_bits, block_mask)
    return module_of(q).attention(q, k, v, opts, seed, return_lse, features)


def attention_varlen(
    q, k, v, *, cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None, seqused_k=None, max_seqlen_q=None, max_seqlen_k=None,
    causal=False, softmax_scale=None, dropout_p=0.0, seed=None, deterministic=False, return_lse=False,
    window=None, softcap=0.0, alibi_slopes=None, bias=None, mask=None, sinks=None, mask_bits=None,
    batch_invariant=False,
):  # fmt: skip
    """`attention` of sequences of their own lengths; each sequence's result is what it would be alone.

    cu_seqlens_q: int32 (batch + 1) on q's device, from 0 and not decreasing: q is (total_q, heads_q, dim), and sequence b its
        rows cu_seqlens_q[b] to cu_seqlens_q[b + 1]; so are out and its gradients, and lse is (heads_q, total_q). What torch
        has there for rows behind the last sequence's is not set. None: q is (batch, seqlen_q, heads_q, dim).
    cu_seqlens_k: the same of k and v.
    seqused_q, seqused_k: int32 (batch), how many rows of each sequence are used, from its first on; None: all. In rows that
        are not used out and gradients are 0 and lse -infinity.
    max_seqlen_q, max_seqlen_k: with cu_seqlens an upper bound of the lengths. None, possible where the host can read lengths,
        takes the longest. bias and mask are broadcast to (batch, heads_q, max_seqlen_q, max_seqlen_k); mask_bits likewise.
    """
    opts = _call.options(causal, softmax_scale, dropout_p, deterministic, batch_invariant)
    lengths = (cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, max_seqlen_q, max_seqlen_k)
    features = _features.of(window, softcap, alibi_slopes, bias, mask, sinks, mask_bits, None, *lengths)
    return module_of(q).attention(q, k, v, opts, seed, return_lse, features)


def attention_forward(
    q, k, v, *, causal=False, softmax_scale=None, dropout_p=0.0, seed=None, batch_invariant=False, **features
):
    """(out, lse), without autograd. With dropout a seed is needed, since the backward pass needs the same.

    features: the keyword arguments of `attention_varlen` from cu_seqlens_q on and from window on, `attention_kvcache`'s
    block_table, and `attention`'s block_mask.
    """
    _need_seed(dropout_p, seed)
    opts = _call.options(causal, softmax_scale, dropout_p, False, batch_invariant)
    return module_of(q).attention_forward(q, k, v, opts, seed, features_of(features))


def attention_kvcache(
    q, k_cache, v_cache, *, block_table=None, seqused_k=None, max_seqlen_k=None,
    cu_seqlens_q=None, seqused_q=None, max_seqlen_q=None, causal=False, softmax_scale=None, return_lse=False,
    window=None, softcap=0.0, alibi_slopes=None, bias=None, mask=None, sinks=None, mask_bits=None,
    batch_invariant=False,
):  # fmt: skip
    """`attention_varlen` over the keys of a cache, without autograd; made for few queries over many keys.

    k_cache, v_cache: (batch, max_seqlen, heads_kv, dim), of which each sequence uses its first seqused_k keys. With block_table
        (num_pages, page_size, heads_kv, dim).
    block_table: int32 (batch, pages) on q's device: sequence b has its keys from i * page_size on in page block_table[b, i].
        Entries past a sequence's length are not read. Others that name no page are refused on the CPU, where they can be
        looked at; on a GPU they are taken for the last page.
    max_seqlen_k: with block_table, and not without, an upper bound of the lengths; None: what its pages hold. Work is laid
        out for it.
    """
    opts = _call.options(causal, softmax_scale, 0.0, False, batch_invariant)
    lengths = (cu_seqlens_q, None, seqused_q, seqused_k, max_seqlen_q, max_seqlen_k, block_table)
    features = _features.of(window, softcap, alibi_slopes, bias, mask, sinks, mask_bits, None, *lengths)
    out, lse = module_of(q).attention_forward(q, k_cache, v_cache, opts, None, features)
    return (out, lse) if return_lse else out


def merge(outs, lses, *, dtype=None):
    """(out, lse) of attention over all keys from those over parts of them, without autograd: each part weighs by its lse.

    outs: a sequence or a stack of outputs, each (batch, seqlen, heads, dim) with an lse (batch, heads, seqlen), or, of sequences
        end to end, (total, heads, dim) with (heads, total). lses: likewise.
    dtype: of out; None: that of outs, which may also be fp32.
    """
    for name, given in (("outs", outs), ("lses", lses)):
        if not hasattr(given, "shape") and not (isinstance(given, Sequence) and len(given)):
            raise InvalidArgumentError(f"{name} is {given!r}; it must be a sequence of arrays, one at least, or a stack of them")
    first = outs if hasattr(outs, "shape") else outs[0]
    return module_of(first, "outs").merge(outs, lses, dtype)


def kv_append(k_cache, v_cache, k, v, cache_seqlens, *, block_table=None):
    """Writes k and v, torch tensors (batch, seqlen_new, heads_kv, dim), into a cache as `attention_kvcache` takes it, behind the
    cache_seqlens keys that each sequence has, an int or int32 (batch); returns how many it then uses, int32 (batch).

    What the host can see to be wrong is refused before anything is written. Lengths and tables on a GPU are not looked at: there a
    sequence whose length is negative or leaves no room for its new keys, or whose block_table has no page for them, gets none.
    """
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(k_cache, torch.Tensor):
        raise TypeError(f"k_cache is a {type(k_cache).__name__}; it must be a torch tensor")
    from . import _kvcache

    return _kvcache.append(k_cache, v_cache, k, v, cache_seqlens, block_table)


def attention_backward(
    dout, q, k, v, out, lse, *, causal=False, softmax_scale=None, dropout_p=0.0, seed=None, deterministic=False,
    dlse=None, need_dbias=True, **features,
):  # fmt: skip
    """(dq, dk, dv) from what `attention_forward` took and returned, under the same keyword arguments; with bias or sinks
    (dq, dk, dv, dbias, dsinks), the last two in fp32 and None where there is none.

    deterministic: True gives the same bits at every run, which costs time.
    dlse: the gradient of lse, in its shape; None where nothing depends on it.
    need_dbias: False leaves out the bias's gradient.
    """
    _need_seed(dropout_p, seed)
    opts = _call.options(causal, softmax_scale, dropout_p, deterministic)
    features = features_of(features)
    if features is not None and features.block_table is not None:
        raise UnsupportedError("block_table is given; there is no backward pass over pages")
    gradients = module_of(q).attention_backward(dout, q, k, v, out, lse, opts, seed, features, dlse, need_dbias)
    has_more = features is not None and (features.bias is not None or features.sinks is not None)
    return gradients if has_more else gradients[:3]


def features_of(keywords):
    """Features of keyword arguments by their names."""
    unknown = set(keywords) - set(_features.Features._fields)
    if unknown:
        raise TypeError(f"unexpected keyword argument {min(unknown)!r}")
    return _features.of(*_features.Features(**keywords))


def _need_seed(dropout_p, seed):
    if dropout_p and seed is None:
        raise InvalidArgumentError("seed is None; with dropout it must be given, the same one to both passes")
