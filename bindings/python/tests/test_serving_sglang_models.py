"""Tiny random models of the real SGLang with attention on flashtune give transformers' logits.

SGLang's server needs a GPU. The test does what its model runner does: it makes the pools and the
backend, fills a ForwardBatch and calls the model.
"""

import copy
import importlib.util
import sys
import types

import pytest
import torch
from flashtune.serving import sglang as ours

if importlib.util.find_spec("sglang") is None:
    pytest.skip("sglang is not installed", allow_module_level=True)

import serving_models as models  # noqa: E402  (needs transformers, which SGLang brings)

MODELS = {"llama": "llama:LlamaForCausalLM", "gemma2": "gemma2:Gemma2ForCausalLM"}


@pytest.fixture(scope="module")
def groups(tmp_path_factory):
    """SGLang's options at their defaults, and its process groups, of one process."""
    from sglang.srt.distributed import destroy_distributed_environment, init_distributed_environment, initialize_model_parallel
    from sglang.srt.runtime_context import get_context, get_parallel

    store = tmp_path_factory.mktemp("store") / "file"
    ranks = ("tp_rank", "attn_tp_rank", "pp_rank", "attn_dp_rank", "attn_cp_rank", "moe_ep_rank", "moe_tp_rank")
    with get_context().override_server_args(device="cpu"), pytest.MonkeyPatch.context() as patch:
        init_distributed_environment(
            world_size=1, rank=0, local_rank=0, distributed_init_method=f"file://{store}", backend="gloo"
        )
        initialize_model_parallel()
        # Without a GPU, SGLang's rotary embedding imports a kernel of vLLM's that it does not call.
        for name in ("vllm", "vllm._custom_ops"):
            patch.setitem(sys.modules, name, types.ModuleType(name))
        sys.modules["vllm._custom_ops"].rotary_embedding = None
        ours.register()
        with get_parallel().override(**{name: 0 for name in ranks}):
            yield
        ours.unregister()
        destroy_distributed_environment()


class Server:
    """A model of SGLang with its pools."""

    def __init__(self, name, reference):
        from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool

        module, _, kind = MODELS[name].partition(":")
        config = copy.copy(reference.config)
        # SGLang reads the name that Gemma 2's published configs have besides.
        config.hidden_act = getattr(config, "hidden_activation", None) or config.hidden_act
        self.model = getattr(importlib.import_module(f"sglang.srt.models.{module}"), kind)(config)
        self.model.load_weights(reference.state_dict().items())
        self.requests = ReqToTokenPool(4, models.LONGEST, "cpu", False)
        pool = MHATokenToKVPool(
            size=models.PAGES * models.PAGE, page_size=models.PAGE, dtype=torch.float32, head_num=config.num_key_value_heads,
            head_dim=16, layer_num=config.num_hidden_layers, device="cpu", enable_memory_saver=False,
        )  # fmt: skip
        runner = types.SimpleNamespace(
            model=self.model, model_config=types.SimpleNamespace(context_len=models.LONGEST, is_encoder_decoder=False),
            req_to_token_pool=self.requests, token_to_kv_pool=pool, page_size=models.PAGE, device="cpu", dtype=torch.float32,
            kv_cache_dtype=torch.float32, use_mla_backend=False, spec_algorithm=types.SimpleNamespace(is_none=lambda: True),
            kv_index_translator=types.SimpleNamespace(is_translating=False),
        )  # fmt: skip
        self.backend = ATTENTION_BACKENDS[ours.NAME](runner)
        self.cap = getattr(config, "final_logit_softcapping", None)

    @torch.inference_mode()
    def run(self, step):
        from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
        from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

        in_page = torch.arange(models.PAGE)
        for request, row in zip(step.active, step.table):
            self.requests.req_to_token[request] = (row[:, None] * models.PAGE + in_page).flatten()
        batch = ForwardBatch(
            forward_mode=ForwardMode.DECODE if max(step.counts) == 1 else ForwardMode.MIXED, batch_size=len(step.counts),
            input_ids=step.tokens, req_pool_indices=torch.tensor(step.active), seq_lens=step.lengths.long(), out_cache_loc=step.rows,
            seq_lens_sum=int(step.lengths.sum()), seq_lens_cpu=step.lengths.long(), positions=step.positions,
            extend_seq_lens=torch.tensor(step.counts), extend_seq_lens_cpu=step.counts,
        )  # fmt: skip
        with forward_context(ForwardContext(attn_backend=self.backend)):
            self.backend.init_forward_metadata(batch)
            hidden = self.model.model(step.tokens, step.positions, batch)
        head = getattr(self.model, "lm_head", self.model.model.embed_tokens)
        logits = hidden @ head.weight[: models.SIZES["vocab_size"]].T
        return logits if self.cap is None else self.cap * torch.tanh(logits / self.cap)


@pytest.mark.parametrize("name", MODELS)
def test_a_model_of_sglang_equals_transformers(groups, name):
    reference = models.reference(name)
    models.serve(Server(name, reference).run, reference)
