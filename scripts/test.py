#!/usr/bin/env python3
"""Runs every test that this machine can run and ends with one line, 'N passed, N failed'.

The Rust tests also compile and run the C programs; Python tests follow. --ci adds formatting,
lints, prose and the release library's size, each counted as a test. --prebuilt FOLDER runs the test
binaries that scripts/pack_for_gpu_host.sh left in FOLDER, so that no Rust is needed. A line with
SKIPPED names each test that cannot run.
"""

import argparse
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
LIBRARY = {"darwin": "libflashtune.dylib"}.get(sys.platform, "libflashtune.so")
MAX_LIBRARY_BYTES = 10_000_000
# Time limits of one Rust test, and of all Python tests together: beyond them they count as hanging.
TEST_SECONDS = 900
PYTEST_SECONDS = 1800
# Running commands that have a time limit. Each has its own session, so a signal that stops this
# program does not reach it.
RUNNING = set()


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
    """Runs a command in the repository root and returns (exit status, output).

    The output is shown as it comes, or at the end if not `is_shown`. After `seconds` the command is
    killed with all its children, any of which would keep its output open.
    """
    title = "==> " + " ".join(map(str, command))
    if is_shown:
        print(title, flush=True)
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
        RUNNING.add(process)
    lines = []
    try:
        for line in process.stdout:
            if is_shown:
                print(line, end="", flush=True)
            lines.append(line)
        status, output = process.wait(), "".join(lines)
        if not is_shown:
            print(f"{title}\n{output}", end="", flush=True)
        return status, output
    finally:
        if end:
            end.cancel()
            end_session(process)
            RUNNING.discard(process)


def end_session(process):
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)


def tests_environment():
    """The environment variables of the tests: VIRTUAL_ENV, by which the library finds the NVRTC
    in .venv."""
    return {"VIRTUAL_ENV": str(VENV)} if VENV.is_dir() and "FLASHTUNE_NVRTC" not in os.environ else {}


def build(tally):
    """Builds the library, the command line and the tests, and returns whether that worked.

    One command builds all of them: a separate build of the tests could enable more features of a
    dependency, and compile the library a second time.
    """
    status, _ = run(["cargo", "build", "--locked", "--lib", "--bins", "--tests"])
    if status:
        tally.check("cargo build", False)
    return status == 0


