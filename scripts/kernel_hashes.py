#!/usr/bin/env python3
"""Hashes the machine code of a wide matrix of kernels, and compares two commits by the hashes.

The script proves that a refactoring leaves the kernels alone. The command line of a commit renders
and compiles each problem of the matrix. Each kernel is disassembled, and one hash stands for its
instructions and resources. No GPU is needed. NVRTC and nvdisasm are found in .venv
(scripts/venv.sh), or FLASHTUNE_NVRTC and NVDISASM name them.

  kernel_hashes.py write FILE                  hashes of the working tree
  kernel_hashes.py write FILE --commit REV     hashes of a commit, built in build/kernel-hashes
  kernel_hashes.py write FILE --program PATH   hashes of a built command line, without Rust
  kernel_hashes.py compare A [B]               files or commits; B defaults to the working tree
  kernel_hashes.py diff A B --kernel NAME      the disassembly of one kernel in both
  kernel_hashes.py list                        the problems of the matrix

`compare` exits with 1 if a kernel changed, came or went. The script caches disassemblies by the
compiled text without its comments, so a second run compiles only what changed.
"""

import argparse
import ctypes
import difflib
import gzip
import hashlib
import json
import os
import random
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WORK = ROOT / "build" / "kernel-hashes"
ARCHS = ["sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120"]
PASSES = ["forward", "backward"]
SEED = 20_26

# Head dims of every class that kernels treat differently, and odd strides' widest access.
HEAD_DIMS = [
    ["--head-dim", "32"],
    ["--head-dim", "33"],
    ["--head-dim", "36"],
    ["--head-dim", "50"],
    ["--head-dim", "64"],
    ["--head-dim", "64", "--layout", "vec1"],
    ["--head-dim", "72"],
    ["--head-dim", "80"],
    ["--head-dim", "96"],
    ["--head-dim", "128"],
    ["--head-dim", "160"],
    ["--head-dim", "192"],
    ["--head-dim", "192", "--head-dim-v", "128"],
    ["--head-dim", "256"],
    ["--head-dim", "512"],
]

BOTH_PASSES = [
    ["--dropout"],
    ["--window-left", "100"],
    ["--window-left", "64", "--window-right", "32"],
    ["--softcap"],
    ["--alibi"],
    ["--bias"],
    ["--mask"],
    ["--mask-bits"],
    ["--sinks"],
    ["--varlen"],
    ["--block-mask", "128"],
]
BACKWARD_ONLY = [["--deterministic"], ["--bias", "--dbias"], ["--dlse"]]


def matrix():
    """The problems as arguments of `flashtune`, in a fixed order and without repetition."""
    problems = []

    def add(arch, pass_, *parts):
        words = [word for part in parts for word in part]
        problems.append(["render", "--arch", arch, "--pass", pass_, *words])

    heads = ["--num-heads-q", "8", "--num-heads-kv", "2", "--batch-size", "2"]
    for pass_ in PASSES:
        for head_dim in HEAD_DIMS:
            add("sm_90", pass_, head_dim, heads)
            add("sm_90", pass_, head_dim, heads, ["--causal"])
        for at, arch in enumerate(arch for arch in ARCHS if arch != "sm_90"):
            for head_dim in (["--head-dim", "64"], ["--head-dim", "128"], ["--head-dim", "256"]):
                add(arch, pass_, head_dim, heads, ["--causal"] if at % 2 else [])
        for head_dim in ("64", "128"):
            add("sm_90", pass_, ["--head-dim", head_dim, "--family", "sm80"], heads)
            add("sm_90", pass_, ["--head-dim", head_dim, "--dtype", "fp16", "--causal"], heads)
            add("sm_90", pass_, ["--head-dim", head_dim, "--seqlen-q", "200"], heads)
        for head_dim, arch in (("64", "sm_80"), ("96", "sm_90"), ("128", "sm_86"), ("256", "sm_80"), ("512", "sm_89")):
            add(arch, pass_, ["--head-dim", head_dim, "--dtype", "fp32", "--causal"], heads)
        add("sm_90", pass_, ["--head-dim", "64", "--dtype", "fp32", "--dropout", "--softcap", "--bias", "--varlen"], heads)
    for kv_dtype, head_dim, words in (
        ("e4m3", "64", ["--causal"]),
        ("e4m3", "128", ["--varlen", "--page-size", "16"]),
        ("e5m2", "256", ["--keys-per-scale", "128"]),
        ("int8", "128", ["--keys-per-scale", "1", "--dtype", "fp16"]),
        ("e4m3", "128", ["--keys-per-scale", "1", "--family", "sm80"]),
        ("e4m3", "128", ["--fp8-q", "--causal"]),
    ):
        add("sm_90", "forward", ["--head-dim", head_dim, "--kv-dtype", kv_dtype], heads, words)
    features = {"forward": BOTH_PASSES, "backward": BOTH_PASSES + BACKWARD_ONLY}
    targets = {
        "forward": [("sm_90", "128"), ("sm_90", "256"), ("sm_80", "64")],
        "backward": [("sm_90", "64"), ("sm_90", "160"), ("sm_90", "256"), ("sm_80", "64")],
    }
    for pass_ in PASSES:
        for arch, head_dim in targets[pass_]:
            for feature in features[pass_]:
                add(arch, pass_, ["--head-dim", head_dim], heads, feature)
    problems += decode_problems() + prompt_problems() + shipped_configs() + combinations(features)
    problems += [["render-merge", "--arch", arch, "--dtype", dtype, "--layout", layout, *more]
                 for arch in ("sm_80", "sm_90") for dtype in ("bf16", "fp16", "fp32")
                 for layout, more in (("vec4", ["--partials-are-fp32"]), ("vec1", []))]
    problems += [["render-kv-append", "--arch", arch, "--access-bytes", size]
                 for arch in ("sm_80", "sm_90") for size in ("16", "8", "4", "2")]
    unique = {label(problem): problem for problem in problems}
    return unique


