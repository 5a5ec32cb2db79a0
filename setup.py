"""Puts libflashtune into the wheel: the library that FLASHTUNE_PREBUILT names, else one that cargo
builds here. A pack that FLASHTUNE_PREBUILT_PACK names goes beside it. pyproject.toml has everything
else.

The package loads the library through ctypes, so one wheel of a platform serves every Python.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
NAMES = {"linux": "libflashtune.so", "darwin": "libflashtune.dylib"}


def built_library():
    name = NAMES.get(sys.platform)
    if name is None or sys.maxsize < 2**32:
        bits = sys.maxsize.bit_length() + 1
        sys.exit(f"flashtune has no library for {sys.platform}, {bits} bit: it needs 64-bit Linux or macOS")
    prebuilt = os.environ.get("FLASHTUNE_PREBUILT")
    if prebuilt:
        if not Path(prebuilt).is_file():
            sys.exit(f"FLASHTUNE_PREBUILT is {prebuilt}, which is no file")
        return Path(prebuilt), name
    if shutil.which("cargo") is None:
        sys.exit("flashtune is built from source here, which needs Rust 1.89 or later: cargo was not found")
    # Named, since the user's configuration of cargo may have another one.
    target = Path(os.environ.get("CARGO_TARGET_DIR") or ROOT / "target").absolute()
    build = ["cargo", "rustc", "--locked", "--release", "--target-dir", str(target)]
    build += ["--lib", "--no-default-features", "--crate-type", "cdylib", "--", "-C", "strip=symbols"]
    subprocess.run(build, cwd=ROOT, check=True)
    return target / "release" / name, name


class BuildWithLibrary(build_py):
    def run(self):
        super().run()
        # An editable installation finds the library in target/.
        if not self.editable_mode:
            library, name = built_library()
            shutil.copy(library, Path(self.build_lib) / "flashtune" / name)
            pack = os.environ.get("FLASHTUNE_PREBUILT_PACK")
            if pack:
                shutil.copyfile(pack, Path(self.build_lib) / "flashtune" / "libflashtune.pack")


class PlatformWheel(bdist_wheel):
    """A wheel for one platform and any Python 3."""

    def get_tag(self):
        return "py3", "none", super().get_tag()[2]

    def egg2dist(self, egginfo_path, distinfo_path):
        """Adds the library's bill of materials, which FLASHTUNE_SBOM names, as PEP 770 says."""
        super().egg2dist(egginfo_path, distinfo_path)
        bill = os.environ.get("FLASHTUNE_SBOM")
        if bill:
            folder = Path(distinfo_path) / "sboms"
            folder.mkdir()
            shutil.copyfile(bill, folder / "flashtune.cdx.json")


class WithLibrary(Distribution):
    """Installed where platforms keep their own files, as a package with an extension module is."""

    def has_ext_modules(self):
        return True


setup(cmdclass={"build_py": BuildWithLibrary, "bdist_wheel": PlatformWheel}, distclass=WithLibrary)
