#!/usr/bin/env python3
"""Runs every test that this machine can run and ends with one line, 'N passed, N failed'.

Rust tests (which compile and run the C programs too) and Python tests. With --ci also formatting, lints and the
release library's size, each counted as a test. With --prebuilt FOLDER the Rust tests are the binaries that
scripts/pack_for_gpu_host.sh put there, so that no Rust is needed. What cannot run is said in a line with SKIPPED.
"""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
LIBRARY = {"darwin": "libflashtune.dylib"}.get(sys.platform, "libflashtune.so")
MAX_LIBRARY_BYTES = 10_000_000
# A Rust test that takes longer than this hangs, and so do the Python tests together.
TEST_SECONDS = 900
PYTEST_SECONDS = 1800
# Of commands with such a limit, while they run: sessions of their own, which do not hear of it when this program is stopped.
STARTED = set()


class Tally:
    def __init__(self):
        self.passed, self.failed = 0, 0

    def add(self, passed, failed):
        self.passed += passed
        self.failed += failed

    def check(self, name, ok, detail=""):
        self.add(ok, not ok)
        say(f"{'ok' if ok else 'FAILED'}: {name}{': ' + detail if detail else ''}")


def say(line):
    print(f"==> {line}", flush=True)


def run(command, seconds=None, is_shown=True, **environment):
    """Runs a command in the repository, with its output shown as it comes or else at its end, and returns (exit status, output). After
    `seconds` it is ended with all that it started, any of which would hold its output open."""
    told = "==> " + " ".join(map(str, command))
    if is_shown:
        print(told, flush=True)
    process = subprocess.Popen(
        [str(part) for part in command],
        cwd=ROOT,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=bool(seconds),
    )
    end = threading.Timer(seconds, os.killpg, (process.pid, signal.SIGKILL)) if seconds else None
    if end:
        end.start()
        STARTED.add(process)
    lines = []
    try:
        for line in process.stdout:
            if is_shown:
                print(line, end="", flush=True)
            lines.append(line)
        status, output = process.wait(), "".join(lines)
        if not is_shown:
            print(f"{told}\n{output}", end="", flush=True)
        return status, output
    finally:
        if end:
            end.cancel()
            end_session(process)
            STARTED.discard(process)


def end_session(process):
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)


def tests_environment():
    """A virtual environment's NVRTC is found through VIRTUAL_ENV, as it would be by a user who activated it."""
    return {"VIRTUAL_ENV": str(VENV)} if VENV.is_dir() and "FLASHTUNE_NVRTC" not in os.environ else {}


def build(tally):
    """What the tests need. With the tests' own dependencies in the same command, since a feature that they switch on of another would
    have the library compiled twice."""
    status, _ = run(["cargo", "build", "--locked", "--lib", "--bins", "--tests"])
    if status:
        tally.check("cargo build", False)
    return status == 0


def cargo_tests(tally):
    environment = tests_environment()
    if shutil.which("cargo-nextest"):
        status, output = run(["cargo", "nextest", "run", "--locked", "--no-fail-fast"], **environment)
        summary = re.findall(r"^\s*Summary .*?(\d+) tests? run: (.*)$", strip_colour(output), re.MULTILINE)
        counts = [words for _, words in summary]
        passed = sum(int(n) for words in counts for n in re.findall(r"(\d+) passed", words))
        failed = sum(int(n) for words in counts for n in re.findall(r"(\d+) (?:failed|timed out|exec failed)", words))
    else:
        status, output = run(["cargo", "test", "--locked", "--no-fail-fast"], **environment)
        passed, failed = libtest_counts(output)
    tally.add(passed, failed)
    if not passed or (status and not failed):
        tally.check("cargo's tests ran to their end", False, f"exit status {status}")


def strip_colour(text):
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def libtest_counts(output):
    results = re.findall(r"^test result: .*? (\d+) passed; (\d+) failed", output, re.MULTILINE)
    return sum(int(passed) for passed, _ in results), sum(int(failed) for _, failed in results)


def prebuilt_tests(tally, folder, jobs):
    """Each test of each binary in a process of its own, as nextest does it: what one breaks no other sees."""
    manifest = json.loads((folder / "tests.json").read_text())
    environment = {
        **os.environ,
        "CARGO_MANIFEST_DIR": str(ROOT),
        "FLASHTUNE_LIBRARY": str(folder / "lib" / LIBRARY),
        "CARGO_BIN_EXE_flashtune": str(folder / "bin" / "flashtune"),
        "NEXTEST_BIN_EXE_flashtune": str(folder / "bin" / "flashtune"),
    }
    tests = []
    for name in manifest["binaries"]:
        binary = folder / "tests" / name
        listed = subprocess.run([binary, "--list", "--format", "terse"], env=environment, capture_output=True, text=True)
        if listed.returncode:
            tally.check(f"{name} lists its tests", False, listed.stderr)
        tests += [(binary, line.removesuffix(": test")) for line in listed.stdout.splitlines() if line.endswith(": test")]

    def one(test):
        binary, name = test
        command = [binary, "--exact", name, "--nocapture", "--test-threads", "1"]
        try:
            done = subprocess.run(
                command, cwd=ROOT, env=environment, timeout=TEST_SECONDS, text=True, errors="replace",
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            )  # fmt: skip
            return done.returncode == 0, "1 ignored" in done.stdout, done.stdout
        except subprocess.TimeoutExpired as expired:
            return False, False, f"still running after {TEST_SECONDS} s\n{expired.stdout or ''}"

    say(f"{len(tests)} Rust tests in {len(manifest['binaries'])} binaries, {jobs} at a time")
    with ThreadPoolExecutor(jobs) as pool:
        for (binary, name), (ok, ignored, output) in zip(tests, pool.map(one, tests)):
            if ignored:
                continue
            tally.add(ok, not ok)
            skipped = [line for line in output.splitlines() if "SKIPPED" in line]
            print(f"{'ok    ' if ok else 'FAILED'} {binary.name} {name} {' '.join(skipped)}", flush=True)
            if not ok:
                print("\n".join(output.splitlines()[-60:]), flush=True)