def decode_problems():
    """Few queries over many keys, in every layout of keys that the decode family reads."""
    problems = []

    def add(arch, head_dim, *words, queries=1):
        shape = ["--seqlen-q", str(queries), "--seqlen-k", "8192", "--num-heads-q", "32", "--num-heads-kv", "8"]
        problems.append(["render", "--arch", arch, "--pass", "forward", "--head-dim", head_dim, *shape, *words])

    for arch in ARCHS:
        add(arch, "128")
        add(arch, "64", "--page-size", "16")
    for head_dim in ("64", "80", "256", "512"):
        add("sm_90", head_dim)
    for size in ("1", "16", "48", "64", "256"):
        add("sm_90", "128", "--page-size", size)
        add("sm_90", "128", "--page-size", size, "--varlen", queries=4)
    for feature in BOTH_PASSES:
        if feature != ["--dropout"]:
            add("sm_90", "128", *feature, queries=4)
    for queries in (2, 4, 16):
        add("sm_90", "128", "--causal", queries=queries)
    add("sm_90", "128", "--layout", "vec1")
    add("sm_90", "128", "--batch-invariant")
    add("sm_90", "128", "--batch-invariant", "--page-size", "64")
    add("sm_80", "128", "--page-size", "64", "--softcap", "--sinks", queries=4)
    for kv_dtype, keys_per_scale in (("e4m3", "0"), ("e5m2", "1"), ("int8", "128")):
        of_keys = ["--kv-dtype", kv_dtype, "--keys-per-scale", keys_per_scale]
        for head_dim in ("64", "128"):
            add("sm_90", head_dim, *of_keys)
            add("sm_80", head_dim, *of_keys, "--varlen", "--page-size", "16", queries=4)
    return problems


def prompt_problems():
    """Many queries in sm90's forward kernel: one order of sums, keys of 8 bits, pages, splits."""
    problems = []

    def add(head_dim, *words, heads="8", queries="2048", keys="2048"):
        shape = ["--num-heads-q", heads, "--num-heads-kv", "2", "--batch-size", "2", "--seqlen-q", queries, "--seqlen-k", keys]
        problems.append(["render", "--arch", "sm_90", "--pass", "forward", "--head-dim", head_dim, *shape, *words])

    for head_dim in ("64", "128", "256"):
        add(head_dim, "--batch-invariant", "--causal")
        add(head_dim, "--batch-invariant", "--varlen", "--page-size", "64")
        for size in ("1", "16", "48", "256"):
            add(head_dim, "--causal", "--varlen", "--page-size", size)
        for kv_dtype, keys_per_scale in (("e4m3", "0"), ("e5m2", "1"), ("int8", "128")):
            add(head_dim, "--kv-dtype", kv_dtype, "--keys-per-scale", keys_per_scale, "--causal")
        for group in ("32", "64"):
            add(head_dim, "--kv-int4", group, "--causal", "--varlen", "--page-size", "16", queries="1")
    for feature in (["--window-left", "100"], ["--block-mask", "128"], ["--sinks", "--softcap"]):
        add("128", "--batch-invariant", *feature)
    for feature in (["--softcap"], ["--alibi", "--bias"], ["--varlen"], ["--varlen", "--page-size", "16"]):
        for keys_per_scale in ("0", "1"):
            add("128", "--kv-dtype", "e4m3", "--keys-per-scale", keys_per_scale, *feature)
    add("256", "--fp8-q", "--kv-dtype", "e4m3", keys="16384", queries="16384")
    few = {"heads": "2", "queries": "256", "keys": "4096"}
    add("256", "--fp8-q", "--kv-dtype", "e4m3", "--config", "v_stages=0", "num_splits=2", **few)
    add("128", "--config", "num_splits=4", "tma_store=0", **few)
    return problems


