"""Tiny random models of the real vLLM with attention on flashtune give transformers' logits.

vLLM's GPU package has no CPU platform, so its engine does not start here. The test does what the
engine's model runner does: it loads the model, builds metadata and calls the model.
"""

import importlib.util
import types

import pytest
import torch
from flashtune.serving import vllm as ours

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vllm is not installed", allow_module_level=True)

import serving_models as models  # noqa: E402  (needs transformers, which vLLM brings)


@pytest.fixture(scope="module")
def groups(tmp_path_factory):
    """vLLM's process groups, of one process, and a platform that takes the chosen backend."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel, parallel_state
    from vllm.platforms import current_platform

    chosen = classmethod(lambda cls, selected_backend, **_: selected_backend.get_path())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(current_platform), "get_attn_backend_cls", chosen)
        ours.register()
        with set_current_vllm_config(VllmConfig(device_config=_cpu())):
            store = tmp_path_factory.mktemp("store") / "file"
            init_distributed_environment(1, 0, f"file://{store}", 0, "gloo")
            initialize_model_parallel(1, 1)
        yield
        parallel_state.cleanup_dist_env_and_memory()
        ours.unregister()


def _cpu():
    from vllm.config import DeviceConfig

    return DeviceConfig(device="cpu")


class Server:
    """A model of vLLM with its K/V cache."""

    def __init__(self, name, folder):
        from vllm.config import AttentionConfig, CacheConfig, CompilationConfig, ModelConfig, VllmConfig, set_current_vllm_config
        from vllm.model_executor.model_loader import get_model

        options = dict(skip_tokenizer_init=True, dtype="float32", max_model_len=models.LONGEST, enforce_eager=True)
        # The window of all layers is the cache's. Gemma 2 has windows in half of its layers.
        window = models.WINDOW if name == "mistral" else None
        self.config = VllmConfig(
            model_config=ModelConfig(model=str(folder), **options), device_config=_cpu(),
            cache_config=CacheConfig(block_size=models.PAGE, sliding_window=window),
            attention_config=AttentionConfig(backend=ours.NAME),
            compilation_config=CompilationConfig(mode=0, custom_ops=["none"]),
        )  # fmt: skip
        with set_current_vllm_config(self.config):
            self.model = get_model(vllm_config=self.config)
            layers = self.config.compilation_config.static_forward_context
            self.builders = {name: self._builder(name, layer) for name, layer in layers.items()}

    def _builder(self, name, layer):
        backend = layer.get_attn_backend()
        assert backend.get_name() == ours.NAME
        layer.kv_cache = torch.full((models.PAGES, layer.num_kv_heads, models.PAGE, 2 * layer.head_size), torch.nan)
        spec = types.SimpleNamespace(
            block_size=models.PAGE, head_size=layer.head_size, head_size_v=layer.head_size_v, dtype=torch.float32
        )
        return backend.get_builder_cls()(spec, [name], self.config, torch.device("cpu"))

    @torch.inference_mode()
    def run(self, step):
        from vllm.config import set_current_vllm_config
        from vllm.forward_context import set_forward_context
        from vllm.v1.attention.backend import CommonAttentionMetadata

        starts = torch.tensor([0, *step.counts]).cumsum(0).int()
        common = CommonAttentionMetadata(
            query_start_loc=starts, query_start_loc_cpu=starts, seq_lens=step.lengths, num_reqs=len(step.counts),
            num_actual_tokens=len(step.tokens), max_query_len=max(step.counts), max_seq_len=int(step.lengths.max()),
            block_table_tensor=step.table, slot_mapping=step.rows,
        )  # fmt: skip
        metadata = {name: builder.build(0, common) for name, builder in self.builders.items()}
        slots = {name: common.slot_mapping for name in self.builders}
        with set_current_vllm_config(self.config), set_forward_context(metadata, self.config, slot_mapping=slots):
            return self.model.compute_logits(self.model(step.tokens, step.positions))


@pytest.mark.parametrize("name", models.CONFIGS)
def test_a_model_of_vllm_equals_transformers(groups, name, tmp_path):
    reference = models.reference(name)
    reference.save_pretrained(tmp_path)
    models.serve(Server(name, tmp_path).run, reference)
