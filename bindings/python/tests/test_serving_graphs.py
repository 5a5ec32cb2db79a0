"""The serving backends on a GPU: captured decoding steps, and no step that waits for the device.

Each test also runs on the CPU, where a replay is one more call. The engines may be stand-ins.
"""

import contextlib

import pytest
import serving_cases as cases
import serving_stand_ins
import test_serving_sglang as of_sglang
import test_serving_vllm as of_vllm
import torch
from flashtune.serving import vllm
from test_serving_sglang import sglang  # noqa: F401  (a fixture)

DTYPE = torch.bfloat16

devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.needs_gpu)])


@pytest.fixture(scope="module")
def vllm_backend():
    with serving_stand_ins.engine("vllm"):
        vllm.register()
        yield of_vllm.registry().AttentionBackendEnum.CUSTOM.get_class()
        vllm.unregister()


def replayed(run, change, device):
    """What `run` gives after its capture, then `change` and a replay."""
    run()
    if device == "cpu":
        change()
        return run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    change()
    graph.replay()
    torch.cuda.synchronize()
    return out


@contextlib.contextmanager
def without_waiting(device):
    """Any call of torch that waits for the GPU raises."""
    if device == "cpu":
        yield
        return
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


class Engine:
    """A layer of vLLM on a device. All keys of the case are in its cache."""

    def __init__(self, backend, sizes, device, **options):
        self.case = cases.case(sizes, DTYPE).to(device)
        table, rows = cases.tables(self.case.lengths, of_vllm.BLOCK, of_vllm.BLOCKS)
        cache = of_vllm.made_cache(DTYPE, "NHD")
        pages = cache.transpose(1, 2)
        for b, at in enumerate(rows):
            pages[at // of_vllm.BLOCK, at % of_vllm.BLOCK] = torch.cat([self.case.keys[b], self.case.values[b]], dim=-1)
        self.cache = pages.to(device).transpose(1, 2)
        with torch.device(device):
            self.impl = of_vllm.made_impl(backend, **options)
        self.builder = of_vllm.made_builder(backend, self.impl, DTYPE, device)
        self.common = of_vllm.common_of(self.case, table, rows)
        for name in ("query_start_loc", "seq_lens", "block_table_tensor", "slot_mapping"):
            setattr(self.common, name, getattr(self.common, name).to(device))

    def run(self, metadata):
        q, k, v = self.case.q, self.case.k, self.case.v
        return self.impl.forward(None, q, k, v, self.cache, metadata, torch.empty_like(q))


@devices
@pytest.mark.parametrize("window", [None, 9])
def test_a_graph_of_vllm_serves_other_lengths(vllm_backend, device, window):
    engine = Engine(vllm_backend, cases.DECODE, device, window=window)
    lengths = engine.common.seq_lens.clone()
    engine.common.seq_lens.fill_(1)
    metadata = engine.builder.build_for_cudagraph_capture(engine.common)
    out = replayed(lambda: engine.run(metadata), lambda: engine.common.seq_lens.copy_(lengths), device)
    cases.judge(engine.case, out, scale=of_vllm.SCALE, window=window)


@devices
@pytest.mark.parametrize("sizes", [cases.MIXED, cases.DECODE], ids=["mixed", "decode"])
def test_a_step_of_vllm_does_not_wait(vllm_backend, device, sizes):
    engine = Engine(vllm_backend, sizes, device)
    engine.run(engine.builder.build(0, engine.common))
    with without_waiting(device):
        out = engine.run(engine.builder.build(0, engine.common))
    cases.judge(engine.case, out, scale=of_vllm.SCALE)


@devices
@pytest.mark.parametrize("page_size", [1, 16])
def test_a_graph_of_sglang_serves_other_lengths(sglang, device, page_size):  # noqa: F811
    server = of_sglang.Server(cases.case(cases.DECODE, DTYPE).to(device), page_size, device=device)
    server.fill()
    backend = server.backend
    backend.init_cuda_graph_state(max_bs=8, max_num_tokens=8)
    static = server.batch("DECODE")
    locations, static.out_cache_loc = static.out_cache_loc, torch.zeros_like(static.out_cache_loc)
    lengths, static.seq_lens = static.seq_lens, torch.ones_like(static.seq_lens)
    requests, static.req_pool_indices = static.req_pool_indices, torch.zeros_like(static.req_pool_indices)
    static.seq_lens_cpu = torch.ones(len(lengths), dtype=torch.int64)
    backend.init_forward_metadata_out_graph(static, in_capture=True)

    def change():
        for tensor, now in ((static.out_cache_loc, locations), (static.seq_lens, lengths), (static.req_pool_indices, requests)):
            tensor.copy_(now)
        static.seq_lens_cpu = torch.tensor(server.case.lengths)
        with without_waiting(device):
            backend.init_forward_metadata_out_graph(static)

    out = replayed(lambda: server.run(static), change, device)
    cases.judge(server.case, out, scale=of_sglang.SCALE)


@devices
@pytest.mark.parametrize("mode", ["MIXED", "DECODE"])
def test_a_step_of_sglang_does_not_wait(sglang, device, mode):  # noqa: F811
    sizes = cases.MIXED if mode == "MIXED" else cases.DECODE
    server = of_sglang.Server(cases.case(sizes, DTYPE).to(device), 16, device=device)
    server.fill()
    batch = server.batch(mode)
    server.backend.init_forward_metadata(batch)
    server.run(batch)
    with without_waiting(device):
        server.backend.init_forward_metadata(batch)
        out = server.run(batch)
    cases.judge(server.case, out, scale=of_sglang.SCALE)
