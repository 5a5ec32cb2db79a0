#!/usr/bin/env python3
"""Installs into an empty folder, moves it, and builds a user's programs against it.

It needs what `make lib` built, or the libraries in the folder FLASHTUNE_BUILT, and a command line,
target/debug/flashtune unless FLASHTUNE_CLI names one. The programs
are C by pkg-config, C with the static library, and C++ by CMake with both. None sees the source
tree, and each runs. CMake comes from .venv or the system.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CLI = Path(os.environ.get("FLASHTUNE_CLI", ROOT / "target" / "debug" / "flashtune"))
PACK = ROOT / "build" / "libflashtune.pack"
PROGRAM = ROOT / "tests" / "install" / "program.c"
# A stand-in for the command line. It writes down what it compiles for.
COMMAND_LINE = """#!/bin/sh
case $1 in
info) [ -z "$FAKE_NVRTC" ] || echo '{"version":"0","libnvrtc":{"found":"/lib/libnvrtc.so","version":['"$FAKE_NVRTC"'],"attempts":[]}}' ;;
pack) [ -z "${FAKE_FAILURE-}" ] || exit 1; echo "$3" >> "$FAKE_LOG"; echo "a pack of $5" > "$7" ;;
esac
"""
FLAGS = ["-std=c99", "-O2", "-Wall", "-Wextra", "-Werror"]


def run(*command, **environment):
    done = subprocess.run(
        [str(part) for part in command], env={**os.environ, **environment}, capture_output=True, text=True
    )
    if done.returncode:
        raise AssertionError(f"{command}: exit status {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def install(prefix, *, libdir="lib", destdir="", first=(), **environment):
    return run("sh", ROOT / "scripts" / "install.sh", *first, prefix, libdir, destdir, CLI, **environment)


def cmake():
    for place in (ROOT / ".venv" / "bin" / "cmake", shutil.which("cmake")):
        if place and Path(place).exists():
            return place
    raise AssertionError("CMake is missing: scripts/venv.sh installs it into .venv")


def setUpModule():
    run("make", "-C", ROOT, "sbom")


class Install(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)

    def moved(self, libdir="lib"):
        """An installation that was moved after it was made."""
        install(self.folder / "first", libdir=libdir)
        self.folder.joinpath("first").rename(self.folder / "moved")
        return self.folder / "moved"

    def pkg_config(self, lib, *arguments):
        return run("pkg-config", *arguments, "flashtune", PKG_CONFIG_PATH=lib / "pkgconfig").split()

    def test_c_program_builds_by_pkg_config_and_runs(self):
        lib = self.moved() / "lib"
        program = self.folder / "program"
        flags = self.pkg_config(lib, "--cflags", "--libs")
        run("cc", *FLAGS, PROGRAM, *flags, "-lm", "-o", program)
        self.assertIn("largest error", run(program, LD_LIBRARY_PATH=lib))
        needed = run("readelf", "-d", program)
        self.assertRegex(needed, r"\(NEEDED\).*\[libflashtune\.so\.\d+\.\d+\]", "the versioned name")

    def test_c_program_with_the_static_library_needs_no_file_at_run_time(self):
        lib = self.moved() / "lib"
        flags = self.pkg_config(lib, "--cflags")
        private = [flag for flag in self.pkg_config(lib, "--static", "--libs-only-l") if flag != "-lflashtune"]
        program = self.folder / "program"
        run("cc", *FLAGS, PROGRAM, *flags, lib / "libflashtune.a", *private, "-o", program)
        shutil.rmtree(lib)
        self.assertIn("largest error", run(program))

    def test_cpp_programs_build_by_cmake_and_run(self):
        prefix = self.moved()
        build = self.folder / "build"
        run(cmake(), "-S", ROOT / "tests" / "install" / "cmake", "-B", build, f"-DCMAKE_PREFIX_PATH={prefix}")
        run(cmake(), "--build", build)
        for program in ("shared", "static"):
            self.assertIn("largest error", run(build / program))
        refused = subprocess.run(
            [cmake(), "-S", ROOT / "tests" / "install" / "other_version", "-B", self.folder / "other",
             f"-DCMAKE_PREFIX_PATH={prefix}"], capture_output=True, text=True,
        )  # fmt: skip
        self.assertNotEqual(refused.returncode, 0, "a version that this one does not serve")
        self.assertIn("version: 0.1", refused.stderr)

    def test_the_bill_of_materials_names_what_the_library_links(self):
        bill = json.loads((self.moved() / "share/doc/flashtune/flashtune.cdx.json").read_text())
        self.assertEqual(bill["metadata"]["component"]["name"], "flashtune")
        self.assertIn("sled", {entry["name"] for entry in bill["components"]})

    def test_command_line_man_pages_and_completions_are_there(self):
        prefix = self.moved()
        self.assertRegex(run(prefix / "bin" / "flashtune", "--version"), r"^flashtune \d+\.\d+\.\d+$")
        self.assertIn("autotune", (prefix / "share/man/man1/flashtune.1").read_text())
        self.assertIn("candidate", (prefix / "share/man/man1/flashtune-autotune.1").read_text())
        script = prefix / "share/bash-completion/completions/flashtune"
        offered = f'. {script}; COMP_WORDS=(flashtune reco) COMP_CWORD=1; _flashtune flashtune reco; echo "${{COMPREPLY[@]}}"'
        self.assertEqual(run("bash", "-c", offered).split(), ["records"])

    def test_destdir_holds_the_prefix_and_uninstall_leaves_no_file(self):
        stage = self.folder / "stage"
        install("/opt/tools", libdir="lib/x86_64-linux-gnu", destdir=stage)
        lib = stage / "opt/tools/lib/x86_64-linux-gnu"
        self.assertTrue((lib / "libflashtune.so").resolve().is_file())
        include = self.pkg_config(lib, "--cflags")[0].removeprefix("-I")
        self.assertTrue((Path(include) / "flashtune.h").is_file())
        install("/opt/tools", libdir="lib/x86_64-linux-gnu", destdir=stage, first=["--uninstall"])
        self.assertEqual([path for path in stage.rglob("*") if not path.is_dir()], [])

    def test_uninstall_leaves_other_installations_where_the_folder_has_a_space(self):
        prefix = self.folder / "prefix"
        for libdir in ("lib", "my lib"):
            install(prefix, libdir=libdir)
        others = {path for path in (prefix / "lib").rglob("*") if not path.is_dir()}
        install(prefix, libdir="my lib", first=["--uninstall"])
        self.assertEqual({path for path in prefix.rglob("*") if not path.is_dir()}, others)

    def test_make_takes_folders_with_spaces_and_refuses_others_before_it_builds(self):
        # A cargo that builds nothing stands for the build.
        cargo = self.folder / "cargo"
        cargo.write_text('#!/bin/sh\necho built "$@"\nexit 1\n')
        cargo.chmod(0o755)

        def made(**variables):
            words = [f"{name}={value}" for name, value in variables.items()]
            path = f"{self.folder}:{os.environ['PATH']}"
            command = ["make", "-s", "-C", ROOT, "install", "PACK=no", *words]
            done = subprocess.run(command, env={**os.environ, "PATH": path}, capture_output=True, text=True)
            return done.stdout + done.stderr

        self.assertRegex(made(PREFIX=self.folder / "a folder"), "built rustc .*--target-dir target ")
        for variables, words in (
            ({"PREFIX": "relative"}, "PREFIX is relative; it must be an absolute path"),
            ({"PREFIX": "/opt/tools", "LIBDIR": "../lib"}, "LIBDIR is '../lib'; it must be a path below PREFIX"),
        ):
            said = made(**variables)
            self.assertIn(words, said)
            self.assertNotIn("built", said)
        self.assertIn("built", made(PREFIX="~/folder"))
        stage = self.folder / "a stage"
        install("/opt/my tools", destdir=stage)
        run("make", "-C", ROOT, "uninstall", "PREFIX=/opt/my tools", f"DESTDIR={stage}")
        self.assertEqual([path for path in stage.rglob("*") if not path.is_dir()], [])

    @unittest.skipUnless(PACK.is_file(), "there is no pack: make pack")
    def test_the_pack_lies_beside_the_library_unless_it_is_left_out(self):
        installed = self.folder / "prefix" / "lib" / "libflashtune.pack"
        install(self.folder / "prefix")
        self.assertEqual(installed.read_bytes(), PACK.read_bytes())
        install(self.folder / "prefix", PACK="no")
        self.assertFalse(installed.exists(), "that of the installation before")

    def test_a_machine_without_nvrtc_is_told_that_calls_will_compile(self):
        pack = self.folder / "libflashtune.pack"
        pack.write_text("of an older library")
        pack.with_name("libflashtune.pack.stamp").write_text("sm_90a 13.0\n")
        os.utime(pack, (0, 0))
        make = ("sh", ROOT / "scripts" / "make_pack.sh", "sm_90a", pack)
        nowhere = dict(FLASHTUNE_CLI=str(CLI), FLASHTUNE_NVRTC="/nowhere")
        said = run(*make, "--if-possible", **nowhere)
        self.assertRegex(said, r"^no pack: .* the first call of each problem will compile .*pip install nvidia-cuda-nvrtc.*\n$")
        self.assertFalse(pack.exists())
        with self.assertRaisesRegex(AssertionError, "libnvrtc"):
            run(*make, **nowhere)

    def test_a_pack_is_made_anew_only_where_what_it_is_made_from_changes(self):
        cli, pack = self.folder / "flashtune", self.folder / "build" / "libflashtune.pack"
        cli.write_text(COMMAND_LINE)
        cli.chmod(0o755)

        def make(archs="", *option, nvrtc="13,0", preset="", **environment):
            """What the script says, and the architectures that it compiled for."""
            log = self.folder / "compiled"
            log.write_text("")
            program = dict(FLASHTUNE_CLI=str(cli), FAKE_NVRTC=nvrtc, FAKE_LOG=str(log), PACK_PRESET=preset, **environment)
            said = run("sh", ROOT / "scripts" / "make_pack.sh", archs, pack, *option, **program)
            return said, log.read_text().split()

        self.assertEqual(make(), ("", ["sm_90a"]))
        self.assertEqual(make(), ("", []))
        self.assertEqual(make(nvrtc="12,8"), ("", ["sm_90a"]))
        self.assertEqual(make("sm_80,sm_90a", nvrtc="12,8"), ("", ["sm_80,sm_90a"]))
        self.assertEqual(make(nvrtc="12,8"), ("", []), "the architectures are those of the pack")
        self.assertEqual(make(preset="llama-3-8b", nvrtc="12,8"), ("", ["sm_80,sm_90a"]))
        self.assertEqual(pack.read_text(), "a pack of llama-3-8b\n")
        self.assertEqual(make(nvrtc="12,8"), ("", []), "the preset is that of the pack")
        self.assertEqual(make("", "--if-possible", nvrtc=""), ("", []))
        self.assertTrue(pack.exists(), "no NVRTC is needed for a pack that is there")
        said, _ = make("sm_80", "--if-possible", FAKE_FAILURE="1")
        self.assertRegex(said, "^no pack: making one for sm_80 failed")
        self.assertFalse(pack.exists())
        with self.assertRaisesRegex(AssertionError, "exit status 1"):
            make("sm_80", FAKE_FAILURE="1")
        # One that somebody else made.
        self.assertEqual(make(), ("", ["sm_90a"]))
        for prepare in (lambda: os.utime(pack, (2e9, 2e9)), lambda: pack.with_name(f"{pack.name}.stamp").unlink()):
            prepare()
            said, compiled = make("sm_80")
            self.assertRegex(said, "^.*libflashtune.pack stays: .*\n$")
            self.assertEqual((compiled, pack.read_text()), ([], "a pack of common\n"))

    def test_wrong_places_are_refused_before_anything_is_written(self):
        for prefix, libdir, says in (("relative", "lib", "PREFIX"), (self.folder / "p", "/lib", "LIBDIR"),
                                     (self.folder / "p", "../lib", "LIBDIR")):  # fmt: skip
            with self.assertRaisesRegex(AssertionError, says):
                install(prefix, libdir=libdir)
        self.assertEqual(list(self.folder.iterdir()), [])


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0], "-v"])
