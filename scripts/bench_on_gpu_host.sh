#!/bin/sh
# Runs the benches on a GPU host from the files that scripts/pack_for_gpu_host.sh packed. Leaves the
# JSON and the text of each bench in FOLDER, and the charts of bench/attention.py.
# usage: scripts/bench_on_gpu_host.sh [FOLDER] [arguments of bench/attention.py]
# BENCHES="attention decode" names the benches to run; the default is all.
# PART_SECONDS=N (1800) limits the time of each bench. The last line names each bench that failed or
# ran out of time; the others run all the same.
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
    {
        timeout "${PART_SECONDS:-1800}" python3 "bench/$name.py" --json "$folder/$name.json" "$@" 2>&1
        echo $? > "$folder/status"
    } | tee "$folder/$name.txt"
    status=$(cat "$folder/status")
    rm "$folder/status"
    [ "$status" -eq 0 ] || failed="$failed $name (exit status $status)"
}

for name in ${BENCHES:-attention decode kv_append features host_time training memory cpu_vs_torch}; do
    if [ "$name" = attention ]; then
        bench attention "$@"
    else
        bench "$name"
    fi
done
if [ -f "$folder/attention.json" ]; then python3 bench/chart.py "$folder/attention.json" "$folder/chart"; fi
if [ -n "$failed" ]; then
    echo "FAILED:$failed"
    exit 1
fi
