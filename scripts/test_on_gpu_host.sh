#!/bin/sh
# Runs all tests on a GPU host without Rust, from the files that scripts/pack_for_gpu_host.sh
# packed. The host needs a C compiler and Python 3 with PyTorch, numpy and pytest. Ends with one
# line, 'N passed, N failed'. Arguments go to scripts/test.py.
set -eu
cd "$(dirname "$0")/.."
packed=build/gpu-host
[ -f "$packed/lib/libflashtune.so" ] || { echo "$packed is missing: run scripts/pack_for_gpu_host.sh"; exit 1; }
export FLASHTUNE_REQUIRE_GPU="${FLASHTUNE_REQUIRE_GPU:-1}"
export FLASHTUNE_REQUIRE_NVRTC="${FLASHTUNE_REQUIRE_NVRTC:-1}"
exec python3 scripts/test.py --prebuilt "$packed" "$@"
