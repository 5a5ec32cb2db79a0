"""Stand-ins for vLLM and SGLang where they are not installed, made from the recorded interface.

Their functions have the recorded parameters and do nothing. The few that a backend builds on do
here what the engine documents. `scripts/check_serving_interfaces.py` compares the record with the
published sources.
"""

import contextlib
import dataclasses
import enum
import importlib.util
import inspect
import sys
import types

from flashtune.serving import _interface


def engine(name):
    """A context in which the engine can be imported. Gives whether it is the real one."""
    if importlib.util.find_spec(name) is not None:
        return contextlib.nullcontext(True)
    return _installed(name)


@contextlib.contextmanager
def _installed(name):
    made = {}
    for recorded, parameters in _interface.FUNCTIONS[name].items():
        _place(made, recorded, _function(parameters.split()))
    for recorded, fields in _interface.FIELDS[name].items():
        _place(made, recorded, _class(recorded.split(":")[1], fields.split()))
    made[name] = _module(made, name)
    made[name].__version__ = ".".join(map(str, _interface.FIRST[name]))
    {"vllm": _complete_vllm, "sglang": _complete_sglang}[name](made)
    for recorded, attributes in _interface.ATTRIBUTES[name].items():
        _give(made, recorded, attributes.split())
    sys.modules.update(made)
    try:
        yield False
    finally:
        for module in (*made, f"flashtune.serving._{name}_backend"):
            sys.modules.pop(module, None)
        serving = sys.modules["flashtune.serving"]
        serving.__dict__.pop(f"_{name}_backend", None)


def _module(made, name):
    if name not in made:
        made[name] = types.ModuleType(name)
        made[name].__path__ = []
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(_module(made, parent), last, made[name])
    return made[name]


def _place(made, recorded, thing):
    module, _, path = recorded.partition(":")
    owner, *names = path.split(".")
    place = _module(made, module)
    if names:
        if not hasattr(place, owner):
            setattr(place, owner, type(owner, (), {"__module__": module}))
        place, owner = getattr(place, owner), names[0]
    setattr(place, owner, thing)


def _give(made, recorded, attributes):
    """Gives a class the attributes that its stand-in does not set."""
    module, _, name = recorded.partition(":")
    place = _module(made, module)
    if not hasattr(place, name):
        setattr(place, name, type(name, (), {"__module__": module}))
    owner = getattr(place, name)
    for attribute in attributes:
        if not hasattr(owner, attribute):
            setattr(owner, attribute, None)


def _function(parameters):
    def nothing(*arguments, **keywords):
        pass

    kinds = [inspect.Parameter.VAR_KEYWORD if name == "kwargs" else inspect.Parameter.POSITIONAL_OR_KEYWORD for name in parameters]
    nothing.__signature__ = inspect.Signature([inspect.Parameter(*both) for both in zip(parameters, kinds)])
    if not parameters or parameters[0] not in ("self", "cls"):
        return staticmethod(nothing) if parameters in ([], ["kv_cache_spec"]) else nothing
    return classmethod(nothing) if parameters[0] == "cls" else nothing


def _class(name, fields):
    if fields[0].isupper():
        return enum.Enum(name, {field: field.lower() for field in fields}, type=str)
    return dataclasses.make_dataclass(name, [(field, object, None) for field in fields])


def _complete_vllm(made):
    backend, registry = made["vllm.v1.attention.backend"], made["vllm.v1.attention.backends.registry"]
    backend.AttentionImpl.get_impl_variants = lambda self: (self,)
    overrides, kind = {}, registry.AttentionBackendEnum

    def register_backend(backend, class_path=None, is_mamba=False):
        overrides[backend] = class_path

    def get_class(member):
        module, _, name = overrides[member].rpartition(".")
        return getattr(importlib.import_module(module), name)

    registry.register_backend = register_backend
    kind.is_overridden = lambda member: member in overrides
    kind.get_path = lambda member: overrides[member]
    kind.clear_override = lambda member: overrides.pop(member)
    kind.get_class = get_class


