"""vLLM's attention backend, on a CPU: with the real vLLM where it is installed, else with stand-ins
of its recorded interface.
"""

import types

import numpy as np
import pytest
import serving_cases as cases
import serving_stand_ins
import torch
from flashtune import InvalidArgumentError, UnsupportedError
from flashtune.serving import _interface, _paged
from flashtune.serving import vllm as ours

BLOCK, BLOCKS, LONGEST = 16, 40, 96
SCALE = 0.3


@pytest.fixture(scope="module")
def backend():
    with serving_stand_ins.engine("vllm") as is_real:
        assert ours.register() == "CUSTOM"
        found = registry().AttentionBackendEnum.CUSTOM.get_class()
        found.is_real = is_real
        yield found
        ours.unregister()


def registry():
    from vllm.v1.attention.backends import registry

    return registry


def made_impl(backend, window=None, softcap=None, sinks=None, alibi_slopes=None, **options):
    more = {} if sinks is None else {"sinks": torch.from_numpy(sinks)}
    return backend.get_impl_cls()(
        cases.HEADS, cases.DIM, SCALE, cases.HEADS_KV, alibi_slopes, window, "auto", softcap, **{**more, **options}
    )


def made_builder(backend, impl, dtype, device="cpu", **spec):
    spec = {"block_size": BLOCK, "head_size": cases.DIM, "head_size_v": cases.DIM, "dtype": dtype, **spec}
    config = types.SimpleNamespace(
        model_config=types.SimpleNamespace(max_model_len=LONGEST),
        scheduler_config=types.SimpleNamespace(max_num_seqs=8, max_num_batched_tokens=64),
        compilation_config=types.SimpleNamespace(static_forward_context={"layer": types.SimpleNamespace(impl=impl)}),
    )
    return backend.get_builder_cls()(types.SimpleNamespace(**spec), ["layer"], config, torch.device(device))


def made_cache(dtype, layout):
    """(blocks, heads, block_size, 2 * dim) full of NaN, in one of vLLM's orders of memory."""
    shape = (BLOCKS, cases.HEADS_KV, BLOCK, 2 * cases.DIM)
    if layout == "HND":
        return torch.full(shape, torch.nan, dtype=dtype)
    return torch.full((shape[0], shape[2], shape[1], shape[3]), torch.nan, dtype=dtype).transpose(1, 2)


def common_of(case, table, rows, padding=0):
    """vLLM's CommonAttentionMetadata, with padded requests without queries and keys."""
    from vllm.v1.attention.backend import CommonAttentionMetadata

    starts = case.starts()
    starts = torch.tensor([*starts, *[starts[-1]] * padding], dtype=torch.int32)
    slots = torch.cat([at[len(at) - count :] for at, count in zip(rows, case.queries)])
    fields = dict(
        query_start_loc=starts, seq_lens=torch.tensor([*case.lengths, *[0] * padding], dtype=torch.int32),
        num_reqs=len(case.sizes) + padding, num_actual_tokens=len(case.q) + padding, max_query_len=max(case.queries),
        max_seq_len=max(case.lengths), block_table_tensor=torch.nn.functional.pad(table, (0, 0, 0, padding)),
        slot_mapping=torch.nn.functional.pad(slots, (0, padding), value=-1), causal=True,
    )  # fmt: skip
    if "query_start_loc_cpu" in CommonAttentionMetadata.__dataclass_fields__:  # Which the backend does not read.
        fields["query_start_loc_cpu"] = starts
    return CommonAttentionMetadata(**fields)


