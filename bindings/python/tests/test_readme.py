"""The README's examples are programs that run."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import flashtune
import pytest
from flashtune._library import candidates

ROOT = Path(__file__).resolve().parents[3]
COMPILER = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")


def example(language):
    pattern = rf"<!-- example: {language} -->\n```{language}\n(.*?)```"
    (text,) = re.findall(pattern, (ROOT / "README.md").read_text(), re.DOTALL)
    return text


@pytest.mark.skipif(COMPILER is None, reason="no C compiler")
def test_the_c_example_compiles_without_a_warning_and_runs(tmp_path):
    (tmp_path / "example.c").write_text(example("c"))
    library = next(path for path in candidates() if path.is_file()).resolve()
    flags = ["-std=c99", "-Wall", "-Wextra", "-Werror", "-I", ROOT / "include"]
    subprocess.run([COMPILER, *flags, tmp_path / "example.c", library, "-o", tmp_path / "example"], check=True)
    environment = {**os.environ, "LD_LIBRARY_PATH": str(library.parent)}
    done = subprocess.run([tmp_path / "example"], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_the_python_example_runs():
    package = Path(flashtune.__file__).resolve().parent
    environment = {**os.environ, "PYTHONPATH": str(package.parent)}
    subprocess.run([sys.executable, "-c", example("python")], env=environment, check=True)