def cargo_tests(tally):
    environment = tests_environment()
    if shutil.which("cargo-nextest"):
        # nextest runs no examples in documentation.
        status, output = run(["cargo", "test", "--locked", "--doc", "attention"], **environment)
        tally.check("the examples in the crate's documentation", status == 0 and libtest_counts(output)[0] > 0)
        targets = ["--lib", "--bins", "--tests"]
        # Some tests only wait, for a lock or a disk. One more than the cores keeps these busy.
        threads = ["--test-threads", str((os.cpu_count() or 1) + 1)]
        command = ["cargo", "nextest", "run", "--locked", "--no-fail-fast", *threads, *targets]
        status, output = run(command, **environment)
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
    """Runs each test of each binary in its own process, as nextest does, so that tests cannot
    disturb each other."""
    manifest = json.loads((folder / "tests.json").read_text())
    environment = {
        **os.environ,
        "CARGO_MANIFEST_DIR": str(ROOT),
        "FLASHTUNE_LIBRARY": str(folder / "lib" / LIBRARY),
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
    """The Python of .venv, else the running one; None where neither has numpy and pytest."""
    for python in (VENV / "bin" / "python", Path(sys.executable)):
        needs = "import numpy, pytest"
        if python.exists() and subprocess.run([python, "-c", needs], capture_output=True).returncode == 0:
            return python
    say("SKIPPED: the Python tests: no python3 here has numpy and pytest, and pip could not install them")
    return None


def lints(tally):
    tally.check("cargo fmt", run(["cargo", "fmt", "--check"])[0] == 0)
    tally.check("cargo clippy", run(["cargo", "clippy", "--locked", "--all-targets", "--", "-D", "warnings"])[0] == 0)
    status, _ = run(["cargo", "doc", "--locked", "--no-deps", "--lib"], RUSTDOCFLAGS="-D warnings")
    tally.check("cargo doc", status == 0)


def dependencies(tally):
    """Checks licences, sources, duplicates and known advisories of the crates, and the check."""
    tested, output = run([sys.executable, ROOT / "scripts" / "test_dependencies.py"], is_shown=False)
    tally.check("the tests of scripts/dependencies.py", tested == 0)
    if "skipped" in output and "FLASHTUNE_REQUIRE_AUDIT" not in os.environ:
        return say("SKIPPED: the policy on dependencies: cargo-deny and cargo-audit are not installed")
    tally.check("the policy on dependencies", run([sys.executable, ROOT / "scripts" / "dependencies.py"])[0] == 0)


def bill_of_materials(tally):
    """Checks that the bill of materials names what the library links and leaves out what only
    builds or tests it."""
    status, _ = run(["make", "--no-print-directory", "sbom"])
    bill = {"components": []} if status else json.loads((ROOT / "build" / "flashtune.cdx.json").read_text())
    names = {entry["name"] for entry in bill["components"]}
    ok = {"sled", "tera", "rayon"} <= names and not names & {"clap", "cbindgen", "tempfile", "syn"}
    tally.check("the software bill of materials", ok, f"{len(names)} crates")


def shipped_records(tally):
    """Checks that the space accepts the config of every shipped record, and that records have
    the form of new ones."""
    binary = ROOT / "target" / "debug" / "flashtune"
    tally.check("shipped records", binary.is_file() and run([binary, "records", "verify"])[0] == 0)


def prose(tally, python, library):
    """Runs the checks of documents and comments, and the tests of these checks."""
    tests = run([python, ROOT / "scripts" / "test_check_prose.py"], is_shown=False)
    tally.check("the tests of scripts/check_prose.py", tests[0] == 0)
    status, _ = run([python, ROOT / "scripts" / "check_prose.py"], FLASHTUNE_LIBRARY=str(library))
    tally.check("documents and comments", status == 0)


def build_release_library():
    """Builds the release library for glibc 2.28, and returns the exit status. LTO mostly uses one
    core, so the build runs beside the other checks."""
    return run(["make", "--no-print-directory", "wheel", "STEP=library"], is_shown=False)[0]


def release_library(tally, status, cubins):
    """Checks what ships. The library has fat LTO without an rlib, is stripped and small, exports
    flashtune_* only, and is of use to programs once it is installed. The wheel has a pack, which
    the command line of the tests makes with the NVRTC of .venv, so that no other is built or
    installed. It shares the tests' folder of cubins, `cubins`. The pack is of one model, since the
    kernels of `common` compile for four minutes of a core."""
    cli = ROOT / "target" / "debug" / "flashtune"
    programs = {"FLASHTUNE_CLI": str(cli), "FLASHTUNE_CACHE_DIR": cubins, "PACK_PRESET": "llama-3-8b"}
    for folder in VENV.glob("lib/python3*/site-packages/nvidia/cu13/lib"):
        programs["FLASHTUNE_NVRTC"] = os.environ.get("FLASHTUNE_NVRTC", str(folder))
    if status or run(["make", "--no-print-directory", "wheel"], is_shown=False, **programs)[0]:
        return tally.check("make wheel", False)
    built = ROOT / "target" / "manylinux" / f"{platform.machine()}-unknown-linux-gnu" / "release"
    library = built / LIBRARY
    size = library.stat().st_size
    limit = f"{size / 1e6:.2f} MB, at most {MAX_LIBRARY_BYTES / 1e6:.0f} MB"
    tally.check("the release library is small", size < MAX_LIBRARY_BYTES, limit)
    listed = subprocess.run(["nm", "-D", "--defined-only", library], capture_output=True, text=True)
    names = [line.split()[-1] for line in listed.stdout.splitlines()]
    foreign = [name for name in names if not name.startswith("flashtune_")]
    ok = "flashtune_forward" in names and not foreign
    tally.check("the release library exports only flashtune_*", ok, ", ".join(foreign) or f"{len(names)} functions")
    status, _ = run([sys.executable, ROOT / "scripts" / "test_install.py"], FLASHTUNE_BUILT=str(built))
    tally.check("an installation serves C and C++ programs", status == 0)
    status, _ = run([sys.executable, ROOT / "scripts" / "test_wheel.py"])
    tally.check("the wheel and the source distribution", status == 0)


def tests(tally, arguments):
    if arguments.prebuilt:
        folder = arguments.prebuilt.resolve()
        library, python = folder / "lib" / LIBRARY, sys.executable
    else:
        library, python = ROOT / "target" / "debug" / LIBRARY, find_python()
    has_rust = arguments.only != "python"
    is_built = arguments.prebuilt or not has_rust or build(tally)
    # Both may use a GPU, so they run one after the other.
    if has_rust and arguments.prebuilt:
        prebuilt_tests(tally, folder, arguments.jobs)
    elif has_rust and is_built:
        cargo_tests(tally)
    if arguments.only != "rust" and python and is_built:
        python_tests(tally, python, library, arguments.pytest)


def continuous_integration(tally, pytest_arguments):
    """Runs three streams side by side, since few steps keep two cores busy alone: Rust's lints and
    tests; the release library and what is made of it; pytest and the documents. The last two show
    each step's output at the step's end."""
    pool, of_release, of_python = ThreadPoolExecutor(), Tally(), Tally()
    release, tools = pool.submit(build_release_library), pool.submit(install_tools)
    is_built = build(tally)
    tools.result()
    if not is_built:
        release.result()
        return
    library, python = ROOT / "target" / "debug" / LIBRARY, find_python()
    # Both this and the test of an installation write the bill of materials.
    bill_of_materials(tally)
    with tempfile.TemporaryDirectory(prefix="flashtune-cubins-") as cubins:
        os.environ["FLASHTUNE_TEST_CUBINS"] = cubins
        streams = [
            pool.submit(lambda: release_library(of_release, release.result(), cubins)),
            pool.submit(python_and_documents, of_python, python, library, pytest_arguments),
        ]
        lints(tally)
        dependencies(tally)
        cargo_tests(tally)
        for stream in streams:
            stream.result()
    for other in (of_release, of_python):
        tally.add(other.passed, other.failed)


def install_tools():
    """Downloads what tests need while cargo builds."""
    run(["sh", "scripts/venv.sh"], is_shown=False)
    if run(["sh", "scripts/chromium.sh"], is_shown=False)[0] == 0:
        os.environ["FLASHTUNE_REQUIRE_CHROMIUM"] = "1"


def python_and_documents(tally, python, library, arguments):
    if python:
        python_tests(tally, python, library, arguments, is_shown=False)
    else:
        tally.check("a python3 with numpy and pytest", False)
    prose(tally, python or sys.executable, library)
    shipped_records(tally)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ci", action="store_true", help="also check formatting, lints, prose and the release library")
    parser.add_argument("--prebuilt", type=Path, metavar="FOLDER", help="run the packed tests of FOLDER, without Rust")
    parser.add_argument("--jobs", type=int, default=4, help="number of prebuilt Rust tests to run at a time, default 4")
    parser.add_argument("--only", choices=["rust", "python"], help="run only the Rust or only the Python tests")
    parser.add_argument("pytest", nargs="*", help="arguments to pass to pytest, after --")
    arguments = parser.parse_args()

    tally = Tally()
    if arguments.ci:
        continuous_integration(tally, arguments.pytest)
    else:
        tests(tally, arguments)
    print(f"{tally.passed} passed, {tally.failed} failed")
    sys.exit(1 if tally.failed or not tally.passed else 0)


if __name__ == "__main__":
    try:
        main()
    finally:
        for process in list(RUNNING):
            end_session(process)
