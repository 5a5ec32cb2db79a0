#!/usr/bin/env python3
"""Tests scripts/dependencies.py on small crates that break one rule of the policy each."""

import shutil
import subprocess
import tempfile
import unittest
from pathlib import Path

import dependencies

MANIFEST = '[package]\nname = "user"\nversion = "1.0.0"\nedition = "2024"\nlicense = "MIT"\n'
# RUSTSEC-2021-0003: smallvec before 0.6.14 writes behind its buffer.
VULNERABLE = """version = 4

[[package]]
name = "smallvec"
version = "0.6.13"
source = "registry+https://github.com/rust-lang/crates.io-index"
"""


class Folder(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        shutil.copy(dependencies.ROOT / "deny.toml", self.folder)

    def write(self, name, text):
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def run_in_folder(self, command):
        return subprocess.run(command, cwd=self.folder, capture_output=True, text=True)


class Copy(Folder):
    def test_a_new_crate_wants_a_new_copy(self):
        self.write("Cargo.lock", VULNERABLE.replace("smallvec", "smallvec-two"))
        (said,) = [line for line in dependencies.problems(self.folder) if "deny.toml" not in line]
        self.assertIn("smallvec-two is new in Cargo.lock", said)

    def test_an_accepted_advisory_must_be_one_of_ours(self):
        self.write("Cargo.lock", "package = []\n")
        policy = (self.folder / "deny.toml").read_text()
        self.write("deny.toml", policy.replace("RUSTSEC-2024-0436", "RUSTSEC-1999-0001"))
        (said,) = dependencies.problems(self.folder)
        self.assertIn("deny.toml accepts RUSTSEC-1999-0001", said)

    def test_the_copy_is_whole(self):
        self.assertGreater(len(dependencies.found(dependencies.COPY)), 20)
        self.assertEqual(list(dependencies.problems()), [])


@unittest.skipIf(dependencies.missing(), "cargo-deny and cargo-audit are not installed")
class Programs(Folder):
    def test_a_vulnerable_version_fails(self):
        self.write("Cargo.lock", VULNERABLE)
        done = self.run_in_folder(dependencies.commands(self.folder)[1])
        self.assertNotEqual(done.returncode, 0)
        self.assertIn("RUSTSEC-2021-0003", done.stdout)
        self.write("Cargo.lock", VULNERABLE.replace("0.6.13", "1.15.2"))
        self.assertEqual(self.run_in_folder(dependencies.commands(self.folder)[1]).returncode, 0)

    def test_a_licence_that_is_not_listed_fails(self):
        self.write("Cargo.toml", MANIFEST + '[dependencies]\nother = { path = "other", version = "1" }\n')
        self.write("src/lib.rs", "")
        self.write("other/src/lib.rs", "")
        for licence, is_right in (("MIT", True), ("GPL-3.0-only", False)):
            self.write("other/Cargo.toml", MANIFEST.replace("user", "other").replace("MIT", licence))
            done = self.run_in_folder(dependencies.commands(self.folder)[0])
            self.assertEqual(done.returncode == 0, is_right, done.stdout + done.stderr)
            self.assertEqual("licenses FAILED" in done.stdout + done.stderr, not is_right)


if __name__ == "__main__":
    unittest.main()
