"""What the backends of both engines share: one forward pass over pages, its preparation, and the
writing of new keys on a CPU.

Knows flashtune's launches and neither engine. Nothing here waits for the device.
"""

import functools
import logging
from typing import Any, NamedTuple

import torch

from .. import _call, _features, _planning, _torch_launch
from .._errors import InvalidArgumentError

log = logging.getLogger("flashtune.serving")

_SHORTEST = 64


class Layer(NamedTuple):
    """The options of one attention layer. Layers of equal options share kernels.

    window: (left, right) as `flashtune.attention` takes it, or None.
    sinks: (heads_q) or None. alibi_slopes: fp32 (heads_q) or None.
    """

    num_heads_q: int
    num_heads_kv: int
    head_dim: int
    head_dim_v: int
    softmax_scale: float
    causal: bool = True
    window: Any = None
    softcap: float = 0.0
    alibi_slopes: Any = None
    sinks: Any = None


class Batch(NamedTuple):
    """Sequences whose keys lie in pages. All tensors are int32 and on the queries' device.

    cu_seqlens_q: (batch + 1), or None if each sequence has one query.
    max_seqlen_q, max_seqlen_k: upper bounds of the lengths, known to the host.
    seqused_k: (batch), the keys of each sequence, its new ones included.
    block_table: (batch, pages). Entries behind a sequence's keys may hold anything.
    """

    cu_seqlens_q: Any
    max_seqlen_q: int
    seqused_k: Any
    max_seqlen_k: int
    block_table: Any


def attend(q, k_pages, v_pages, batch, layer, out):
    """Writes attention of q (total, heads_q, dim) into out (total, heads_q, dim_v).

    k_pages, v_pages: (pages, page_size, heads_kv, dim), with any strides but a contiguous last dim.
    """
    opts = _options(layer.causal, layer.softmax_scale)
    table = batch.block_table
    # Models keep sinks in their own dtype, and may load them again.
    sinks = None if layer.sinks is None else layer.sinks.float()
    max_seqlen_q = None
    if batch.cu_seqlens_q is None:
        q, out = q.unsqueeze(1), out.unsqueeze(1)
    else:
        max_seqlen_q = batch.max_seqlen_q
    features = _features.of(
        window=layer.window, softcap=layer.softcap, alibi_slopes=layer.alibi_slopes, sinks=sinks,
        cu_seqlens_q=batch.cu_seqlens_q, max_seqlen_q=max_seqlen_q, seqused_k=batch.seqused_k, block_table=table,
        max_seqlen_k=min(batch.max_seqlen_k, table.shape[1] * k_pages.shape[1]),
    )  # fmt: skip
    _torch_launch.launch_forward(q, k_pages, v_pages, opts, None, features, want_lse=False, out=out)


@functools.lru_cache(maxsize=None)
def _options(causal, softmax_scale):
    return _call.options(causal, softmax_scale, 0.0)


def rounded_up(longest, most):
    """A bound of lengths that changes seldom: at least 64, at most an eighth above a longer
    `longest`, and never above `most`.

    A call with the sizes of an earlier one takes the short way through the launch. Exact bounds
    would differ at each decoding step.
    """
    step = max(_SHORTEST, 1 << max(longest - 1, 0).bit_length()) // 16
    return min(most, max(_SHORTEST, -(-longest // step) * step))


def prepare(layer, dtype, device, page_size, largest):
    """Prepares all batches of a layer, mixed and of single queries, so that none of them waits for
    a compiler. Returns what `flashtune.prepare_range` does, or None for a known form.

    largest: (sequences, queries of one sequence, keys of one sequence).
    """
    device = torch.device(device)
    numbers = layer._replace(alibi_slopes=layer.alibi_slopes is not None, sinks=layer.sinks is not None)
    form = numbers, dtype, device, page_size, tuple(largest)
    if form in _prepared:
        return None

    def made(*shape, dtype=dtype):
        return torch.zeros(shape, dtype=dtype, device=device)

    heads = layer.num_heads_q
    pages = [made(1, page_size, layer.num_heads_kv, dim) for dim in (layer.head_dim, layer.head_dim_v)]
    done = _planning.prepare_range(
        made(1, heads, layer.head_dim), *pages, largest=largest, optional=("cu_seqlens_q",), causal=layer.causal,
        window=layer.window, softcap=layer.softcap,
        alibi_slopes=None if layer.alibi_slopes is None else made(heads, dtype=torch.float32),
        sinks=None if layer.sinks is None else made(heads, dtype=torch.float32),
        cu_seqlens_q=made(2, dtype=torch.int32), max_seqlen_q=1, seqused_k=made(1, dtype=torch.int32),
        block_table=made(1, 1, dtype=torch.int32),
    )  # fmt: skip
    _prepared.add(form)
    log.info(
        "prepared %d kernels (%d compiled) in %.0f ms for %s", done["kernels"], done["compiled"], done["milliseconds"], numbers
    )
    return done


_prepared = set()


def write(k_pages, v_pages, k, v, slots):
    """Writes new keys and values on a CPU, where the engines' own kernels do not run.

    slots: (tokens), the row of each token among the rows of all pages. A negative slot is padding.
    """
    if k_pages.device.type != "cpu":
        raise InvalidArgumentError(f"k_pages is on {k_pages.device}; it must be on the CPU, since a GPU has the engine's kernel")
    slots = slots.long()
    kept = slots >= 0
    slots, page_size = slots[kept], k_pages.shape[1]
    for pages, new in ((k_pages, k), (v_pages, v)):
        pages[slots // page_size, slots % page_size] = new[: len(kept)][kept]
