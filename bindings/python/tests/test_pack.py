"""The pack option, each case in a process of its own whose CUDA driver is a stand-in."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import flashtune
from flashtune import _library

PACKAGE = Path(flashtune.__file__).resolve().parent
STAND_IN = PACKAGE.parents[2] / "tests" / "driver" / "fake_driver" / "libcuda.c"
# The stand-in copies so many bytes of a launch's params. Nothing is launched here.
PARAMS_BYTES = 64


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    """A folder with the stand-in as libcuda.so.1."""
    compiler = os.environ.get("CC", "cc")
    if not STAND_IN.is_file() or not shutil.which(compiler):
        pytest.skip("no stand-in driver or no C compiler here")
    folder = tmp_path_factory.mktemp("driver")
    command = [compiler, "-std=gnu11", "-shared", "-fPIC", f"-DPARAMS_BYTES={PARAMS_BYTES}"]
    subprocess.run([*command, "-o", folder / "libcuda.so.1", STAND_IN], check=True)
    return folder


def run(code, driver, **environment):
    environment = {
        **os.environ,
        "PYTHONPATH": str(PACKAGE.parent),
        "FLASHTUNE_LIBRARY": str(_loaded()),
        "LD_LIBRARY_PATH": str(driver),
        "FLASHTUNE_NVRTC": "/nowhere",
        **environment,
    }
    command = [sys.executable, "-c", "import flashtune\n" + code]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout


def _loaded():
    return next(path for path in _library.candidates() if path.is_file())


SHOW = "info = flashtune.pack_info(0); print(info['state'], info['path'], info['reason'])\n"


def test_use_pack_names_the_pack_of_a_gpu_context(driver, tmp_path):
    pack = tmp_path / "a.pack"
    pack.write_bytes(b"this is no pack, and longer than a header")
    pack.chmod(0o644)
    shown = run(f"flashtune.use_pack({str(pack)!r})\n" + SHOW, driver)
    assert shown == f"refused {pack} it does not begin as a pack does\n"


def test_without_a_pack_the_state_is_none(driver, tmp_path):
    assert run(SHOW, driver) == "none  \n"
    assert run("flashtune.use_pack('')\n" + SHOW, driver, FLASHTUNE_PACK="/nowhere") == "none  \n"
    shown = run("flashtune.use_pack('/elsewhere')\n" + SHOW, driver, FLASHTUNE_PACK="/nowhere/a.pack")
    assert shown.startswith("refused /nowhere/a.pack No such file")
    cpu = "info = flashtune.pack_info(); print(info)"
    expected = dict(state="none", num_kernels=0, num_plans=0, num_records=0, path="", reason="")
    assert run(cpu, driver, FLASHTUNE_PACK="/nowhere") == f"{expected}\n"


def test_use_pack_after_the_first_gpu_context_is_an_error(driver):
    code = SHOW + "try: flashtune.use_pack('a.pack')\nexcept flashtune.InvalidArgumentError as error: print(error)\n"
    assert run(code, driver).splitlines()[1].startswith("use_pack comes too late")
