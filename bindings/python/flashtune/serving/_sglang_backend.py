"""SGLang's AttentionBackend on flashtune.

SGLang imports this module when the backend is chosen. A request's keys are rows of a pool.
`req_to_token` holds the row of each of its tokens, and rows of one page are adjacent. A sliding
window layer may have a smaller pool with rows of its own.
"""

from typing import Any, NamedTuple

import torch

from .._errors import UnsupportedError
from . import _interface, _paged

_interface.check("sglang")

from sglang.srt.layers.attention.base_attn_backend import AttentionBackend  # noqa: E402  (after the check)
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention  # noqa: E402
from sglang.srt.mem_cache.layout.paged_view import paged_kv_view  # noqa: E402
from sglang.srt.mem_cache.memory_pool import KVWriteLoc  # noqa: E402
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool  # noqa: E402
from sglang.srt.model_executor.forward_batch_info import ForwardMode  # noqa: E402

_NOT_CAUSAL = (AttentionType.ENCODER_ONLY, AttentionType.DECODER_BIDIRECTIONAL)
_MODES = (ForwardMode.EXTEND, ForwardMode.MIXED, ForwardMode.DECODE, ForwardMode.IDLE)


def make(runner):
    """The backend of a model runner, after a check of the server's options."""
    from sglang.srt.runtime_context import get_parallel, get_schedule

    for option, size in (("attn_cp_size", get_parallel().attn_cp_size), ("dcp_size", get_parallel().attn_dcp_size)):
        if size > 1:
            raise UnsupportedError(f"{option} is {size}; flashtune's backend of SGLang has no context parallelism")
    return FlashtuneAttnBackend(runner, get_schedule().chunked_prefill_size)


class Metadata(NamedTuple):
    """A batch. The window_ fields belong to a sliding window pool, and are None without one."""

    batch: Any
    window_batch: Any
    window_loc: Any


