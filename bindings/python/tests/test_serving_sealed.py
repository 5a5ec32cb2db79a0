"""What a backend prepares at start-up covers every later step: a sealed context refuses all else.

A context cannot be unsealed, so each test runs in a process of its own.
"""

import subprocess
import sys
from pathlib import Path

import flashtune
import pytest

SHARED = """
import flashtune, numpy, pytest, torch
import serving_cases as cases, serving_stand_ins

def batches(seed):
    random = numpy.random.default_rng(seed)
    for step in range(12):
        counts = [1 if step % 2 else int(random.integers(1, 30)) for _ in range(int(random.integers(1, 8)))]
        yield cases.case([(count, int(random.integers(count, 90))) for count in counts], torch.float32, step)

def sealed():
    flashtune.seal()
    unprepared = torch.zeros(1, 1, 1, 8)
    with pytest.raises(flashtune.FlashtuneError, match="sealed"):
        flashtune.attention(unprepared, unprepared, unprepared)
"""

VLLM = """
import test_serving_vllm as of_vllm
from flashtune.serving import vllm

with serving_stand_ins.engine("vllm"):
    vllm.register()
    backend = of_vllm.registry().AttentionBackendEnum.CUSTOM.get_class()
    impls = [of_vllm.made_impl(backend, **options) for options in cases.OPTIONS.values()]
    builders = [of_vllm.made_builder(backend, impl, torch.float32) for impl in impls]
    sealed()
    for case in batches(0):
        table, rows = cases.tables(case.lengths, of_vllm.BLOCK, 60)
        for impl, builder, options in zip(impls, builders, cases.OPTIONS.values()):
            cache = torch.full((60, cases.HEADS_KV, of_vllm.BLOCK, 2 * cases.DIM), torch.nan)
            of_vllm.filled(cache, case, rows)
            metadata = builder.build(0, of_vllm.common_of(case, table, rows))
            cases.judge(case, of_vllm.run(impl, metadata, case, cache), scale=of_vllm.SCALE, **options)
"""

SGLANG = """
import test_serving_sglang as of_sglang
from flashtune.serving import sglang

with serving_stand_ins.engine("sglang") as is_real, of_sglang.published(is_real):
    sglang.register()
    pool = of_sglang.made_pool(torch.float32, 16)
    layers = [of_sglang.made_layer(at, **options) for at, options in enumerate(cases.OPTIONS.values())]
    layers[0].sinks = torch.nn.Parameter(torch.zeros(cases.HEADS))
    of_sglang.made_backend(of_sglang.made_runner(layers, pool, 16))
    sealed()
    for options in cases.OPTIONS.values():
        for case in batches(1):
            server = of_sglang.Server(case, 16, options)
            server.fill()
            batch = server.batch("DECODE" if max(case.queries) == 1 else "MIXED")
            server.backend.init_forward_metadata(batch)
            cases.judge(case, server.run(batch, options.get("sinks")), scale=of_sglang.SCALE, **options)
"""


@pytest.mark.parametrize("program", [VLLM, SGLANG], ids=["vllm", "sglang"])
def test_no_step_needs_more_than_was_prepared(program):
    paths = [str(Path(__file__).parent), str(Path(flashtune.__file__).parents[1])]
    start = f"import sys; sys.path[:0] = {paths!r}\n"
    done = subprocess.run([sys.executable, "-c", start + SHARED + program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
