"""The mirrors in `_structs.py` against the header itself, through a C compiler."""

import ctypes
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from flashtune import _structs

HEADER = Path(__file__).resolve().parents[3] / "include" / "flashtune.h"
COMPILER = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
STRUCTS = {
    "flashtune_tensor": _structs.Tensor,
    "flashtune_const_tensor": _structs.Tensor,
    "flashtune_scores_tensor": _structs.ScoresTensor,
    "flashtune_const_scores_tensor": _structs.ScoresTensor,
    "flashtune_block_mask": _structs.BlockMask,
    "flashtune_forward_params": _structs.ForwardParams,
    "flashtune_backward_params": _structs.BackwardParams,
    "flashtune_merge_params": _structs.MergeParams,
    "flashtune_kv_append_params": _structs.KvAppendParams,
    "flashtune_context_options": _structs.ContextOptions,
    "flashtune_progress": _structs.Progress,
    "flashtune_autotune_params": _structs.AutotuneParams,
    "flashtune_plan_info": _structs.PlanInfo,
}
PREFIXES = ("APPEND_", "BACKEND_", "CAUSAL_", "DTYPE_", "FEATURE_", "SOURCE_", "WINDOW_")
CONSTANTS = [name for name in dir(_structs) if name.startswith(PREFIXES) and name != "FEATURE_GRADIENTS"]


@pytest.mark.skipif(COMPILER is None, reason="no C compiler")
def test_sizes_offsets_and_constants_are_the_headers(tmp_path):
    expected, lines = {}, []

    def ask(expression, value):
        expected[expression] = value
        lines.append(f'printf("%lld {expression}\\n", (long long)({expression}));')

    for name, structure in STRUCTS.items():
        ask(f"sizeof({name})", ctypes.sizeof(structure))
        for field, kind in structure._fields_:
            ask(f"offsetof({name}, {field})", getattr(structure, field).offset)
            ask(f"sizeof((({name} *)0)->{field})", ctypes.sizeof(kind))
    for name in CONSTANTS:
        ask(f"FLASHTUNE_{name}", getattr(_structs, name))
    source = tmp_path / "probe.c"
    body = "\n    ".join(lines)
    source.write_text(f'#include "flashtune.h"\n#include <stddef.h>\n#include <stdio.h>\nint main(void) {{\n    {body}\n}}\n')
    program = tmp_path / "probe"
    subprocess.run([COMPILER, "-I", HEADER.parent, source, "-o", program], check=True)
    output = subprocess.run([program], check=True, capture_output=True, text=True).stdout
    found = {line.split(" ", 1)[1]: int(line.split(" ", 1)[0]) for line in output.splitlines()}
    assert found == expected


@pytest.mark.parametrize(
    "structure, parts",
    [
        (
            _structs.ForwardParams,
            [_structs.PROBLEM, _structs.FEATURES, _structs.PAGES, _structs.BATCH, _structs.BLOCK_MASK, _structs.KEY_STARTS, _structs.EIGHT_BITS],
        ),
        (_structs.KvAppendParams, [_structs.KV_APPEND, _structs.KV_SLOTS, _structs.KV_ROTARY, _structs.KV_EIGHT]),
        (
            _structs.BackwardParams,
            [_structs.PROBLEM + _structs.GRADIENTS, _structs.FEATURES, _structs.FEATURE_GRADIENTS, _structs.BLOCK_MASK],
        ),
    ],
)
def test_packed_parts_are_the_struct(structure, parts):
    def count(fields):
        return sum(count(kind._fields_) if issubclass(kind, ctypes.Structure) else 1 for _, kind in fields)

    counter = iter(range(1, 1000))
    values = [[next(counter) for _ in range(count(fields))] for fields in parts]
    packed = b"".join(_structs.packer(fields).pack(*numbers) for fields, numbers in zip(parts, values))
    read = []

    def collect(instance):
        for field, _ in instance._fields_:
            value = getattr(instance, field)
            if isinstance(value, ctypes.Structure):
                collect(value)
            else:
                read.append(value)

    assert len(packed) == ctypes.sizeof(structure)
    collect(structure.from_buffer_copy(packed))
    assert read == sum(values, [])