class FlashtuneAttnBackend(AttentionBackend):
    def __init__(self, runner, chunk=None):
        """chunk: the most queries of one request in a batch. None or -1: as many as its context."""
        super().__init__()
        _refuse_options(runner)
        self.req_to_token_pool, self.token_to_kv_pool = runner.req_to_token_pool, runner.token_to_kv_pool
        self.kv_index_translator = runner.kv_index_translator
        self.page_size, self.device = runner.page_size or 1, runner.device
        self.max_context_len = runner.model_config.context_len
        self.forward_metadata = None
        pool = self.token_to_kv_pool
        self._has_window_pool = isinstance(pool, SWAKVPool) and pool.swa_layer_nums > 0
        self._graphs = None
        self._layers = {}
        largest = self.req_to_token_pool.size, chunk if chunk and chunk > 0 else self.max_context_len, self.max_context_len
        self._prepare(runner, largest)

    def _prepare(self, runner, largest):
        """Prepares the kernels of all layers of the model."""
        names = [name for name, _ in runner.model.named_parameters()]
        has_sinks = any(name.endswith("sinks") for name in names)
        for module in runner.model.modules():
            if isinstance(module, RadixAttention):
                layer = self._layer(module)
                for sinks in (None, True) if has_sinks else (None,):
                    _paged.prepare(layer._replace(sinks=sinks), runner.dtype, self.device, self.page_size, largest)

    def init_forward_metadata(self, forward_batch):
        mode = forward_batch.forward_mode
        _expect_mode(mode)
        lengths = forward_batch.seq_lens.to(torch.int32)
        longest = self._longest(forward_batch)
        rows = self._rows(forward_batch, longest)
        cu_seqlens_q, max_seqlen_q = None, 1
        if not mode.is_decode_or_idle():
            cu_seqlens_q = torch.nn.functional.pad(forward_batch.extend_seq_lens.cumsum(0, dtype=torch.int32), (1, 0))
            max_seqlen_q = max(forward_batch.extend_seq_lens_cpu, default=1)
        batch = _paged.Batch(cu_seqlens_q, int(max_seqlen_q), lengths, longest, self._pages(rows))
        window_batch, loc = None, None
        if self._has_window_pool:
            window_batch = batch._replace(block_table=self._pages(self._window_rows(rows)))
            if forward_batch.out_cache_loc is not None:
                loc = self.token_to_kv_pool.translate_loc_from_full_to_swa(forward_batch.out_cache_loc)
        self.forward_metadata = Metadata(batch, window_batch, loc)

    def init_cuda_graph_state(self, max_bs, max_num_tokens):
        pages = -(-self.max_context_len // self.page_size)
        made = [torch.zeros(shape, dtype=torch.int32, device=self.device) for shape in ((max_bs,), (max_bs, pages))]
        window = (None, None)
        if self._has_window_pool:
            window = torch.zeros_like(made[1]), torch.zeros(max_num_tokens, dtype=torch.int64, device=self.device)
        self._graphs = (*made, *window)

    def init_forward_metadata_out_graph(self, forward_batch, in_capture=False):
        """Fills the tensors that a captured graph reads, and lays the launch out for any length."""
        if not forward_batch.forward_mode.is_decode_or_idle():
            raise UnsupportedError(f"forward_mode is {forward_batch.forward_mode!r}; flashtune captures graphs of decoding alone")
        lengths, table, window_table, window_loc = self._graphs
        size, longest = forward_batch.batch_size, self.max_context_len if in_capture else self._longest(forward_batch)
        lengths[:size].copy_(forward_batch.seq_lens[:size])
        rows = self._rows(forward_batch, longest)
        pages = self._pages(rows)
        table[:size, : pages.shape[1]].copy_(pages)
        batch = _paged.Batch(None, 1, lengths[:size], self.max_context_len, table[:size])
        window_batch, loc = None, None
        if self._has_window_pool:
            window_table[:size, : pages.shape[1]].copy_(self._pages(self._window_rows(rows)))
            window_batch = batch._replace(block_table=window_table[:size])
            loc = window_loc[: len(forward_batch.out_cache_loc)]
            loc.copy_(self.token_to_kv_pool.translate_loc_from_full_to_swa(forward_batch.out_cache_loc))
        self.forward_metadata = Metadata(batch, window_batch, loc)

    def get_cuda_graph_seq_len_fill_value(self):
        return 1

    def forward_decode(self, q, k, v, layer, forward_batch, save_kv_cache=True, **kwargs):
        return self._forward(q, k, v, layer, forward_batch, save_kv_cache, kwargs)

    def forward_extend(self, q, k, v, layer, forward_batch, save_kv_cache=True, **kwargs):
        return self._forward(q, k, v, layer, forward_batch, save_kv_cache, kwargs)

    def _forward(self, q, k, v, layer, forward_batch, save_kv_cache, more):
        sinks = more.pop("sinks", None)
        for name, value in more.items():
            if value is not None and value is not False:
                raise UnsupportedError(f"{name} is given; flashtune's backend of SGLang does not support it")
        metadata, pool = self.forward_metadata, self.token_to_kv_pool
        if save_kv_cache and k is not None:
            loc = KVWriteLoc.for_layer(forward_batch, layer, swa_loc=metadata.window_loc)
            pool.set_kv_buffer(layer, loc, k, v, layer.k_scale, layer.v_scale)
        options = self._layer(layer)
        if sinks is not None:
            options = options._replace(sinks=sinks)
        k_pages, v_pages = (
            paged_kv_view(buffer, self.page_size, options.num_heads_kv, dim)
            for buffer, dim in zip(pool.get_kv_buffer(layer.layer_id), (options.head_dim, options.head_dim_v))
        )
        batch = metadata.batch
        if metadata.window_batch is not None and options.window is not None:
            batch = metadata.window_batch
        q = q.reshape(-1, options.num_heads_q, options.head_dim)
        out = q.new_empty((len(q), options.num_heads_q, options.head_dim_v))
        _paged.attend(q, k_pages, v_pages, batch, options, out)
        return out.flatten(1)

    def _layer(self, layer):
        """The options of a layer, which do not change once its model is built."""
        found = self._layers.get(layer)
        if found is None:
            found = self._layers[layer] = _layer_of(layer)
        return found

    def _longest(self, forward_batch):
        """A bound of the keys of a sequence that the host knows without waiting."""
        lengths = forward_batch.seq_lens_cpu
        if lengths is None or len(lengths) == 0:
            return self.max_context_len
        return _paged.rounded_up(int(lengths.max()), self.max_context_len)

    def _rows(self, forward_batch, longest):
        """The row of the first token of each page: (batch, pages)."""
        table = self.req_to_token_pool.req_to_token
        return table[:, :longest : self.page_size][forward_batch.req_pool_indices[: forward_batch.batch_size]]

    def _window_rows(self, rows):
        # Rows that have left the window have no row in its pool, and no query reads them.
        return self.token_to_kv_pool.translate_loc_from_full_to_swa(rows).clamp(min=0)

    def _pages(self, rows):
        return (rows // self.page_size).to(torch.int32)


def _layer_of(layer):
    if layer.is_cross_attention:
        raise UnsupportedError(f"layer {layer.layer_id} has is_cross_attention; flashtune's backend of SGLang has self-attention alone")
    if layer.logit_cap and layer.logit_capping_method != "tanh":
        raise UnsupportedError(f"logit_capping_method is {layer.logit_capping_method}; flashtune has tanh alone")
    if layer.xai_temperature_len > 0:
        raise UnsupportedError(f"xai_temperature_len is {layer.xai_temperature_len}; flashtune does not scale by position")
    if layer.pos_encoding_mode != "NONE" or layer.use_irope:
        option = "use_irope" if layer.use_irope else "pos_encoding_mode"
        raise UnsupportedError(f"{option} is {getattr(layer, option)}; flashtune's backend of SGLang does not support it")
    causal, window = layer.attn_type not in _NOT_CAUSAL, None
    if layer.sliding_window_size is not None and layer.sliding_window_size > -1:
        # SGLang counts the keys before a query.
        window = (layer.sliding_window_size, 0 if causal else layer.sliding_window_size)
    return _paged.Layer(
        layer.tp_q_head_num, layer.tp_k_head_num, layer.qk_head_dim, layer.v_head_dim, float(layer.scaling), causal,
        window=window, softcap=float(layer.logit_cap or 0),
    )  # fmt: skip


def _refuse_options(runner):
    model, dtype = runner.model_config, runner.kv_cache_dtype
    refused = [
        (runner.use_mla_backend, "attention_arch is MLA"),
        (model.is_encoder_decoder, "is_encoder_decoder is True"),
        (not runner.spec_algorithm.is_none(), "speculative_algorithm is given"),
        (runner.kv_index_translator.is_translating, "enable_unified_memory is given"),
        (dtype != runner.dtype, f"kv_cache_dtype is {dtype} and the model is {runner.dtype}"),
    ]
    for is_refused, option in refused:
        if is_refused:
            raise UnsupportedError(f"{option}; flashtune's backend of SGLang does not support it")


def _expect_mode(mode):
    if mode not in _MODES:
        raise UnsupportedError(f"forward_mode is {mode!r}; flashtune's backend of SGLang extends and decodes")
