#!/bin/sh
# Runs the benches on a GPU host from what scripts/pack_for_gpu_host.sh packed, and leaves their JSON in a folder.
# usage: scripts/bench_on_gpu_host.sh [FOLDER] [arguments of bench/attention.py]
set -eu
cd "$(dirname "$0")/.."
packed=build/gpu-host
folder="${1:-build/bench}"
[ $# -eq 0 ] || shift
mkdir -p "$folder"
export FLASHTUNE_LIBRARY="${FLASHTUNE_LIBRARY:-$PWD/$packed/lib/libflashtune.so}"
export PYTHONPATH="$PWD/bindings/python${PYTHONPATH:+:$PYTHONPATH}"
export PYTHONUNBUFFERED=1
python3 bench/host_time.py --json "$folder/host_time.json"
python3 bench/cpu_vs_torch.py --json "$folder/cpu_vs_torch.json"
python3 bench/training.py --json "$folder/training.json"
python3 bench/memory.py --json "$folder/memory.json"
python3 bench/features.py --json "$folder/features.json"
python3 bench/decode.py --json "$folder/decode.json"
python3 bench/attention.py --json "$folder/attention.json" "$@"
python3 bench/chart.py "$folder/attention.json" "$folder/chart"
