#!/bin/sh
# Runs the C programs of tests/c that look for faults on a GPU: junk between guards, captures and
# failing calls behind driver_shim.c, forks, two GPUs, many processes, tensors past 2^31 elements,
# junk under compute-sanitizer. Needs a C compiler and the library of scripts/pack_for_gpu_host.sh.
# Each part has a time limit, and all have TOTAL_SECONDS (195) together. Ends with 'N passed, N
# failed'.
#
# PROGRAMS names a folder of programs that are built already, and FLASHTUNE_LIBRARY the library. With
# ONLY=WORDS the parts run whose names match that extended regular expression.
set -u
cd "$(dirname "$0")/.." || exit 1
library="${FLASHTUNE_LIBRARY:-$PWD/build/gpu-host/lib/libflashtune.so}"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -m 700 "$work/lib" "$work/shim"
cp "$library" "$work/lib/libflashtune.so"
ln -s libflashtune.so "$work/lib/libflashtune.so.0"
export LD_LIBRARY_PATH="$work/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}" HOME="$work"
unset FLASHTUNE_CACHE_DIR XDG_CACHE_HOME FLASHTUNE_PACK
programs="${PROGRAMS:-$work}"
# The driver that the shim stands in front of.
SHIM_DRIVER=$(ldconfig -p | sed -n 's/.*libcuda\.so\.1 .*=> //p' | head -n 1)
export SHIM_DRIVER
if [ -z "${PROGRAMS:-}" ]; then
    for name in junk fork capture failing_driver two_devices processes large; do
        "${CC:-cc}" -std=c99 -O2 -I include "tests/c/$name.c" -o "$work/$name" -L "$work/lib" -lflashtune \
            -lm -ldl -pthread || exit 1
    done
    "${CC:-cc}" -std=gnu11 -O2 -shared -fPIC tests/c/driver_shim.c -o "$work/driver_shim.so" -ldl || exit 1
fi
cp "$programs/driver_shim.so" "$work/shim/libcuda.so.1"

passed=0
failed=0
began=$(date +%s)
# part NAME SECONDS COMMAND...
part() {
    name=$1
    limit=$2
    shift 2
    echo "$name" | grep -Eq "${ONLY:-.}" || return 0
    left=$((${TOTAL_SECONDS:-195} - $(date +%s) + began))
    [ "$limit" -gt "$left" ] && limit=$left
    since=$(date +%s)
    if [ "$limit" -gt 0 ]; then
        timeout -k 2 "$limit" "$@" > "$work/output" 2>&1
        status=$?
    else
        echo "no time is left" > "$work/output"
        status=124
    fi
    if [ "$status" -eq 9 ]; then grep -A 9 "Invalid\|Error" "$work/output" | head -n 60 | cut -c 1-200; fi
    tail -n 12 "$work/output" | cut -c 1-300 | sed 's/^/    /'
    if [ "$status" -eq 0 ]; then
        passed=$((passed + 1))
        echo "ok      $name, $(($(date +%s) - since)) s"
    else
        # 9: the sanitizer found an error; 124: the time ran out.
        failed=$((failed + 1))
        echo "FAILED  $name, $(($(date +%s) - since)) s of $limit, exit status $status"
    fi
}

# The parts share this folder of kernels, and each kernel is compiled once.
mkdir -m 700 "$work/cache"
part "fork" 20 env FORK_GPU=1 "$programs/fork"
part "tensors past 2^31 elements" 80 "$programs/large" gpu
part "junk, ${JUNK_CALLS:-100000} calls" 60 env JUNK_GPU=1 JUNK_PREPARE="${JUNK_PREPARE:-60}" JUNK_REPORT=1 \
    JUNK_CACHE="$work/cache" "$programs/junk" "${JUNK_CALLS:-100000}"
part "junk under memcheck" 60 env JUNK_GPU=exact JUNK_PREPARE="${JUNK_PREPARE:-60}" JUNK_REPORT=1 \
    JUNK_CACHE="$work/cache" compute-sanitizer --tool memcheck --error-exitcode 9 --kernel-regex kns=flashtune \
    "$programs/junk" "${SANITIZED_CALLS:-2000}"
part "capture" 30 env "LD_LIBRARY_PATH=$work/shim:$LD_LIBRARY_PATH" "$programs/capture"
part "a driver that fails calls" 40 env "LD_LIBRARY_PATH=$work/shim:$LD_LIBRARY_PATH" FAILING_REPORT=1 FAILING_STEP=4 \
    FAILING_CACHE="$work/cache" "$programs/failing_driver"
part "64 processes" 70 env PROCESSES_GPU=1 "$programs/processes" "$work/shared" 64
# It prints the number of GPUs that it found: with one, both contexts are on that one.
part "two contexts, on two GPUs if there are" 30 "$programs/two_devices" 1
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