def shipped_configs():
    """The tuner's configs of plain problems: combinations of knobs that no heuristic takes."""
    records = []
    for file in sorted((ROOT / "tuning-db").rglob("*.jsonl")):
        records += [(file.parent.name, json.loads(line)) for line in file.read_text().splitlines()]
    plain = re.compile(r"v1 (forward|backward) (\w+) d(\d+) dv(\d+) (full|causal) (nodropout|dropout) vec8 gqa")
    found = []
    for arch, record in records:
        match = plain.match(record["key"])
        if match:
            pass_, dtype, head_dim, head_dim_v, causal, dropout = match.groups()
            problem, knobs = record["problem"], dict(record["config"])
            words = ["--pass", pass_, "--dtype", dtype, "--head-dim", head_dim, "--head-dim-v", head_dim_v]
            for name in ("batch_size", "num_heads_q", "num_heads_kv", "seqlen_q", "seqlen_k"):
                words += ["--" + name.replace("_", "-"), str(problem[name])]
            words += ["--causal"] * (causal == "causal") + ["--dropout"] * (dropout == "dropout")
            words += ["--family", knobs.pop("family"), "--config", *(f"{name}={knobs[name]}" for name in sorted(knobs))]
            found.append(["render", "--arch", arch, *words])
    return random.Random(SEED).sample(found, min(50, len(found)))


def combinations(features):
    """Several features at once, seeded; a combination that is refused counts as refused."""
    draw = random.Random(SEED)
    problems = []
    for at in range(70):
        pass_ = PASSES[at % 2]
        arch = "sm_90" if at % 3 else draw.choice(ARCHS)
        words = list(draw.choice(HEAD_DIMS[:14])) + draw.choice([[], ["--causal"]])
        words += draw.choice([[], [], ["--dtype", "fp16"]])
        for feature in draw.sample(features[pass_], draw.choice([2, 3, 4])):
            words += [word for word in feature if word not in words or not word.startswith("--")]
        problems.append(["render", "--arch", arch, "--pass", pass_, *words])
    return problems


def label(problem):
    return " ".join(problem).replace("--", "")


# ---- one tree's kernels --------------------------------------------------------------------------


