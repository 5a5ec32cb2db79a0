"""SGLang's attention backend, on a CPU: with the real SGLang and its pools where it is installed,
else with stand-ins of its recorded interface.
"""

import contextlib
import types

import pytest
import serving_cases as cases
import serving_stand_ins
import torch
from flashtune import InvalidArgumentError, UnsupportedError
from flashtune.serving import _interface, _paged
from flashtune.serving import sglang as ours

ROWS, REQUESTS, LONGEST = 640, 10, 96
SCALE = 0.3


@pytest.fixture(scope="module")
def sglang():
    """Whether SGLang is the real one."""
    with serving_stand_ins.engine("sglang") as is_real, published(is_real):
        assert ours.register() == "flashtune"
        yield is_real
        ours.unregister()


@contextlib.contextmanager
def published(is_real):
    """SGLang's process-wide options, at their defaults."""
    if is_real:
        from sglang.srt.runtime_context import get_context

        with get_context().override_server_args():
            yield
    else:
        parallel, schedule = types.SimpleNamespace(attn_cp_size=1, attn_dcp_size=1), types.SimpleNamespace(chunked_prefill_size=64)
        context = types.ModuleType("sglang.srt.runtime_context")
        context.get_parallel, context.get_schedule = lambda: parallel, lambda: schedule
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(__import__("sys").modules, context.__name__, context)
            yield


def made_layer(layer_id=0, window=None, softcap=0.0, sinks=None, **options):
    from sglang.srt.layers.radix_attention import RadixAttention

    del sinks  # Which SGLang hands over in each call.
    size = -1 if window is None else window - 1
    return RadixAttention(
        cases.HEADS, cases.DIM, SCALE, cases.HEADS_KV, layer_id, logit_cap=softcap, sliding_window_size=size, **options
    )


def made_pool(dtype, page_size, window_rows=None, device="cpu"):
    from sglang.srt.mem_cache import memory_pool, swa_memory_pool

    sizes = dict(page_size=page_size, dtype=dtype, head_num=cases.HEADS_KV, head_dim=cases.DIM, device=device)
    if window_rows is None:
        return memory_pool.MHATokenToKVPool(size=ROWS, layer_num=1, enable_memory_saver=False, **sizes)
    return swa_memory_pool.SWAKVPool(
        size=ROWS, size_swa=window_rows, swa_attention_layer_ids=[0], full_attention_layer_ids=[1], **sizes
    )


def made_runner(layers, pool, page_size, dtype=torch.float32, device="cpu", **changes):
    fields = dict(
        model=torch.nn.ModuleList(layers), model_config=types.SimpleNamespace(context_len=LONGEST, is_encoder_decoder=False),
        req_to_token_pool=types.SimpleNamespace(size=REQUESTS, req_to_token=torch.zeros((REQUESTS, LONGEST), dtype=torch.int32, device=device)),
        token_to_kv_pool=pool, page_size=page_size, device=device, dtype=dtype, kv_cache_dtype=dtype, use_mla_backend=False,
        spec_algorithm=types.SimpleNamespace(is_none=lambda: True), kv_index_translator=types.SimpleNamespace(is_translating=False),
    )  # fmt: skip
    return types.SimpleNamespace(**{**fields, **changes})


def made_backend(runner):
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    return ATTENTION_BACKENDS["flashtune"](runner)


