"""vLLM's AttentionBackend, AttentionMetadataBuilder and AttentionImpl on flashtune.

vLLM imports this module when the backend CUSTOM is chosen. Its K/V cache of a layer is
(blocks, heads_kv, block_size, 2 * dim): a key and its value side by side. Layouts differ in strides
alone, which the kernels take as they are.
"""

from dataclasses import dataclass, replace

import torch

from .._errors import UnsupportedError
from . import _interface, _paged

_interface.check("vllm")

from vllm.v1.attention.backend import (  # noqa: E402  (after the check, which names what differs)
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadataBuilder,
    AttentionType,
    MultipleOf,
)

_CACHE_DTYPES = {"auto": None, "float16": torch.float16, "bfloat16": torch.bfloat16}
_LARGEST_HEAD = 512


class FlashtuneBackend(AttentionBackend):
    supported_dtypes = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes = list(_CACHE_DTYPES)
    forward_includes_kv_cache_update = False
    supports_kv_cache_update_bypass = True

    @staticmethod
    def get_name():
        return "CUSTOM"

    @staticmethod
    def get_impl_cls():
        return FlashtuneImpl

    @staticmethod
    def get_builder_cls():
        return FlashtuneMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec=None):
        # The kernels take any size. vLLM makes sliding window layers' blocks as small as this.
        return [MultipleOf(16)]

    @classmethod
    def supports_head_size(cls, head_size):
        return 1 <= head_size <= _LARGEST_HEAD

    @classmethod
    def supports_sink(cls):
        return True

    @classmethod
    def supports_sliding_window(cls):
        return True

    @classmethod
    def supports_attn_type(cls, attn_type):
        return attn_type == AttentionType.DECODER

    @classmethod
    def supports_compute_capability(cls, capability):
        return capability.major >= 8

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls):
        # A launch is laid out for the host's longest query.
        return False

    @classmethod
    def supports_combination(
        cls, head_size, dtype, kv_cache_dtype, block_size, use_mla, has_sink, use_sparse, use_mm_prefix, device_capability
    ):
        return _cache_dtype_reason(kv_cache_dtype, dtype)


def _cache_dtype_reason(kv_cache_dtype, dtype):
    """Why the option --kv-cache-dtype is refused, or None. dtype: the model's, or None."""
    if kv_cache_dtype is None:
        return None
    if kv_cache_dtype not in _CACHE_DTYPES:
        return f"kv_cache_dtype is {kv_cache_dtype}; flashtune has no quantised K/V caches: use auto"
    wanted = _CACHE_DTYPES[kv_cache_dtype]
    if dtype is not None and wanted not in (None, dtype):
        return f"kv_cache_dtype is {kv_cache_dtype} and the model is {dtype}; they must be equal: use auto"
    return None


@dataclass
class FlashtuneMetadata:
    """A batch, as vLLM's other backends describe theirs."""

    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor

    def batch(self):
        # A pure decoding step leaves query_start_loc out, and each row is a sequence.
        is_decode = self.max_query_len == 1 and self.num_actual_tokens == len(self.seq_lens)
        cu_seqlens_q = None if is_decode else self.query_start_loc
        return _paged.Batch(cu_seqlens_q, self.max_query_len, self.seq_lens, self.max_seq_len, self.block_table)


