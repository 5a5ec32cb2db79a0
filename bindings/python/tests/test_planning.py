"""prepare, plan_info, autotune and records on the CPU backend."""

import json
import os
import subprocess
import sys

import flashtune
import numpy as np
import pytest


def arrays(seqlen=96, heads=2, dim=32):
    return [np.zeros((1, seqlen, heads, dim), np.float32) for _ in range(3)]


@pytest.mark.parametrize("backward, name", [(False, "forward"), (True, "backward")])
def test_plan_info_names_kernel_config_and_reason(backward, name):
    info = flashtune.plan_info(*arrays(), causal=True, backward=backward)
    assert info["kernel"] == f"flashtune_cpu_{name}"
    assert info["config"].startswith("cpu ") and "block_m=" in info["config"]
    assert info["reason"] and info["source"] in ("heuristic", "shipped", "nearest-gpu", "machine", "process")


def test_a_batch_invariant_plan_is_the_same_in_every_batch():
    q, k, v = (np.zeros((5, 70, 4, 16), np.float32) for _ in range(3))
    plans = [flashtune.plan_info(*(x[:count] for x in (q, k, v)), batch_invariant=True) for count in (1, 5)]
    assert plans[0]["config"] == plans[1]["config"] and "batch-invariant" in plans[0]["reason"]
    with pytest.raises(ValueError, match="batch_invariant is True and backward True"):
        flashtune.prepare(q, k, v, backward=True, batch_invariant=True)


def test_a_deterministic_plan_ignores_tuning_records():
    q, k, v = arrays(seqlen=144)
    flashtune.autotune(q, k, v, backward=True, time_limit=5)
    flashtune.prepare(q, k, v, backward=True, deterministic=True)
    info = flashtune.plan_info(q, k, v, backward=True, deterministic=True)
    assert info["source"] == "heuristic" and "deterministic" in info["reason"]
    assert flashtune.plan_info(q, k, v, backward=True)["source"] == "process"
    with pytest.raises(ValueError, match="deterministic is True and backward False"):
        flashtune.prepare(q, k, v, deterministic=True)


def test_autotune_reports_progress_and_its_winner_is_the_plan():
    q, k, v = arrays(seqlen=160)
    seen = []
    info = flashtune.autotune(q, k, v, time_limit=5, progress=lambda progress: seen.append(progress))
    assert info["source"] == "process" and info["measured_us"] > 0
    assert flashtune.plan_info(q, k, v)["config"] == info["config"]
    assert seen and all(progress["done"] <= progress["total"] for progress in seen)
    assert seen[-1]["best_config"] is not None


def test_a_progress_that_returns_true_cancels():
    q, k, v = arrays(seqlen=224)
    with pytest.raises(flashtune.FlashtuneError) as caught:
        flashtune.autotune(q, k, v, time_limit=20, retune=True, progress=lambda progress: True)
    assert caught.value.status == 11


def test_an_exception_in_progress_is_raised():
    q, k, v = arrays(seqlen=256)

    def fail(progress):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        flashtune.autotune(q, k, v, time_limit=20, retune=True, progress=fail)


def test_records_travel_through_a_file(tmp_path):
    q, k, v = arrays(seqlen=112)
    flashtune.autotune(q, k, v, time_limit=5)
    path = tmp_path / "records.jsonl"
    count = flashtune.export_records(path)
    lines = path.read_text().splitlines()
    assert count == len(lines) >= 1
    assert all(isinstance(json.loads(line), dict) for line in lines)
    assert flashtune.import_records(path) <= count


def test_a_missing_record_file_is_an_error(tmp_path):
    with pytest.raises(flashtune.FlashtuneError, match="nowhere.jsonl"):
        flashtune.import_records(tmp_path / "nowhere.jsonl")