class Server:
    """A runner with the requests of a case: their rows of the pool, and keys of earlier steps."""

    def __init__(self, case, page_size, window=None, window_rows=None, device="cpu"):
        self.case, self.page_size, self.device = case, page_size, device
        self.layer = made_layer(**(window or {}))
        self.pool = made_pool(case.q.dtype, page_size, window_rows, device)
        self.runner = made_runner([self.layer], self.pool, page_size, case.q.dtype, device)
        self.backend = made_backend(self.runner)
        _, self.rows = cases.tables(case.lengths, page_size, ROWS // page_size)
        # A batch takes any requests, in any order.
        self.requests = torch.arange(len(case.sizes)).flip(0) + 2
        for request, at in zip(self.requests, self.rows):
            self.runner.req_to_token_pool.req_to_token[request, : len(at)] = at.int().to(device)

    def fill(self, rows=None):
        """Writes old keys. Other rows hold large numbers, which any wrong read would show."""
        for which, buffer in enumerate(self.pool.get_kv_buffer(0)):
            buffer.fill_(1e4)
            for b, at in enumerate(rows or self.rows):
                old = len(at) - self.case.queries[b]
                buffer[at[:old].to(self.device)] = (self.case.keys, self.case.values)[which][b][:old].to(self.device)

    def batch(self, mode):
        from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode

        case = self.case
        lengths = torch.tensor(case.lengths)
        loc = torch.cat([at[len(at) - count :] for at, count in zip(self.rows, case.queries)])
        fields = dict(
            forward_mode=ForwardMode[mode], batch_size=len(case.sizes), req_pool_indices=self.requests.to(self.device), seq_lens=lengths.to(self.device),
            out_cache_loc=loc.to(self.device), seq_lens_cpu=lengths, extend_seq_lens=torch.tensor(case.queries, device=self.device),
            extend_seq_lens_cpu=case.queries,
        )  # fmt: skip
        if "input_ids" in ForwardBatch.__dataclass_fields__:
            fields.update(input_ids=None, seq_lens_sum=sum(case.lengths))
        return ForwardBatch(**fields)

    def run(self, batch, sinks=None):
        forward = self.backend.forward_decode if batch.forward_mode.is_decode_or_idle() else self.backend.forward_extend
        flat = self.case.q.flatten(1)
        more = {} if sinks is None else {"sinks": torch.from_numpy(sinks)}
        out = forward(flat, self.case.k, self.case.v, self.layer, batch, **more)
        assert out.shape == flat.shape
        return out.unflatten(1, (cases.HEADS, cases.DIM))


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("mode", ["EXTEND", "MIXED", "DECODE"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", cases.OPTIONS)
def test_a_batch_of_the_pool_equals_the_oracle(sglang, options, dtype, mode, page_size):
    options = cases.OPTIONS[options]
    server = Server(cases.case(cases.DECODE if mode == "DECODE" else cases.MIXED, dtype), page_size, options)
    server.fill()
    batch = server.batch(mode)
    server.backend.init_forward_metadata(batch)
    cases.judge(server.case, server.run(batch, options.get("sinks")), scale=SCALE, **options)


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("sizes", [cases.MIXED, cases.DECODE], ids=["extend", "decode"])
def test_a_window_layer_reads_its_own_pool(sglang, sizes, page_size):
    case, window = cases.case(sizes, torch.float32), 9
    server = Server(case, page_size, {"window": window}, window_rows=ROWS)
    # The rows of the window's pool are in another order. Those that no query sees have none.
    _, own = cases.tables(case.lengths, page_size, ROWS // page_size, seed=5)
    mapping = torch.zeros(ROWS + 2 * page_size, dtype=torch.int64)
    for b, at in enumerate(server.rows):
        first_seen = max(0, case.lengths[b] - case.queries[b] - window + 1) // page_size * page_size
        mapping[at[first_seen:]] = own[b][first_seen:]
    server.pool.full_to_swa_index_mapping = mapping
    server.fill(own)
    batch = server.batch("EXTEND" if sizes is cases.MIXED else "DECODE")
    server.backend.init_forward_metadata(batch)
    cases.judge(case, server.run(batch), scale=SCALE, window=window)


@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("page_size", [1, 16])
def test_a_captured_graph_serves_the_lengths_of_a_replay(sglang, page_size, window):
    case = cases.case(cases.DECODE, torch.float32)
    server = Server(case, page_size, {"window": window}, window_rows=None if window is None else ROWS)
    if window is not None:
        server.pool.full_to_swa_index_mapping = torch.arange(ROWS + 2 * page_size)
    server.fill()
    backend = server.backend
    backend.init_cuda_graph_state(max_bs=8, max_num_tokens=8)
    captured = server.batch("DECODE")
    captured.seq_lens = torch.full_like(captured.seq_lens, backend.get_cuda_graph_seq_len_fill_value())
    captured.seq_lens_cpu, captured.out_cache_loc = captured.seq_lens, torch.zeros_like(captured.out_cache_loc)
    captured.req_pool_indices = torch.zeros_like(captured.req_pool_indices)
    backend.init_forward_metadata_out_graph(captured, in_capture=True)
    seen = backend.forward_metadata
    batch = server.batch("DECODE")
    backend.init_forward_metadata_out_graph(batch)
    # A replay runs the launches of the capture on the tensors of the capture.
    assert seen.batch.max_seqlen_k == LONGEST
    for tensor, now in zip((seen.batch.seqused_k, seen.batch.block_table), (backend.forward_metadata.batch[2], backend.forward_metadata.batch[4])):
        assert tensor.data_ptr() == now.data_ptr()
    backend.forward_metadata = seen
    cases.judge(case, server.run(batch), scale=SCALE, window=window)


def test_an_encoder_only_layer_sees_all_keys(sglang):
    from sglang.srt.layers.radix_attention import AttentionType

    case = cases.case([(n, n) for n, _ in cases.MIXED], torch.float32)
    server = Server(case, 16, {"window": 5, "attn_type": AttentionType.ENCODER_ONLY})
    server.fill()
    batch = server.batch("EXTEND")
    server.backend.init_forward_metadata(batch)
    cases.judge(case, server.run(batch), causal=False, scale=SCALE, window=5)


def test_keys_that_are_in_the_cache_are_not_written_again(sglang):
    server = Server(cases.case(cases.DECODE, torch.float32), 16)
    server.fill()
    batch = server.batch("DECODE")
    server.backend.init_forward_metadata(batch)
    before = [buffer.clone() for buffer in server.pool.get_kv_buffer(0)]
    server.backend.forward_decode(server.case.q, server.case.k, server.case.v, server.layer, batch, save_kv_cache=False)
    assert all(torch.equal(*both) for both in zip(before, server.pool.get_kv_buffer(0)))


def test_lengths_that_the_host_does_not_know_are_bounded_by_the_context(sglang):
    server = Server(cases.case(cases.DECODE, torch.float32), 16)
    server.fill()
    batch = server.batch("DECODE")
    batch.seq_lens_cpu = None
    server.backend.init_forward_metadata(batch)
    assert server.backend.forward_metadata.batch.max_seqlen_k == LONGEST
    cases.judge(server.case, server.run(batch), scale=SCALE)


def test_an_idle_batch_needs_no_sequence(sglang):
    server = Server(cases.case([(1, 1)], torch.float32), 16)
    batch = server.batch("IDLE")
    batch.batch_size, batch.seq_lens = 0, batch.seq_lens[:0]
    batch.seq_lens_cpu, batch.req_pool_indices, batch.out_cache_loc = batch.seq_lens, batch.req_pool_indices[:0], batch.out_cache_loc[:0]
    server.backend.init_forward_metadata(batch)
    assert len(server.backend.forward_metadata.batch.block_table) == 0


def test_a_backend_prepares_the_forms_of_the_models_layers(sglang, monkeypatch):
    asked = []
    real = _paged._planning.prepare_range
    monkeypatch.setattr(_paged, "_prepared", set())
    monkeypatch.setattr(_paged._planning, "prepare_range", lambda *a, **k: asked.append(k) or real(*a, **k))
    layers = [made_layer(0), made_layer(1, window=5), made_layer(2, window=5)]
    made_backend(made_runner(layers, made_pool(torch.float32, 16), 16))
    assert [(k["window"], k["sinks"]) for k in asked] == [(None, None), ((4, 0), None)]
    assert asked[0]["largest"][0::2] == (REQUESTS, LONGEST)
    layers[0].sinks = torch.nn.Parameter(torch.zeros(cases.HEADS))
    made_backend(made_runner(layers, made_pool(torch.float32, 16), 16))
    assert [(k["window"], k["sinks"] is None) for k in asked[2:]] == [(None, False), ((4, 0), False)]


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(use_mla_backend=True), "attention_arch is MLA"),
        (dict(kv_cache_dtype=torch.float8_e4m3fn), "kv_cache_dtype is torch.float8_e4m3fn and the model is torch.float32"),
        (dict(spec_algorithm=types.SimpleNamespace(is_none=lambda: False)), "speculative_algorithm is given"),
        (dict(kv_index_translator=types.SimpleNamespace(is_translating=True)), "enable_unified_memory is given"),
        (dict(model_config=types.SimpleNamespace(context_len=9, is_encoder_decoder=True)), "is_encoder_decoder is True"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_an_unsupported_option_of_the_server_is_named(sglang, change, message):
    with pytest.raises(UnsupportedError, match=message):
        made_backend(made_runner([made_layer()], made_pool(torch.float32, 16), 16, **change))


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(is_cross_attention=True), "layer 0 has is_cross_attention"),
        (dict(softcap=2.0, logit_capping_method="other"), "logit_capping_method is other"),
        (dict(use_irope=True), "use_irope is True"),
        (dict(pos_encoding_mode="ALIBI"), "pos_encoding_mode is ALIBI"),
    ],
    ids=str,
)
def test_an_unsupported_option_of_a_layer_is_named(sglang, change, message):
    with pytest.raises(UnsupportedError, match=message):
        made_backend(made_runner([made_layer(**change)], made_pool(torch.float32, 16), 16))


def test_what_a_call_may_not_have_is_named(sglang):
    server = Server(cases.case(cases.DECODE, torch.float32), 16)
    batch = server.batch("DECODE")
    server.backend.init_forward_metadata(batch)
    with pytest.raises(UnsupportedError, match="return_lse is given"):
        server.backend.forward_decode(server.case.q, server.case.k, server.case.v, server.layer, batch, return_lse=True)
    server.backend.init_cuda_graph_state(8, 8)
    with pytest.raises(UnsupportedError, match="forward_mode is .*EXTEND.*; flashtune captures graphs of decoding alone"):
        server.backend.init_forward_metadata_out_graph(server.batch("EXTEND"))


def test_another_plugins_backend_keeps_its_name(sglang, caplog):
    from sglang.srt.arg_groups.choices import ATTENTION_BACKEND_CHOICES
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    assert ATTENTION_BACKEND_CHOICES.count("flashtune") == 1
    theirs = ATTENTION_BACKENDS["flashtune"]
    ours.unregister()
    assert "flashtune" not in ATTENTION_BACKENDS and "flashtune" not in ATTENTION_BACKEND_CHOICES
    try:
        ATTENTION_BACKENDS["flashtune"] = object()
        with pytest.raises(InvalidArgumentError, match="another attention backend named flashtune"):
            ours.register()
        ours.plugin()
        assert "no attention backend for SGLang" in caplog.text
    finally:
        del ATTENTION_BACKENDS["flashtune"]
        ours.register()
        ours.register()
    assert ATTENTION_BACKENDS["flashtune"] is theirs and ATTENTION_BACKEND_CHOICES.count("flashtune") == 1


def test_the_recorded_interface_is_found(sglang, monkeypatch):
    _interface.check("sglang")
    fields = {"sglang.srt.model_executor.forward_batch_info:ForwardBatch": "seq_lens neither"}
    monkeypatch.setitem(_interface.FIELDS, "sglang", fields)
    with pytest.raises(UnsupportedError, match="ForwardBatch has no neither"):
        _interface.check("sglang")
