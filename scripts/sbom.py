#!/usr/bin/env python3
"""Writes the software bill of materials of the C library, as CycloneDX 1.5, on standard output.

usage: sbom.py [TARGET]     TARGET names another machine's, such as aarch64-unknown-linux-gnu

It lists the crates that are linked into libflashtune, with version, licence and the checksum of
Cargo.lock. Crates of the build, of the tests and of the command line are not in the library and
not in the list. The same Cargo.lock gives the same bytes.
"""

import json
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def cargo(*arguments):
    return subprocess.run(["cargo", *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout


def linked(metadata):
    """The ids of the packages that the library links: by normal dependencies alone, and without
    macros, which run in the build."""
    macros = {
        package["id"]
        for package in metadata["packages"]
        if any("proc-macro" in target["kind"] for target in package["targets"])
    }
    nodes = {node["id"]: node for node in metadata["resolve"]["nodes"]}
    found, waiting = set(), [metadata["resolve"]["root"]]
    while waiting:
        package = waiting.pop()
        if package in found or package in macros:
            continue
        found.add(package)
        for dependency in nodes[package]["deps"]:
            if any(kind["kind"] is None for kind in dependency["dep_kinds"]):
                waiting.append(dependency["pkg"])
    return found


def purl(package):
    return f"pkg:cargo/{package['name']}@{package['version']}"


def component(package, checksums, kind="library"):
    checksum = checksums.get((package["name"], package["version"]))
    return {
        "type": kind,
        "bom-ref": purl(package),
        "name": package["name"],
        "version": package["version"],
        "purl": purl(package),
        "licenses": [{"expression": package["license"].replace("/", " OR ")}],
        **({"hashes": [{"alg": "SHA-256", "content": checksum}]} if checksum else {}),
    }


def bill(target=None):
    host = target or next(line.split()[1] for line in cargo("-vV").splitlines() if line.startswith("host:"))
    metadata = json.loads(
        cargo("metadata", "--format-version=1", "--locked", "--no-default-features", f"--filter-platform={host}")
    )
    lock = tomllib.loads((ROOT / "Cargo.lock").read_text())
    checksums = {(entry["name"], entry["version"]): entry.get("checksum") for entry in lock["package"]}
    of_library = linked(metadata)
    packages = sorted(
        (package for package in metadata["packages"] if package["id"] in of_library),
        key=lambda package: (package["name"], package["version"]),
    )
    own = next(package for package in packages if package["id"] == metadata["resolve"]["root"])
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {"component": component(own, checksums)},
        "components": [component(package, checksums) for package in packages if package is not own],
    }


if __name__ == "__main__":
    json.dump(bill(*sys.argv[1:]), sys.stdout, indent=1)
    sys.stdout.write("\n")