def filled(cache, case, rows):
    """Writes the keys of earlier steps. The new ones come from the backend."""
    pages = cache.transpose(1, 2)
    for b, at in enumerate(rows):
        old = at[: case.lengths[b] - case.queries[b]]
        both = torch.cat([case.keys[b], case.values[b]], dim=-1)
        pages[old // BLOCK, old % BLOCK] = both[: len(old)]


def run(impl, metadata, case, cache, padding=0):
    q, k, v = (torch.nn.functional.pad(x, (0, 0, 0, 0, 0, padding)) for x in (case.q, case.k, case.v))
    impl.do_kv_cache_update(None, k, v, cache, metadata.slot_mapping)
    out = torch.full_like(q, torch.nan)
    assert impl.forward(None, q, k, v, cache, metadata, out) is out
    return out[: len(case.q)]


@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize("sizes", [cases.MIXED, cases.DECODE], ids=["mixed", "decode"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", cases.OPTIONS)
def test_a_batch_over_pages_equals_the_oracle(backend, options, dtype, sizes, layout):
    options = cases.OPTIONS[options]
    case, cache = cases.case(sizes, dtype), made_cache(dtype, layout)
    table, rows = cases.tables(case.lengths, BLOCK, BLOCKS)
    filled(cache, case, rows)
    impl = made_impl(backend, **options)
    metadata = made_builder(backend, impl, dtype).build(0, common_of(case, table, rows))
    cases.judge(case, run(impl, metadata, case, cache), scale=SCALE, **options)


def test_alibi_slopes_reach_the_kernels(backend):
    slopes = [0.5, 0.25, 0.125, 0.0625]
    case, cache = cases.case(cases.MIXED, torch.float32), made_cache(torch.float32, "HND")
    table, rows = cases.tables(case.lengths, BLOCK, BLOCKS)
    filled(cache, case, rows)
    impl = made_impl(backend, alibi_slopes=slopes)
    metadata = made_builder(backend, impl, torch.float32).build(0, common_of(case, table, rows))
    out = run(impl, metadata, case, cache)
    cases.judge(case, out, scale=SCALE, alibi_slopes=np.array(slopes, np.float32))


def test_padded_requests_of_a_graph_change_nothing(backend):
    case, cache = cases.case(cases.DECODE, torch.float32), made_cache(torch.float32, "HND")
    table, rows = cases.tables(case.lengths, BLOCK, BLOCKS)
    filled(cache, case, rows)
    impl = made_impl(backend)
    metadata = made_builder(backend, impl, torch.float32).build(0, common_of(case, table, rows, padding=3))
    cases.judge(case, run(impl, metadata, case, cache, padding=3), scale=SCALE)


def test_a_capture_serves_longer_sequences_of_a_replay(backend):
    case, cache = cases.case(cases.DECODE, torch.float32), made_cache(torch.float32, "HND")
    table, rows = cases.tables(case.lengths, BLOCK, BLOCKS)
    filled(cache, case, rows)
    impl = made_impl(backend)
    common = common_of(case, table, rows)
    lengths, common.seq_lens[:], common.max_seq_len = common.seq_lens.clone(), 1, 1
    captured = made_builder(backend, impl, torch.float32).build_for_cudagraph_capture(common)
    assert captured.max_seq_len == LONGEST
    # A replay reads what the runner has put into the tensors that the capture saw.
    common.seq_lens.copy_(lengths)
    cases.judge(case, run(impl, captured, case, cache), scale=SCALE)


def test_another_block_table_serves_a_group_of_the_same_layers(backend):
    case, cache = cases.case(cases.MIXED, torch.float32), made_cache(torch.float32, "HND")
    first, other = (cases.tables(case.lengths, BLOCK, BLOCKS, seed) for seed in (1, 2))
    filled(cache, case, other[1])
    impl = made_impl(backend)
    builder = made_builder(backend, impl, torch.float32)
    metadata = builder.build(0, common_of(case, *first))
    slots = common_of(case, *other).slot_mapping
    metadata = builder.update_block_table(metadata, other[0], slots)
    cases.judge(case, run(impl, metadata, case, cache), scale=SCALE)


def test_a_builder_prepares_each_form_once(backend, monkeypatch):
    asked = []
    real = _paged._planning.prepare_range
    monkeypatch.setattr(_paged, "_prepared", set())
    monkeypatch.setattr(_paged._planning, "prepare_range", lambda *a, **k: asked.append(k) or real(*a, **k))
    for _ in range(2):
        made_builder(backend, made_impl(backend, window=5), torch.float32)
        made_builder(backend, made_impl(backend, sinks=np.zeros(cases.HEADS, np.float32)), torch.float32)
    assert [k["largest"] for k in asked] == [(8, 64, LONGEST)] * 2
    assert [(k["window"], k["sinks"] is None) for k in asked] == [((4, 0), True), (None, False)]
    assert all(k["optional"] == ("cu_seqlens_q",) for k in asked)


def test_a_profiling_run_without_metadata_gives_zeros(backend):
    out = torch.ones(3, cases.HEADS, cases.DIM)
    assert not made_impl(backend).forward(None, out, out, out, torch.empty(0), None, out).any()


def test_what_the_backend_says_of_itself(backend):
    assert backend.get_name() == "CUSTOM"
    assert not backend.forward_includes_kv_cache_update
    assert backend.supports_head_size(512) and not backend.supports_head_size(576)
    assert backend.supports_attn_type("decoder") and not backend.supports_attn_type("encoder_only")
    assert [size.base for size in backend.get_supported_kernel_block_sizes()] == [16]


def reasons(backend, kv_cache_dtype, dtype=torch.bfloat16):
    return backend.supports_combination(128, dtype, kv_cache_dtype, 16, False, False, False, False, None)


def test_a_quantised_cache_is_refused_with_its_option(backend):
    assert reasons(backend, "auto") is reasons(backend, "bfloat16") is reasons(backend, None) is None
    assert reasons(backend, "fp8") == "kv_cache_dtype is fp8; flashtune has no quantised K/V caches: use auto"
    assert "the model is torch.bfloat16" in reasons(backend, "float16")
    with pytest.raises(UnsupportedError, match="kv_cache_dtype is fp8_e5m2"):
        backend.get_impl_cls()(4, 16, 1.0, 2, None, None, "fp8_e5m2")


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(attn_type="encoder_only"), "attn_type is encoder_only"),
        (dict(use_alibi_sqrt=True), "use_alibi_sqrt is True"),
        (dict(chunk_lookback=3), "chunk_lookback is 3"),
    ],
    ids=str,
)
def test_an_unsupported_option_is_named(backend, options, message):
    with pytest.raises(UnsupportedError, match=message):
        made_impl(backend, **options)