class Tree:
    """A built command line, and the tools that turn its kernels into hashes."""

    def __init__(self, program):
        self.program = program
        self.cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "flashtune-kernel-hashes"
        self.cache.mkdir(parents=True, exist_ok=True)
        self.nvdisasm = find_nvdisasm()
        self.environment = {name: value for name, value in os.environ.items() if name != "FLASHTUNE_TEMPLATES"}
        if (ROOT / ".venv").is_dir() and "FLASHTUNE_NVRTC" not in os.environ:
            self.environment.setdefault("VIRTUAL_ENV", str((ROOT / ".venv").resolve()))
        self.tools = self.versions()

    @cached_property
    def nvrtc(self):
        return Nvrtc(self.environment)

    def versions(self):
        """The versions that a disassembly depends on."""
        nvdisasm = subprocess.run([self.nvdisasm, "--version"], capture_output=True, text=True).stdout
        nvrtc = re.search(r"libnvrtc: .*\((CUDA [\d.]+)\)", self.run(["info"]).stdout)
        if not nvrtc:
            sys.exit("libnvrtc is not found: run scripts/venv.sh, or set FLASHTUNE_NVRTC")
        return f"NVRTC of {nvrtc[1]}, nvdisasm {re.search(r'V([0-9.]+)', nvdisasm)[1]}"

    def kernels(self, problem):
        """Disassembly and resources of a problem's kernels by name, or {"": "refused"}."""
        rendered = self.run(problem)
        if rendered.returncode:
            if "panicked" in rendered.stderr or rendered.returncode < 0:
                raise RuntimeError(f"{label(problem)}: {rendered.stderr}")
            return {"": "refused"}
        key = hashlib.sha256((stripped(rendered.stdout) + problem[problem.index("--arch") + 1]).encode()).hexdigest()
        tools = hashlib.sha256(self.tools.encode()).hexdigest()
        kept = self.cache / f"{key[:32]}-{tools[:8]}.json.gz"
        if kept.exists():
            return json.loads(gzip.decompress(kept.read_bytes()))
        with tempfile.TemporaryDirectory() as folder:
            found = self.compiled(problem, rendered.stdout, Path(folder))
        with tempfile.NamedTemporaryFile(dir=self.cache, delete=False) as file:
            file.write(gzip.compress(json.dumps(found).encode(), 1))
        os.replace(file.name, kept)
        return found

    def compiled(self, problem, text, folder):
        if problem[0] != "render":
            cubin = folder / "small.cubin"
            cubin.write_bytes(self.nvrtc.compile(text, problem[problem.index("--arch") + 1]))
            return {problem[0].removeprefix("render-"): self.disassembled(cubin)}
        output = self.run([*problem, "--cubin", str(folder / "main.cubin"), "--json"])
        if output.returncode:
            return {"": "does not compile: " + output.stderr.strip().splitlines()[-1]}
        found = {}
        for line in output.stdout.splitlines():
            used = json.loads(line)
            sizes = {name: used[name] for name in ("registers", "spill_bytes", "stack_bytes", "smem_bytes", "threads")}
            found[used["kernel"]] = f"{json.dumps(sizes)}\n{self.disassembled(Path(used['cubin']))}"
        return found

    def run(self, words):
        return subprocess.run([self.program, *words], capture_output=True, text=True, env=self.environment)

    def disassembled(self, cubin):
        """Instructions, branch targets and literals, without addresses, names and debug data."""
        output = subprocess.run([self.nvdisasm, cubin], capture_output=True, text=True, check=True).stdout
        lines, section = [], ""
        for line in output.splitlines():
            header = re.match(r"\s*\.section\s+([^,\s]+)", line)
            if header:
                section = header[1]
            elif section.startswith((".text.", ".nv.constant2", ".nv.constant3")):
                code = re.sub(r"^\s*/\*\w+\*/\s*", "", line).split("//")[0].strip()
                if re.match(r"\.(L_|byte|word|short|dword|zero)|[@A-Z]", code):
                    lines.append(code)
        if not any(code.startswith("EXIT") or " EXIT" in code for code in lines):
            raise RuntimeError(f"{cubin}: nvdisasm shows no code")
        return "\n".join(lines)


def stripped(text):
    """The text without comments, blank lines and indentation: what the compiler sees."""
    lines = (re.sub(r"//.*", "", line).strip() for line in text.splitlines())
    return "\n".join(line for line in lines if line)


class Nvrtc:
    """The part of NVRTC that compiles the small operations, which `render` does not compile."""

    def __init__(self, environment):
        folders = [environment.get("FLASHTUNE_NVRTC", ""), environment.get("VIRTUAL_ENV", "")]
        files = sorted(file for folder in folders if folder for file in Path(folder).rglob("libnvrtc.so.*"))
        if not files:
            sys.exit("libnvrtc is not found: run scripts/venv.sh, or set FLASHTUNE_NVRTC to its folder")
        for builtins in files[0].parent.glob("libnvrtc-builtins.so.*"):
            ctypes.CDLL(str(builtins))
        self.library = ctypes.CDLL(str(files[0]))

    def compile(self, text, arch):
        program, size = ctypes.c_void_p(), ctypes.c_size_t()
        options = [f"--gpu-architecture={arch}", "--std=c++17", "-default-device", "--diag-suppress=177"]
        words = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        self.check(self.library.nvrtcCreateProgram(ctypes.byref(program), text.encode(), b"small.cu", 0, None, None))
        self.check(self.library.nvrtcCompileProgram(program, len(options), words))
        self.check(self.library.nvrtcGetCUBINSize(program, ctypes.byref(size)))
        cubin = ctypes.create_string_buffer(size.value)
        self.check(self.library.nvrtcGetCUBIN(program, cubin))
        self.library.nvrtcDestroyProgram(ctypes.byref(program))
        return cubin.raw

    @staticmethod
    def check(status):
        if status:
            raise RuntimeError(f"NVRTC returned {status}")


def find_nvdisasm():
    beside = sorted((ROOT / ".venv").resolve().rglob("bin/nvdisasm")) if (ROOT / ".venv").is_dir() else []
    for program in [os.environ.get("NVDISASM"), *beside, "nvdisasm"]:
        try:
            if program and subprocess.run([program, "--version"], capture_output=True).returncode == 0:
                return str(program)
        except OSError:
            pass
    sys.exit("nvdisasm is not found: run scripts/venv.sh, or set NVDISASM")


# ---- commands ------------------------------------------------------------------------------------


