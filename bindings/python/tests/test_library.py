"""Finding and loading libflashtune, each case in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import flashtune
import pytest
from flashtune import _library

PACKAGE = Path(flashtune.__file__).resolve().parent

ATTEND = """
import numpy, flashtune
ones = numpy.ones((1, 4, 2, 8), numpy.float32)
try:
    print(flashtune.attention(ones, ones, ones).sum())
except flashtune.FlashtuneError as error:
    print("FlashtuneError:", error)
"""


def run(code, cwd=None, **environment):
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE.parent), **environment}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=environment, cwd=cwd, capture_output=True, text=True, check=True).stdout


def test_importing_loads_neither_the_library_nor_any_array_package():
    code = "import sys, flashtune; print(flashtune._library._library, 'numpy' in sys.modules, 'torch' in sys.modules)"
    assert run(code) == "None False False\n"


def test_numpy_arrays_do_not_import_torch():
    assert run(ATTEND + "import sys; print('torch' in sys.modules)") == "64.0\nFalse\n"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_a_child_that_was_forked_while_a_thread_loaded_the_library_loads_it_too():
    fork = """
import os, signal
from flashtune import _library
_library._lock.acquire()  # as a thread does that the child lacks
child = os.fork()
if child == 0:
    signal.alarm(60)
    import numpy, flashtune
    ones = numpy.ones((1, 4, 2, 8), numpy.float32)
    os._exit(int(flashtune.attention(ones, ones, ones).sum() != 64))
print(os.waitpid(child, 0)[1])
"""
    assert run(fork) == "0\n"


def test_a_missing_library_is_an_error_that_lists_the_places_tried(tmp_path):
    output = run(ATTEND, FLASHTUNE_LIBRARY=str(tmp_path / "nowhere.so"))
    assert output.startswith("FlashtuneError: libflashtune was not found; tried ") and "nowhere.so" in output


def test_a_name_without_a_folder_is_a_file_of_the_working_directory(tmp_path):
    (tmp_path / "any.so").symlink_to(next(path for path in _library.candidates() if path.is_file()).absolute())
    assert run(ATTEND, cwd=tmp_path, FLASHTUNE_LIBRARY="any.so") == "64.0\n"


def test_a_file_other_than_a_library_is_an_error(tmp_path):
    (tmp_path / "text.so").write_text("no ELF file")
    assert "could not be loaded" in run(ATTEND, FLASHTUNE_LIBRARY=str(tmp_path / "text.so"))


def test_a_library_of_another_version_is_refused():
    code = "from flashtune import _library; _library.__version__ = '7.3.0'\n" + ATTEND
    assert "this package needs 7.3.0" in run(code)


def test_the_places_are_the_variable_then_the_package_then_the_build_folders(monkeypatch):
    monkeypatch.delenv("FLASHTUNE_LIBRARY", raising=False)
    monkeypatch.delenv("CARGO_TARGET_DIR", raising=False)
    folders = [path.parent for path in _library.candidates()]
    root = PACKAGE.parents[2]
    assert folders == [PACKAGE, root / "target" / "release", root / "target" / "debug"]
    monkeypatch.setenv("CARGO_TARGET_DIR", "/cargo")
    with_cargo = [path.parent for path in _library.candidates()]
    assert with_cargo == [*folders, Path("/cargo/release"), Path("/cargo/debug")], "make lib writes target/"
    monkeypatch.setenv("FLASHTUNE_LIBRARY", "/elsewhere/lib.so")
    assert _library.candidates() == [Path("/elsewhere/lib.so")]


def test_package_and_crate_have_the_same_version():
    manifest = (PACKAGE.parents[2] / "Cargo.toml").read_text()
    # pyproject.toml reads the package's version, so Cargo.toml alone has it a second time.
    assert f'\nversion = "{flashtune.__version__}"\n' in manifest
