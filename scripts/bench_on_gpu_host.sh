#!/bin/sh
# Runs the benches on a GPU host from what scripts/pack_for_gpu_host.sh packed, and leaves their JSON in a folder. One that fails
# or takes longer than PART_SECONDS=N (1800) is said at the end, and the others run all the same.
# usage: scripts/bench_on_gpu_host.sh [FOLDER] [arguments of bench/attention.py]
set -u
cd "$(dirname "$0")/.."
packed=build/gpu-host
folder="${1:-build/bench}"
[ $# -eq 0 ] || shift
mkdir -p "$folder"
export FLASHTUNE_LIBRARY="${FLASHTUNE_LIBRARY:-$PWD/$packed/lib/libflashtune.so}"
export PYTHONPATH="$PWD/bindings/python${PYTHONPATH:+:$PYTHONPATH}"
export PYTHONUNBUFFERED=1
failed=

# The name of a bench, then its arguments.
bench() {
    name="$1"
    shift
    timeout "${PART_SECONDS:-1800}" python3 "bench/$name.py" --json "$folder/$name.json" "$@" ||
        failed="$failed $name (exit status $?)"
}

bench attention "$@"
bench decode
bench kv_append
bench features
bench host_time
bench training
bench memory
bench cpu_vs_torch
if [ -f "$folder/attention.json" ]; then python3 bench/chart.py "$folder/attention.json" "$folder/chart"; fi
if [ -n "$failed" ]; then
    echo "FAILED:$failed"
    exit 1
fi
