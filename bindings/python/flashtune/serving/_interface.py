"""Checks that an installed engine has the interface that a backend was written against.

Engines change their interfaces between minor versions. The record below names the functions that a
backend overrides or calls with arguments, the fields of batches that it reads, and the attributes
of the engine's objects. `scripts/check_serving_interfaces.py` compares it with an engine's
published sources, and the tests make stand-ins of it.
"""

import ast
import importlib
import inspect
import re
import sys
import textwrap

from .._errors import FlashtuneError, UnsupportedError

_BACKEND, _POOL = "vllm.v1.attention.backend:", "sglang.srt.mem_cache."
_BASE = "sglang.srt.layers.attention.base_attn_backend:AttentionBackend."

FIRST = {"vllm": (0, 33), "sglang": (0, 5, 23)}
"""The first version with the recorded interface."""

FUNCTIONS = {
    "vllm": {
        f"{_BACKEND}AttentionBackend.get_name": "",
        f"{_BACKEND}AttentionBackend.get_impl_cls": "",
        f"{_BACKEND}AttentionBackend.get_builder_cls": "",
        f"{_BACKEND}AttentionBackend.get_supported_kernel_block_sizes": "kv_cache_spec",
        f"{_BACKEND}AttentionBackend.supports_head_size": "cls head_size",
        f"{_BACKEND}AttentionBackend.supports_sink": "cls",
        f"{_BACKEND}AttentionBackend.supports_sliding_window": "cls",
        f"{_BACKEND}AttentionBackend.supports_attn_type": "cls attn_type",
        f"{_BACKEND}AttentionBackend.supports_compute_capability": "cls capability",
        f"{_BACKEND}AttentionBackend.supports_device_cpu_query_lens_mismatch": "cls",
        f"{_BACKEND}AttentionBackend.supports_combination": (
            "cls head_size dtype kv_cache_dtype block_size use_mla has_sink use_sparse use_mm_prefix device_capability"
        ),
        f"{_BACKEND}AttentionMetadataBuilder.__init__": "self kv_cache_spec layer_names vllm_config device",
        f"{_BACKEND}AttentionMetadataBuilder.build": "self common_prefix_len common_attn_metadata fast_build",
        f"{_BACKEND}AttentionMetadataBuilder.build_for_cudagraph_capture": "self common_attn_metadata",
        f"{_BACKEND}AttentionMetadataBuilder.update_block_table": "self metadata blk_table slot_mapping",
        f"{_BACKEND}AttentionImplBase.get_impl_variants": "self",
        f"{_BACKEND}AttentionImpl.__init__": (
            "self num_heads head_size scale num_kv_heads alibi_slopes sliding_window kv_cache_dtype logits_soft_cap"
            " attn_type kv_sharing_target_layer_name"
        ),
        f"{_BACKEND}AttentionImpl.forward": (
            "self layer query key value kv_cache attn_metadata output output_scale output_block_scale"
        ),
        "vllm.v1.attention.backends.registry:register_backend": "backend class_path is_mamba",
        "vllm._custom_ops:reshape_and_cache_flash": (
            "key value key_cache value_cache slot_mapping kv_cache_dtype k_scale v_scale"
        ),
    },
    "sglang": {
        f"{_BASE}init_forward_metadata": "self forward_batch",
        f"{_BASE}init_forward_metadata_out_graph": "self forward_batch in_capture",
        f"{_BASE}init_cuda_graph_state": "self max_bs max_num_tokens",
        f"{_BASE}get_cuda_graph_seq_len_fill_value": "self",
        f"{_BASE}forward_decode": "self q k v layer forward_batch save_kv_cache kwargs",
        f"{_BASE}forward_extend": "self q k v layer forward_batch save_kv_cache kwargs",
        "sglang.srt.layers.attention.attention_registry:register_attention_backend": "name",
        f"{_POOL}memory_pool:KVWriteLoc.for_layer": "cls forward_batch layer swa_loc full_loc",
        f"{_POOL}memory_pool:MHATokenToKVPool.set_kv_buffer": (
            "self layer loc_info cache_k cache_v k_scale v_scale layer_id_override dcp_kv_mask"
        ),
        f"{_POOL}swa_memory_pool:SWAKVPool.translate_loc_from_full_to_swa": "self kv_indices",
        f"{_POOL}layout.paged_view:paged_kv_view": "buf page_size head_num head_dim",
    },
}
"""The parameters of each function, in their order."""

FIELDS = {
    "vllm": {
        f"{_BACKEND}CommonAttentionMetadata": (
            "query_start_loc seq_lens num_reqs num_actual_tokens max_query_len max_seq_len block_table_tensor slot_mapping causal"
        ),
        f"{_BACKEND}AttentionCGSupport": "UNIFORM_BATCH",
        f"{_BACKEND}AttentionType": "DECODER",
        f"{_BACKEND}MultipleOf": "base",
        "vllm.v1.attention.backends.registry:AttentionBackendEnum": "CUSTOM",
    },
    "sglang": {
        "sglang.srt.model_executor.forward_batch_info:ForwardBatch": (
            "forward_mode batch_size req_pool_indices seq_lens out_cache_loc seq_lens_cpu extend_seq_lens extend_seq_lens_cpu"
        ),
        "sglang.srt.model_executor.forward_batch_info:ForwardMode": "EXTEND DECODE MIXED IDLE",
        "sglang.srt.layers.radix_attention:AttentionType": "DECODER ENCODER_ONLY DECODER_BIDIRECTIONAL",
    },
}
"""Fields of dataclasses and members of enumerations that a backend reads."""