def test_what_a_batch_may_not_have_is_named(backend):
    case, impl = cases.case(cases.MIXED, torch.float32), made_impl(backend)
    common = common_of(case, *cases.tables(case.lengths, BLOCK, BLOCKS))
    builder = made_builder(backend, impl, torch.float32)
    metadata = builder.build(0, common)
    out, scale = torch.empty_like(case.q), torch.ones(1)
    with pytest.raises(UnsupportedError, match="output_scale is given"):
        impl.forward(None, case.q, case.k, case.v, made_cache(torch.float32, "HND"), metadata, out, output_scale=scale)
    with pytest.raises(UnsupportedError, match=r"kv_cache has shape \(2, 40, 16, 2, 16\)"):
        impl.forward(None, case.q, case.k, case.v, torch.empty(2, BLOCKS, BLOCK, 2, 16), metadata, out)
    with pytest.raises(UnsupportedError, match="head_size_v 32"):
        made_builder(backend, impl, torch.float32, head_size_v=32)
    common.causal = torch.ones(len(case.sizes), dtype=torch.int32)
    with pytest.raises(UnsupportedError, match="causal is not True"):
        builder.build(0, common)


def test_vllms_own_selection_takes_or_refuses_a_configuration(backend):
    if not backend.is_real:
        pytest.skip("vllm is not installed")
    from vllm.platforms.interface import DeviceCapability

    def reasons(**changes):
        wanted = dict(
            head_size=128, dtype=torch.bfloat16, kv_cache_dtype="auto", block_size=16, use_mla=False, has_sink=True,
            use_sparse=False, use_mm_prefix=False, use_per_head_quant_scales=False, attn_type="decoder",
            device_capability=DeviceCapability(9, 0), has_sliding_window=True,
        )  # fmt: skip
        return backend.validate_configuration(**{**wanted, **changes})

    assert reasons() == []
    assert "kv_cache_dtype is fp8; flashtune has no quantised K/V caches: use auto" in reasons(kv_cache_dtype="fp8")
    for change in (
        dict(use_mla=True), dict(head_size=576), dict(use_dcp=True), dict(use_non_causal=True), dict(use_adaptive_verification=True),
        dict(use_batch_invariant=True), dict(device_capability=DeviceCapability(7, 5)), dict(block_size=24),
    ):  # fmt: skip
        assert len(reasons(**change)) == 1, change


def test_another_plugins_backend_keeps_its_place(backend, caplog):
    custom = registry().AttentionBackendEnum.CUSTOM
    try:
        registry().register_backend(custom, "theirs.Backend")
        with pytest.raises(InvalidArgumentError, match="CUSTOM is theirs.Backend"):
            ours.register()
        ours.plugin()
        assert "no attention backend for vLLM: vLLM's backend CUSTOM is theirs.Backend" in caplog.text
        ours.unregister()
        assert custom.get_path() == "theirs.Backend"
    finally:
        custom.clear_override()
        ours.register()
        ours.register()
    assert custom.get_class() is backend


def test_the_recorded_interface_is_found(backend, monkeypatch):
    _interface.check("vllm")
    record = {**_interface.FUNCTIONS["vllm"], "vllm.v1.attention.backend:AttentionImpl.forward": "self layer"}
    monkeypatch.setitem(_interface.FUNCTIONS, "vllm", record)
    with pytest.raises(UnsupportedError, match=r"AttentionImpl.forward takes \(self, layer, query, .* instead of \(self, layer\)"):
        _interface.check("vllm")


def test_a_layer_of_the_real_vllm_runs_on_the_backend(backend):
    if not backend.is_real:
        pytest.skip("vllm is not installed")
    from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
    from vllm.forward_context import set_forward_context
    from vllm.model_executor.layers.attention import Attention
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    config = VllmConfig(device_config=DeviceConfig(device="cpu"))
    config.model_config = types.SimpleNamespace(
        max_model_len=LONGEST, is_mm_prefix_lm=False, dtype=torch.float32, rswa_window=None, multimodal_config=None
    )
    with set_current_vllm_config(config):
        layer = Attention(cases.HEADS, cases.DIM, SCALE, cases.HEADS_KV, prefix="layers.0.attn", attn_backend=backend)
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=cases.HEADS_KV, head_size=cases.DIM, dtype=torch.float32)
        builder = backend.get_builder_cls()(spec, ["layers.0.attn"], config, torch.device("cpu"))
    case = cases.case(cases.MIXED, torch.float32)
    layer.kv_cache = made_cache(torch.float32, "NHD")
    table, rows = cases.tables(case.lengths, BLOCK, BLOCKS)
    filled(layer.kv_cache, case, rows)
    metadata = builder.build(0, common_of(case, table, rows))
    slots = {"layers.0.attn": metadata.slot_mapping}
    with set_current_vllm_config(config), set_forward_context({"layers.0.attn": metadata}, config, slot_mapping=slots):
        out = layer(*(x.flatten(1) for x in (case.q, case.k, case.v)))
    cases.judge(case, out.unflatten(1, (cases.HEADS, cases.DIM)), scale=SCALE)
