#!/bin/sh
# Runs the tests of PyTorch's interfaces and of transformers on a CPU, in a virtual environment for
# each version of PyTorch. The environments stay in target/torch-versions. Needs the library of
# `cargo build --lib`, a network and about 6 GB for each version.
#
#   scripts/test_torch_versions.sh [VERSION...]
set -eu
cd "$(dirname "$0")/.."
export FLASHTUNE_LIBRARY="${FLASHTUNE_LIBRARY:-$PWD/target/debug/libflashtune.so}"
[ -f "$FLASHTUNE_LIBRARY" ] || { echo "$FLASHTUNE_LIBRARY is missing: run cargo build --lib"; exit 1; }
[ $# -gt 0 ] || set -- 2.4.1 2.8.0 2.11.0 2.15.0
tests=bindings/python/tests
failed=
for version in "$@"; do
    venv=target/torch-versions/$version
    [ -x "$venv/bin/python" ] || python3 -m venv "$venv"
    "$venv/bin/python" -m pip install --quiet "torch==$version" "numpy<2.3" pytest
    files="$tests/test_torch.py $tests/test_torch_features.py $tests/test_torch_drafts.py $tests/test_torch_sdpa.py"
    case $version in
        2.11.*)
            "$venv/bin/python" -m pip install --quiet "transformers>=5,<6"
            files="$files $tests/test_transformers.py $tests/test_serving_vllm.py"
            files="$files $tests/test_serving_sglang.py $tests/test_serving_graphs.py" ;;
    esac
    echo "PyTorch $version"
    # shellcheck disable=SC2086  # one word for each file
    "$venv/bin/python" -m pytest -q -p no:cacheprovider $files || failed="$failed $version"
done
[ -z "$failed" ] || { echo "failed with PyTorch$failed"; exit 1; }
