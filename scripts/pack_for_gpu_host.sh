#!/bin/sh
# Packs the files that a GPU host without Rust needs besides this source tree into build/gpu-host:
# the release library, the command line, the test binaries and the C example. Run it on a machine
# with Rust. Copy the tree with build/gpu-host to the GPU host, and run scripts/test_on_gpu_host.sh
# and scripts/bench_on_gpu_host.sh there.
set -eu
cd "$(dirname "$0")/.."
out=build/gpu-host

rm -rf "$out"
mkdir -p "$out/lib" "$out/bin" "$out/tests"
make --no-print-directory lib cli examples
cp -P target/release/libflashtune.so* "$out/lib/"
cp target/cli/release/flashtune "$out/bin/"
for example in build/examples/*; do
    if [ -f "$example" ] && [ -x "$example" ]; then cp "$example" "$out/bin/"; fi
done

cargo test --locked --no-run --message-format=json > build/tests-built.json
python3 - "$out" <<'PYTHON'
import json, shutil, subprocess, sys
from pathlib import Path

out = Path(sys.argv[1])
names = []
for line in open("build/tests-built.json"):
    built = json.loads(line)
    if built.get("executable") and built.get("profile", {}).get("test"):
        path = Path(built["executable"])
        shutil.copy(path, out / "tests" / path.name)
        names.append(path.name)
subprocess.run(["strip", *(out / "tests" / name for name in names)], check=True)
(out / "tests.json").write_text(json.dumps({"binaries": sorted(names)}, indent=1) + "\n")
PYTHON
rm build/tests-built.json
strip "$out/bin/"*

size=$(du -sm "$out" | cut -f1)
echo "$out: $size MiB"
