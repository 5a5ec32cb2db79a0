#!/usr/bin/env python3
"""Checks the crates of Cargo.lock: licences, sources and duplicates by cargo-deny, and known
advisories by cargo-audit. deny.toml is the policy of both.

Neither asks a network. The advisories are those of packaging/advisories, a copy of what the RustSec
database says of our crates. Its file COPY names the day, the database's commit and the crates that
were looked for: a crate that is not among them fails the check until the copy is made anew.

usage: dependencies.py [check]
       dependencies.py update DATABASE     makes the copy from a clone of rustsec/advisory-db
"""

import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COPY = ROOT / "packaging" / "advisories"
TOOLS = {"cargo-deny": "licences, sources and duplicates", "cargo-audit": "advisories"}


def locked(root=ROOT):
    """The names of the crates that Cargo.lock takes from a registry."""
    packages = tomllib.loads((root / "Cargo.lock").read_text())["package"]
    return {package["name"] for package in packages if "source" in package}


def looked_for(copy=COPY):
    lines = (copy / "COPY").read_text().splitlines()
    return {word for line in lines if line.startswith("crates: ") for word in line.split()[1:]}


def accepted(root=ROOT):
    """The advisories that deny.toml accepts, each with its reason."""
    policy = tomllib.loads((root / "deny.toml").read_text())
    return {entry["id"]: entry["reason"] for entry in policy["advisories"]["ignore"]}


def found(database):
    """The advisories of a folder of the database, by id."""
    return {path.stem: path for path in database.glob("crates/*/RUSTSEC-*.md")}


def problems(root=ROOT, copy=COPY):
    """The faults of the copy and of the policy, one sentence each."""
    for name in sorted(locked(root) - looked_for(copy)):
        yield f"{name} is new in Cargo.lock: packaging/advisories says nothing of it (dependencies.py update)"
    for advisory in sorted(set(accepted(root)) - set(found(copy))):
        yield f"deny.toml accepts {advisory}, which is no advisory on our crates"


def tool(name):
    """The program in .venv, else in PATH; None where neither has it."""
    own = ROOT / ".venv" / "bin" / name
    return str(own) if own.exists() else shutil.which(name)


def missing():
    return [name for name in TOOLS if tool(name) is None]


def commands(folder, copy=COPY):
    """The two commands, which read Cargo.lock and deny.toml in the current folder."""
    audit = [tool("cargo-audit"), "audit", "--no-fetch", "--stale", "--db", str(copy), "--deny", "warnings"]
    for advisory in accepted(folder):
        audit += ["--ignore", advisory]
    return [[tool("cargo-deny"), "--offline", "check", "bans", "licenses", "sources"], audit]


def check():
    """Runs both programs and returns the number of failures."""
    failures = list(problems())
    for line in failures:
        print(line)
    # cargo-deny reads the manifests of all targets' crates.
    subprocess.run(["cargo", "fetch", "--locked", "--quiet"], cwd=ROOT, check=True)
    ran = [subprocess.run(command, cwd=ROOT).returncode for command in commands(ROOT)]
    return len(failures) + sum(status != 0 for status in ran)


def update(database):
    """Copies what a clone of the database says of our crates."""
    if not (database / "crates").is_dir():
        sys.exit(f"dependencies.py: {database} has no folder crates, so it is no clone of the database with its files")
    git = ["git", "-C", str(database), "log", "-1", "--date=short", "--format=%cd %H"]
    day, commit = subprocess.run(git, check=True, capture_output=True, text=True).stdout.split()
    crates = sorted(locked())
    with tempfile.TemporaryDirectory(dir=COPY.parent) as fresh:
        fresh = Path(fresh)
        for name in crates:
            for advisory in sorted((database / "crates" / name).glob("RUSTSEC-*.md")):
                (fresh / "crates" / name).mkdir(parents=True, exist_ok=True)
                shutil.copyfile(advisory, fresh / "crates" / name / advisory.name)
        head = (COPY / "COPY").read_text() if (COPY / "COPY").exists() else ""
        head = re.split(r"^day: ", head, flags=re.MULTILINE)[0]
        (fresh / "COPY").write_text(f"{head}day: {day}\ncommit: {commit}\ncrates: {' '.join(crates)}\n")
        shutil.rmtree(COPY / "crates", ignore_errors=True)
        for part in fresh.iterdir():
            shutil.move(part, COPY / part.name)
    print(f"{len(found(COPY))} advisories on {len(crates)} crates, of {day}")


def main(arguments):
    if len(arguments) == 2 and arguments[0] == "update":
        return update(Path(arguments[1]))
    if arguments not in ([], ["check"]):
        sys.exit(__doc__)
    if missing():
        sys.exit(f"dependencies.py: {', '.join(missing())} is not installed; scripts/venv.sh installs it into .venv")
    sys.exit(1 if check() else 0)


if __name__ == "__main__":
    main(sys.argv[1:])