def test_a_path_that_c_would_cut_is_refused(tmp_path):
    path = str(tmp_path / "records\0.jsonl")
    for function in (flashtune.export_records, flashtune.import_records, flashtune.use_pack):
        with pytest.raises(flashtune.InvalidArgumentError, match="path is .*; it must have no NUL"):
            function(path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("device", ["cpu", -1, 1.5, [], True, 1 << 40])
def test_a_wrong_device_is_named(device, tmp_path):
    path = tmp_path / "records.jsonl"
    for call in (
        lambda: flashtune.pack_info(device), lambda: flashtune.seal(device),
        lambda: flashtune.export_records(path, device), lambda: flashtune.import_records(path, device),
    ):  # fmt: skip
        with pytest.raises(flashtune.InvalidArgumentError, match="device is .*; it must be the number of a GPU"):
            call()


def test_a_prepared_problem_can_be_launched():
    q, k, v = arrays(seqlen=48)
    flashtune.prepare(q, k, v)
    flashtune.prepare(q, k, v, backward=True)
    out, lse = flashtune.attention_forward(q, k, v)
    assert all((x == 0).all() for x in flashtune.attention_backward(out, q, k, v, out, lse))


def test_a_wrong_time_limit_is_named():
    with pytest.raises(ValueError, match="time_limit"):
        flashtune.autotune(*arrays(), time_limit=-1)
    with pytest.raises(ValueError, match="time_limit is 'x'; it must be a number of seconds"):
        flashtune.autotune(*arrays(), time_limit="x")


SERVER = """
import flashtune, numpy as np
q, pages = np.zeros((1, 1, 8, 16), np.float32), np.zeros((40, 16, 2, 16), np.float32)
table, used = np.arange(10, dtype=np.int32).reshape(1, 10), np.array([5], np.int32)
keys = dict(causal=True, block_table=table, seqused_k=used)
done = flashtune.prepare_range(q, pages, pages, largest=(4, 100, 160), **keys)
assert done["classes"] == 2 and done["configs"] > 0 and done["kernels"] == 0, done
flashtune.seal()
rng = np.random.default_rng(1)
for _ in range(50):
    batch, seqlen_q = rng.integers(1, 5), rng.integers(1, 101)
    table = rng.integers(0, 40, (batch, 10), np.int32)
    keys = dict(causal=True, block_table=table, seqused_k=rng.integers(0, 161, batch, np.int32))
    info = flashtune.plan_info(np.zeros((batch, seqlen_q, 8, 16), np.float32), pages, pages, **keys)
    assert info["kernel"] == "flashtune_cpu_forward"
try:
    flashtune.plan_info(q, np.zeros((1, 8, 2, 16), np.float32), np.zeros((1, 8, 2, 16), np.float32))
except flashtune.FlashtuneError as error:
    assert "sealed" in str(error), error
    print("refused")
"""


def test_a_sealed_context_serves_a_prepared_range_and_nothing_else():
    # A context cannot be unsealed, so this takes a process of its own.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", SERVER], capture_output=True, text=True, timeout=60, env=environment)
    assert done.stdout == "refused\n", done.stderr


def test_a_range_takes_what_is_optional_by_name():
    q, k, v = arrays()
    keys = dict(causal=True, sinks=np.zeros(2, np.float32))
    done = flashtune.prepare_range(q, k, v, largest=(2, 96, 96), optional=("causal", "sinks"), **keys)
    assert done["classes"] == 4 and done["workspace_bytes"] == 0 and done["milliseconds"] > 0
    backward = flashtune.prepare_range(q, k, v, largest=(2, 96, 96), backward=True)
    assert backward["classes"] == 1 and backward["workspace_bytes"] > 0


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(largest=(2, 96)), "largest is \\(2, 96\\); it must be \\(batch_size, seqlen_q, seqlen_k\\)"),
        (dict(least=(3, 1, 1)), "least_batch_size is 3; it must be from 1 to the range's batch_size, which is 2"),
        # Their low 64 bits are 2 and 1.
        (dict(largest=((1 << 64) + 2, 96, 96)), "largest is .*three integers from 0 to 2\\*\\*63 - 1"),
        (dict(least=((1 << 64) + 1, 1, 1)), "least is .*three integers from 0 to 2\\*\\*63 - 1"),
        (dict(optional="causal"), "optional is 'causal'; it must be a sequence of names"),
        (dict(optional=None), "optional is None; it must be a sequence of names"),
        (dict(optional=("rope",)), "optional has 'rope'; it may have causal, window"),
    ],
)
def test_a_wrong_range_names_the_argument(changes, message):
    with pytest.raises(ValueError, match=message):
        flashtune.prepare_range(*arrays(), **(dict(largest=(2, 96, 96)) | changes))