def built(commit):
    """The command line of a commit, or of the working tree where that is None."""
    tree, target = ROOT, Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
    if commit:
        tree, target = WORK / "tree", WORK / "target"
        if not tree.exists():
            subprocess.run(["git", "worktree", "prune"], cwd=ROOT, check=True)
            subprocess.run(["git", "worktree", "add", "--quiet", "--detach", tree, commit], cwd=ROOT, check=True)
        subprocess.run(["git", "checkout", "--quiet", "--detach", commit], cwd=tree, check=True)
    command = ["cargo", "build", "--locked", "--quiet", "--bin", "flashtune", "--target-dir", target]
    subprocess.run(command, cwd=tree, check=True)
    return target / "debug" / "flashtune"


def kernels(commit, arguments):
    """The tools' versions, and the disassembly of each chosen kernel by name."""
    tree = Tree(getattr(arguments, "program", None) or built(commit))
    chosen = {name: problem for name, problem in matrix().items() if re.search(arguments.only, name)}
    if not chosen:
        sys.exit(f"--only {arguments.only!r}: no problem of the matrix matches")
    found = {}
    with ThreadPoolExecutor(arguments.jobs) as pool:
        for name, of_problem in zip(chosen, pool.map(tree.kernels, chosen.values())):
            found.update({f"{name}: {kernel}" if kernel else name: code for kernel, code in of_problem.items()})
            if sys.stderr.isatty():
                print(f"\r{len(found)} kernels", end=" ", file=sys.stderr, flush=True)
    return tree.tools, found


def hashes(which, arguments):
    """The tools' versions, and the hashes of a file, of a commit, or of the working tree."""
    if which and Path(which).is_file():
        of_file = json.loads(Path(which).read_text())
        found = {name: value for name, value in of_file["kernels"].items() if re.search(arguments.only, name)}
        return of_file["tools"], found
    tools, found = kernels(which, arguments)
    return tools, {name: hashlib.sha256(code.encode()).hexdigest()[:16] for name, code in found.items()}


def write(arguments):
    tools, found = hashes(arguments.commit, arguments)
    Path(arguments.file).write_text(json.dumps({"tools": tools, "kernels": found}, indent=0, sort_keys=True) + "\n")
    refused = sum(":" not in name for name in found)
    together = hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()[:16]
    print(f"{len(found) - refused} kernels, {refused} refused problems: {together} ({tools})")


def compare(arguments):
    (tools, before), (tools_after, after) = hashes(arguments.a, arguments), hashes(arguments.b, arguments)
    if tools != tools_after:
        sys.exit(f"{arguments.a} is of {tools}, the other of {tools_after}: only hashes of the same tools compare")
    changed = [name for name in before if name in after and before[name] != after[name]]
    differences = [("changed", changed), ("gone", before.keys() - after.keys()), ("new", after.keys() - before.keys())]
    for word, names in differences:
        for name in sorted(names):
            print(f"{word}: {name}")
    counts = ", ".join(f"{len(names)} {word}" for word, names in differences)
    print(f"{len(before.keys() & after.keys()) - len(changed)} kernels unchanged, {counts}")
    return any(names for _, names in differences)


def diff(arguments):
    arguments.only = re.escape(arguments.kernel.split(": ")[0]) + "$"
    before, after = (kernels(which, arguments)[1].get(arguments.kernel, "") for which in (arguments.a, arguments.b))
    sys.stdout.writelines(
        line + "\n" for line in difflib.unified_diff(before.splitlines(), after.splitlines(), "a", "b", lineterm="")
    )
    return before != after


def list_problems(arguments):
    print("\n".join(name for name in matrix() if re.search(arguments.only, name)))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)

    def command(name, run, *words):
        sub = commands.add_parser(name)
        sub.set_defaults(run=run)
        for word in words:
            sub.add_argument(word, nargs="?" if word == "b" else None)
        sub.add_argument("--only", default="", metavar="REGEX", help="the problems whose line in `list` matches")
        sub.add_argument("-j", "--jobs", type=int, default=os.cpu_count(), help="compilations side by side")
        return sub

    of_write = command("write", write, "file").add_mutually_exclusive_group()
    of_write.add_argument("--commit", metavar="REV")
    of_write.add_argument("--program", metavar="PATH", type=Path)
    command("compare", compare, "a", "b")
    command("diff", diff, "a", "b").add_argument("--kernel", required=True, metavar="NAME", help="as `compare` prints it")
    command("list", list_problems)
    arguments = parser.parse_args()
    sys.exit(int(arguments.run(arguments) or 0))


if __name__ == "__main__":
    main()