ATTRIBUTES = {
    "vllm": {
        "vllm.config.vllm:VllmConfig": "model_config scheduler_config compilation_config",
        "vllm.config.model:ModelConfig": "max_model_len",
        "vllm.config.scheduler:SchedulerConfig": "max_num_seqs max_num_batched_tokens",
        "vllm.config.compilation:CompilationConfig": "static_forward_context",
        "vllm.v1.kv_cache_interface:KVCacheSpec": "block_size",
        "vllm.v1.kv_cache_interface:AttentionSpec": "head_size head_size_v dtype",
        "vllm.model_executor.layers.attention.attention:Attention": "impl",
    },
    "sglang": {
        "sglang.srt.model_executor.model_runner:ModelRunner": (
            "req_to_token_pool token_to_kv_pool kv_index_translator page_size device model_config model dtype kv_cache_dtype"
            " use_mla_backend spec_algorithm"
        ),
        "sglang.srt.configs.model_config:ModelConfig": "context_len is_encoder_decoder",
        "sglang.srt.layers.radix_attention:RadixAttention": (
            "tp_q_head_num tp_k_head_num qk_head_dim v_head_dim scaling layer_id attn_type logit_cap logit_capping_method"
            " sliding_window_size is_cross_attention pos_encoding_mode use_irope xai_temperature_len k_scale v_scale"
        ),
        f"{_POOL}memory_pool:ReqToTokenPool": "size req_to_token",
        f"{_POOL}memory_pool:MHATokenToKVPool": "get_kv_buffer",
        f"{_POOL}swa_memory_pool:SWAKVPool": "swa_layer_nums get_kv_buffer set_kv_buffer",
    },
}
"""Attributes of instances that a backend reads: what a class defines, or its methods assign to self."""


def imported(engine):
    """The module of an engine, after a check of its version."""
    try:
        module = importlib.import_module(engine)
        version = module.__version__
    except (ImportError, AttributeError) as error:
        raise FlashtuneError(f"{engine} could not be imported: {error}") from error
    expect_version(engine, version)
    return module


def expect_version(engine, version):
    first = FIRST[engine]
    found = tuple(int(part) for part in re.findall(r"\d+", version)[: len(first)])
    if found < first:
        needed = ".".join(map(str, first))
        raise UnsupportedError(f"this is {engine} {version}; flashtune.serving.{engine} needs {engine} {needed} or later")


def check(engine):
    """Raises UnsupportedError with the first function or field that is not as recorded."""
    version = imported(engine).__version__
    for name, parameters in FUNCTIONS[engine].items():
        function = _found(engine, version, name)
        given, expected = _parameters(function), tuple(parameters.split())
        if given != expected:
            raise _other(engine, version, f"{name} takes ({', '.join(given)}) instead of ({', '.join(expected)})")
    for name, fields in FIELDS[engine].items():
        owner = _found(engine, version, name)
        known = set(getattr(owner, "__members__", ())) | set(getattr(owner, "__dataclass_fields__", ()))
        missing = [field for field in fields.split() if field not in known]
        if missing:
            raise _other(engine, version, f"{name} has no {missing[0]}")
    # An engine that runs has loaded these modules. Loading them here could need a GPU.
    loaded = {name: names for name, names in ATTRIBUTES[engine].items() if name.partition(":")[0] in sys.modules}
    for name, attributes in loaded.items():
        known = _attributes(_found(engine, version, name))
        missing = [attribute for attribute in attributes.split() if attribute not in known]
        if missing:
            raise _other(engine, version, f"{name} has no {missing[0]}")


def assigned(node):
    """The attributes that a parsed class gives its instances."""
    for child in node.body:
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield child.name
        for target in getattr(child, "targets", None) or [getattr(child, "target", None)]:
            if isinstance(target, ast.Name):
                yield target.id
    for part in ast.walk(node):
        is_stored = isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store)
        if is_stored and isinstance(part.value, ast.Name) and part.value.id == "self":
            yield part.attr


def _attributes(owner):
    known = set(dir(owner))
    for base in owner.__mro__:
        known.update(getattr(base, "__dataclass_fields__", ()))
        try:
            known.update(assigned(ast.parse(textwrap.dedent(inspect.getsource(base))).body[0]))
        except (OSError, TypeError, SyntaxError):
            pass  # A class without sources, such as object.
    return known


def _found(engine, version, name):
    """What `module:object.attribute` names, without binding a method."""
    module, _, path = name.partition(":")
    try:
        found = importlib.import_module(module)
        for part in path.split("."):
            found = inspect.getattr_static(found, part)
    except (ImportError, AttributeError) as error:
        raise _other(engine, version, f"{name} is missing: {error}") from error
    return found


def _parameters(function):
    function = getattr(function, "__func__", function)
    return tuple(inspect.signature(inspect.unwrap(function)).parameters)


def _other(engine, version, difference):
    first = ".".join(map(str, FIRST[engine]))
    return UnsupportedError(f"this is {engine} {version}, whose interface is not that of {first}: {difference}")
