"""Skips tests for which the machine lacks torch, transformers, JAX or a GPU, and reports the skips.

`FLASHTUNE_REQUIRE_GPU=1` makes a skip for a missing torch or GPU a failure.
"""

import importlib.util
import os
import shutil
import tempfile

import pytest

_REQUIRE_GPU = os.environ.get("FLASHTUNE_REQUIRE_GPU") == "1"
_missing = {}

if "FLASHTUNE_CACHE_DIR" not in os.environ:
    # Tests neither read nor change this machine's tuning records.
    _cache = tempfile.mkdtemp(prefix="flashtune-test-")
    os.environ["FLASHTUNE_CACHE_DIR"] = _cache


def pytest_configure(config):
    config.addinivalue_line("markers", "needs_torch: runs where PyTorch is importable")
    config.addinivalue_line("markers", "needs_gpu: runs where PyTorch sees a CUDA device")


def pytest_ignore_collect(collection_path, config):
    # These modules import torch at their top.
    if collection_path.name in _NEEDS_TORCH and not _has_torch():
        _missing.setdefault("PyTorch is not installed", []).append(collection_path.name)
        return True
    if collection_path.name in _NEEDS_TRANSFORMERS and not _has("transformers"):
        _missing.setdefault("transformers is not installed", []).append(collection_path.name)
        return True
    if collection_path.name in _NEEDS_JAX and not _has("jax"):
        _missing.setdefault("JAX is not installed", []).append(collection_path.name)
        return True
    return None


def pytest_collection_modifyitems(items):
    # JAX's threads do not survive a fork, so the tests that fork run before it starts them.
    items.sort(key=lambda item: item.path.name in _NEEDS_JAX)


_NEEDS_JAX = {"test_jax.py", "test_jax_caches.py", "test_jax_eight.py"}
_NEEDS_TRANSFORMERS = {"test_transformers.py"}
_NEEDS_TORCH = {
    "test_context_parallel.py",
    "test_flash_attn_interface.py",
    "test_gpu.py",
    "test_kvcache.py",
    "test_kvcache_options.py",
    "test_serving_graphs.py",
    "test_serving_sealed.py",
    "test_serving_sglang.py",
    "test_serving_sglang_models.py",
    "test_serving_vllm.py",
    "test_serving_vllm_models.py",
    "test_torch.py",
    "test_torch_compile.py",
    "test_torch_drafts.py",
    "test_torch_features.py",
    "test_torch_recorded.py",
    "test_torch_sdpa.py",
    "test_training.py",
    "test_transformers.py",
}


def _has_torch():
    return _has("torch")


def _has(module):
    return importlib.util.find_spec(module) is not None


def _has_gpu():
    if not _has_torch():
        return False
    import torch

    return torch.cuda.is_available()


def pytest_runtest_setup(item):
    if item.get_closest_marker("needs_gpu") and not _has_gpu():
        _missing.setdefault("PyTorch sees no CUDA device", []).append(item.nodeid)
        if _REQUIRE_GPU:
            pytest.fail("no CUDA device, and FLASHTUNE_REQUIRE_GPU=1")
        pytest.skip("no CUDA device")


def pytest_sessionfinish(session):
    if _REQUIRE_GPU and "PyTorch is not installed" in _missing:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter):
    for reason, what in _missing.items():
        terminalreporter.write_line(f"SKIPPED: {reason}: {len(what)} not run, the first {what[0]}", yellow=True)


def pytest_unconfigure(config):
    if os.environ.get("FLASHTUNE_CACHE_DIR") == globals().get("_cache"):
        shutil.rmtree(_cache, ignore_errors=True)