class FlashtuneMetadataBuilder(AttentionMetadataBuilder):
    # A graph is laid out for the longest query of its capture. vLLM captures mixed batches of few
    # tokens as if each request had one.
    _cudagraph_support = AttentionCGSupport.UNIFORM_BATCH
    supports_update_block_table = True

    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        if kv_cache_spec.head_size_v != kv_cache_spec.head_size:
            sizes = f"head_size is {kv_cache_spec.head_size} and head_size_v {kv_cache_spec.head_size_v}"
            raise UnsupportedError(f"{sizes}; flashtune's backend of vLLM needs equal ones")
        self._longest = vllm_config.model_config.max_model_len
        scheduler = vllm_config.scheduler_config
        largest = scheduler.max_num_seqs, scheduler.max_num_batched_tokens, self._longest
        layers = vllm_config.compilation_config.static_forward_context
        for name in layer_names:
            for impl in layers[name].impl.get_impl_variants():
                if isinstance(impl, FlashtuneImpl):
                    _paged.prepare(impl.layer, kv_cache_spec.dtype, device, kv_cache_spec.block_size, largest)

    def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
        common = common_attn_metadata
        if common.causal is not True:
            raise UnsupportedError("causal is not True; flashtune's backend of vLLM has causal decoder attention alone")
        return FlashtuneMetadata(
            num_actual_tokens=common.num_actual_tokens, max_query_len=common.max_query_len,
            max_seq_len=_paged.rounded_up(common.max_seq_len, max(self._longest, common.max_seq_len)),
            query_start_loc=common.query_start_loc, seq_lens=common.seq_lens, block_table=common.block_table_tensor,
            slot_mapping=common.slot_mapping,
        )  # fmt: skip

    def build_for_cudagraph_capture(self, common_attn_metadata):
        # Replays have longer sequences than the capture.
        return replace(self.build(0, common_attn_metadata), max_seq_len=self._longest)

    def update_block_table(self, metadata, blk_table, slot_mapping):
        return replace(metadata, block_table=blk_table, slot_mapping=slot_mapping)


class FlashtuneImpl(AttentionImpl):
    def __init__(
        self, num_heads, head_size, scale, num_kv_heads=None, alibi_slopes=None, sliding_window=None, kv_cache_dtype="auto",
        logits_soft_cap=None, attn_type=AttentionType.DECODER, kv_sharing_target_layer_name=None, sinks=None, **unknown,
    ):  # fmt: skip
        for name, value in unknown.items():
            if value not in (None, False, -1):
                raise UnsupportedError(f"{name} is {value!r}; flashtune's backend of vLLM does not support it")
        if attn_type != AttentionType.DECODER:
            raise UnsupportedError(f"attn_type is {attn_type}; flashtune's backend of vLLM has decoder attention alone")
        reason = _cache_dtype_reason(kv_cache_dtype, None)
        if reason:
            raise UnsupportedError(reason)
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.sliding_window = (-1, -1) if sliding_window is None else (sliding_window - 1, 0)
        self.attn_type, self.sinks = attn_type, sinks
        # vLLM builds models under their device.
        slopes = None if alibi_slopes is None else torch.tensor(alibi_slopes, dtype=torch.float32)
        self.layer = _paged.Layer(
            num_heads, self.num_kv_heads, head_size, head_size, self.scale, softcap=float(logits_soft_cap or 0),
            window=None if sliding_window is None else self.sliding_window, alibi_slopes=slopes, sinks=sinks,
        )  # fmt: skip

    def forward(
        self, layer, query, key, value, kv_cache, attn_metadata, output, output_scale=None, output_block_scale=None
    ):
        for name, scale in (("output_scale", output_scale), ("output_block_scale", output_block_scale)):
            if scale is not None:
                raise UnsupportedError(f"{name} is given; flashtune's output is not quantised")
        if attn_metadata is None:
            return output.fill_(0)  # vLLM measures its memory.
        k_pages, v_pages = self._pages(kv_cache)
        rows = attn_metadata.num_actual_tokens
        options = self.layer
        _paged.attend(query[:rows], k_pages, v_pages, attn_metadata.batch(), options, output[:rows])
        return output

    def do_kv_cache_update(self, layer, key, value, kv_cache, slot_mapping):
        k_pages, v_pages = self._pages(kv_cache)
        if kv_cache.device.type == "cpu":
            return _paged.write(k_pages, v_pages, key, value, slot_mapping)
        from vllm._custom_ops import reshape_and_cache_flash

        return reshape_and_cache_flash(
            key, value, k_pages, v_pages, slot_mapping, self.kv_cache_dtype, layer._k_scale, layer._v_scale
        )

    def _pages(self, kv_cache):
        """(keys, values), each (blocks, block_size, heads_kv, dim)."""
        shape, dim = kv_cache.shape, self.head_size
        if len(shape) != 4 or shape[1] != self.num_kv_heads or shape[3] != 2 * dim:
            expected = f"(blocks, {self.num_kv_heads}, block_size, {2 * dim})"
            raise UnsupportedError(f"kv_cache has shape {tuple(shape)}; flashtune's backend of vLLM reads {expected}")
        return kv_cache.transpose(1, 2).split(dim, dim=-1)
