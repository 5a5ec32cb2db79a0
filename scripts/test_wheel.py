#!/usr/bin/env python3
"""Checks build/dist, which `make wheel` makes: the wheel's tag, size and symbols, a fresh virtual
environment with nothing but the wheel and NumPy, and the source distribution.

The programs run outside the repository and without FLASHTUNE_LIBRARY.
"""

import json
import os
import platform
import re
import subprocess
import sys
import tarfile
import tempfile
import unittest
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DIST = ROOT / "build" / "dist"
TOOLS = ROOT / "build" / "wheel-tools" / "bin"
CLI = Path(os.environ.get("FLASHTUNE_CLI", ROOT / "target" / "debug" / "flashtune"))
MAX_WHEEL_BYTES = 9_000_000

# Attention over values of 1 gives 1, through the wheel's own library; and the reason for bad input.
PROGRAM = """
import flashtune, numpy, sys
from pathlib import Path
q = numpy.random.default_rng(1).standard_normal((1, 40, 2, 32), dtype="float32")
out = flashtune.attention(q, q, numpy.ones_like(q), causal=True)
assert abs(out - 1).max() < 1e-5, out
assert Path(flashtune.__file__).is_relative_to(sys.prefix), flashtune.__file__
assert "target" not in str(flashtune._library.library()._name)
try:
    flashtune.attention(q, q[:, :, :1, :16], q)
except (ValueError, flashtune.FlashtuneError) as error:
    print("refused:", error)
print("flashtune", flashtune.__version__)
"""


def run(*command, folder, **environment):
    kept = {name: value for name, value in os.environ.items() if name not in ("FLASHTUNE_LIBRARY", "PYTHONPATH")}
    done = subprocess.run(
        [str(part) for part in command], cwd=folder, env={**kept, **environment}, capture_output=True, text=True
    )
    if done.returncode:
        raise AssertionError(f"{command}: exit status {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def only(pattern):
    found = list(DIST.glob(pattern))
    if len(found) != 1:
        raise AssertionError(f"{DIST} has {len(found)} files {pattern}; run 'make wheel'")
    return found[0]


class Wheel(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)

    def test_wheel_is_small_and_serves_every_python_on_glibc_2_28(self):
        wheel = only(f"*_{platform.machine()}.whl")
        self.assertRegex(wheel.name, r"^flashtune-[\d.]+-py3-none-manylinux_2_28_(x86_64|aarch64)\.whl$")
        self.assertLess(wheel.stat().st_size, MAX_WHEEL_BYTES)
        shown = run(TOOLS / "auditwheel", "show", wheel, folder=self.folder)
        older = re.findall(r'platform tag:\s+"manylinux_2_(\d+)_', shown)
        self.assertTrue(older and int(older[0]) <= 28, shown)
        names = zipfile.ZipFile(wheel).namelist()
        self.assertIn("flashtune/libflashtune.so", names)
        (bill,) = [name for name in names if re.fullmatch(r"flashtune-[^/]*\.dist-info/sboms/flashtune\.cdx\.json", name)]
        linked = {entry["name"] for entry in json.loads(zipfile.ZipFile(wheel).read(bill))["components"]}
        self.assertLessEqual({"sled", "tera", "rayon"}, linked)
        self.assertFalse([name for name in names if "test" in name.lower() or name.endswith(".pyc")])

    def test_wheel_has_a_pack_that_its_library_uses(self):
        with zipfile.ZipFile(only(f"*_{platform.machine()}.whl")) as wheel:
            pack = wheel.extract("flashtune/libflashtune.pack", self.folder)
        listed = run(CLI, "pack", "--list", pack, folder=self.folder)
        self.assertIn("this library uses it", listed)
        self.assertRegex(listed, r"configs are for NVIDIA H200 \(132 SMs\), NVIDIA H100 80GB HBM3 \(132 SMs\)")
        for passed in ("forward", "backward"):
            self.assertRegex(listed, rf"v1 {passed} bf16 d128 dv128 causal nodropout vec8 gqa4 ")

    def test_wheel_works_in_an_empty_environment(self):
        environment = self.folder / "venv"
        venv.create(environment, with_pip=True)
        python = environment / "bin" / "python"
        run(python, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", only(f"*_{platform.machine()}.whl"), folder=self.folder)
        # The package itself needs nothing; the program hands in NumPy's arrays.
        bare = run(python, "-c", "import flashtune; print(flashtune.__version__)", folder=self.folder)
        run(python, "-m", "pip", "install", "--quiet", "numpy", folder=self.folder)
        printed = run(python, "-c", PROGRAM, folder=self.folder, HOME=str(self.folder))
        self.assertIn(f"flashtune {bare.strip()}", printed)
        self.assertIn("refused: ", printed)

    def test_source_distribution_has_all_that_cargo_needs(self):
        with tarfile.open(only("*.tar.gz")) as archive:
            archive.extractall(self.folder, filter="data")
        (source,) = self.folder.iterdir()
        self.assertFalse((source / "tests").exists())
        checked = run(
            "cargo", "check", "--locked", "--lib", "--no-default-features",
            folder=source, CARGO_TARGET_DIR=str(ROOT / "target"), CARGO_TERM_COLOR="never",
        )  # fmt: skip
        self.assertEqual(checked, "")
        for file in ("pyproject.toml", "setup.py", "bindings/python/flashtune/__init__.py", "LICENSE-MIT"):
            self.assertTrue((source / file).is_file(), file)


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0], "-v"])