def _complete_sglang(made):
    memory, batches = made["sglang.srt.mem_cache.memory_pool"], made["sglang.srt.model_executor.forward_batch_info"]
    made["sglang.srt.layers.attention.attention_registry"].ATTENTION_BACKENDS = {}
    _module(made, "sglang.srt.arg_groups.choices").ATTENTION_BACKEND_CHOICES = ["triton"]
    batches.ForwardMode.is_decode_or_idle = lambda mode: mode.name in ("DECODE", "IDLE")
    memory.KVWriteLoc.for_layer = classmethod(_write_loc)
    made["sglang.srt.mem_cache.layout.paged_view"].paged_kv_view = _paged_kv_view
    _pools(made)


def _write_loc(cls, forward_batch, layer, swa_loc=None, full_loc=None):
    return types.SimpleNamespace(loc=forward_batch.out_cache_loc, swa_loc=swa_loc)


_write_loc.__signature__ = inspect.signature(_write_loc)


def _paged_kv_view(buf, page_size, head_num, head_dim):
    return buf.view(-1, page_size, head_num, head_dim)


def _pools(made):
    import torch

    class RadixAttention(torch.nn.Module):
        def __init__(self, num_heads, head_dim, scaling, num_kv_heads, layer_id, **options):
            super().__init__()
            self.tp_q_head_num, self.tp_k_head_num, self.layer_id, self.scaling = num_heads, num_kv_heads, layer_id, scaling
            self.qk_head_dim = self.v_head_dim = self.head_dim = head_dim
            self.k_scale = self.v_scale = None
            defaults = {
                "logit_cap": 0.0, "sliding_window_size": -1, "is_cross_attention": False, "pos_encoding_mode": "NONE",
                "logit_capping_method": "tanh", "use_irope": False, "xai_temperature_len": -1,
                "attn_type": made["sglang.srt.layers.radix_attention"].AttentionType.DECODER,
            }  # fmt: skip
            for name, default in defaults.items():
                setattr(self, name, options.get(name, default))

    class MHATokenToKVPool(made["sglang.srt.mem_cache.memory_pool"].MHATokenToKVPool):
        def __init__(self, size, page_size, dtype, head_num, head_dim, layer_num, device, enable_memory_saver):
            shape = (layer_num, 2, size + page_size, head_num, head_dim)
            self.buffers = torch.zeros(shape, dtype=dtype, device=device)

        def get_kv_buffer(self, layer_id):
            return self.buffers[layer_id].unbind()

        def set_kv_buffer(
            self, layer, loc_info, cache_k, cache_v, k_scale=None, v_scale=None, layer_id_override=None, dcp_kv_mask=None
        ):
            for buffer, new in zip(self.get_kv_buffer(layer.layer_id), (cache_k, cache_v)):
                buffer[loc_info.loc] = new

    class SWAKVPool(made["sglang.srt.mem_cache.swa_memory_pool"].SWAKVPool):
        def __init__(self, size, size_swa, swa_attention_layer_ids, full_attention_layer_ids, **options):
            self.swa_layer_nums, self.full_to_swa_index_mapping = len(swa_attention_layer_ids), None
            self.pools = {}
            for layers, rows in ((swa_attention_layer_ids, size_swa), (full_attention_layer_ids, size)):
                for layer_id in layers:
                    pool = MHATokenToKVPool(rows, layer_num=1, enable_memory_saver=False, **options)
                    self.pools[layer_id] = pool, layers is swa_attention_layer_ids

        def get_kv_buffer(self, layer_id):
            return self.pools[layer_id][0].get_kv_buffer(0)

        def set_kv_buffer(
            self, layer, loc_info, cache_k, cache_v, k_scale=None, v_scale=None, layer_id_override=None, dcp_kv_mask=None
        ):
            loc = loc_info.swa_loc if self.pools[layer.layer_id][1] else loc_info.loc
            for buffer, new in zip(self.get_kv_buffer(layer.layer_id), (cache_k, cache_v)):
                buffer[loc] = new

        def translate_loc_from_full_to_swa(self, kv_indices):
            return self.full_to_swa_index_mapping[kv_indices]

    made["sglang.srt.layers.radix_attention"].RadixAttention = RadixAttention
    made["sglang.srt.mem_cache.memory_pool"].MHATokenToKVPool = MHATokenToKVPool
    made["sglang.srt.mem_cache.swa_memory_pool"].SWAKVPool = SWAKVPool