def python_tests(tally, python, library, arguments, is_shown=True):
    environment = {"FLASHTUNE_LIBRARY": str(library), **tests_environment()}
    command = [python, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", "bindings/python", *arguments]
    status, output = run(command, PYTEST_SECONDS, is_shown, **environment)
    last = [line for line in strip_colour(output).splitlines() if re.search(r"\d+ (passed|failed|error)", line)]
    counts = dict.fromkeys(("passed", "failed", "error"), 0)
    for number, word in re.findall(r"(\d+) (passed|failed|error)", last[-1] if last else ""):
        counts[word] = int(number)
    tally.add(counts["passed"], counts["failed"] + counts["error"])
    if not counts["passed"] or (status and not counts["failed"] + counts["error"]):
        tally.check("pytest ran to its end", False, f"exit status {status}")


def find_python():
    """The environment that scripts/venv.sh filled, else any python3 that has what the tests need."""
    for python in (VENV / "bin" / "python", Path(sys.executable)):
        needs = "import numpy, pytest"
        if python.exists() and subprocess.run([python, "-c", needs], capture_output=True).returncode == 0:
            return python
    say("SKIPPED: the Python tests: no python3 here has numpy and pytest, and they could not be installed")
    return None


def lints(tally):
    tally.check("cargo fmt", run(["cargo", "fmt", "--check"])[0] == 0)
    tally.check("cargo clippy", run(["cargo", "clippy", "--locked", "--all-targets", "--", "-D", "warnings"])[0] == 0)


def shipped_records(tally):
    """Every shipped record still names a config that the space accepts, in the form in which records are written."""
    binary = ROOT / "target" / "debug" / "flashtune"
    tally.check("shipped records", binary.is_file() and run([binary, "records", "verify"])[0] == 0)


def build_release_library():
    """Its exit status. Most of its time is one core's, so it is built beside all else."""
    return run(["make", "--no-print-directory", "lib"], is_shown=False)[0]


def release_library(tally, status):
    """The library as it ships: built alone with fat LTO, stripped, small, and showing flashtune_* alone."""
    if status:
        return tally.check("make lib", False)
    library = ROOT / "target" / "release" / LIBRARY
    size = library.stat().st_size
    limit = f"{size / 1e6:.2f} MB, at most {MAX_LIBRARY_BYTES / 1e6:.0f} MB"
    tally.check("the release library is small", size < MAX_LIBRARY_BYTES, limit)
    listed = subprocess.run(["nm", "-D", "--defined-only", library], capture_output=True, text=True)
    names = [line.split()[-1] for line in listed.stdout.splitlines()]
    foreign = [name for name in names if not name.startswith("flashtune_")]
    ok = "flashtune_forward" in names and not foreign
    tally.check("the release library exports flashtune_* alone", ok, ", ".join(foreign) or f"{len(names)} functions")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ci", action="store_true", help="formatting, lints and the release library too")
    parser.add_argument("--prebuilt", type=Path, metavar="FOLDER", help="run what was packed there, without Rust")
    parser.add_argument("--jobs", type=int, default=4, help="prebuilt Rust tests at a time")
    parser.add_argument("--only", choices=["rust", "python"], help="one of the two kinds")
    parser.add_argument("pytest", nargs="*", help="arguments for pytest, after --")
    arguments = parser.parse_args()

    tally, pool = Tally(), ThreadPoolExecutor(2)
    if arguments.ci:
        release = pool.submit(build_release_library)
        lints(tally)
    if arguments.prebuilt:
        folder = arguments.prebuilt.resolve()
        library, python = folder / "lib" / LIBRARY, sys.executable
    else:
        library, python = ROOT / "target" / "debug" / LIBRARY, find_python()
    has_rust, has_python = arguments.only != "python", arguments.only != "rust" and python
    is_built = arguments.prebuilt or not has_rust or build(tally)
    has_rust, has_python = has_rust and is_built, has_python and is_built
    # Neither fills two cores all the time. CI has no GPU; elsewhere the two would share one.
    beside, pytest = Tally(), None
    if arguments.ci and has_python:
        pytest = pool.submit(python_tests, beside, python, library, arguments.pytest, is_shown=False)
    if has_rust and arguments.prebuilt:
        prebuilt_tests(tally, folder, arguments.jobs)
    elif has_rust:
        cargo_tests(tally)
    if pytest:
        pytest.result()
        tally.add(beside.passed, beside.failed)
    elif has_python:
        python_tests(tally, python, library, arguments.pytest)
    elif arguments.ci and not python:
        tally.check("a python3 with numpy and pytest", False)
    if arguments.ci:
        shipped_records(tally)
        release_library(tally, release.result())
    print(f"{tally.passed} passed, {tally.failed} failed")
    sys.exit(1 if tally.failed or not tally.passed else 0)


if __name__ == "__main__":
    try:
        main()
    finally:
        for process in list(STARTED):
            end_session(process)
