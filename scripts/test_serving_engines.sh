#!/bin/sh
# Runs the tests of the serving backends with the real vLLM and SGLang, on a CPU or a GPU, in a
# virtual environment for each. The environments stay in target/serving. Needs the library of `cargo
# build --lib`, Python 3.12 (python3.12, or the program that PYTHON names), a network and about 15 GB
# for each engine.
#
#   scripts/test_serving_engines.sh [ENGINE==VERSION...]
set -eu
cd "$(dirname "$0")/.."
export FLASHTUNE_LIBRARY="${FLASHTUNE_LIBRARY:-$PWD/target/debug/libflashtune.so}"
[ -f "$FLASHTUNE_LIBRARY" ] || { echo "$FLASHTUNE_LIBRARY is missing: run cargo build --lib"; exit 1; }
python=${PYTHON:-python3.12}
"$python" -c "" 2> /dev/null || { echo "$python does not run: set PYTHON to a Python 3.12"; exit 1; }
[ $# -gt 0 ] || set -- vllm==0.33.0 sglang==0.5.23
tests=bindings/python/tests
failed=
for package in "$@"; do
    venv=target/serving/$package
    if [ ! -f "$venv/installed" ]; then
        "$python" -m venv "$venv"
        "$venv/bin/python" -m pip install --quiet "$package" pytest
        touch "$venv/installed"
    fi
    engine=${package%%==*}
    files="$tests/test_serving_$engine.py $tests/test_serving_${engine}_models.py $tests/test_serving_graphs.py"
    files="$files $tests/test_serving_sealed.py $tests/test_serving_interface.py"
    echo "$package"
    # shellcheck disable=SC2086  # one word for each file
    "$venv/bin/python" -m pytest -q -rs -p no:cacheprovider $files || failed="$failed $package"
done
[ -z "$failed" ] || { echo "failed with$failed"; exit 1; }
