#!/bin/sh
# Runs a small set of problems under compute-sanitizer's memcheck and racecheck on a GPU host, in parts that go on after one
# another's failure. Ends with 'N passed, N failed'. PART_SECONDS=N (300) is the time that a part may take.
set -u
cd "$(dirname "$0")/.."
export FLASHTUNE_LIBRARY="${FLASHTUNE_LIBRARY:-$PWD/build/gpu-host/lib/libflashtune.so}"
export PYTHONPATH="$PWD/bindings/python${PYTHONPATH:+:$PYTHONPATH}"
# torch's pool would hide what lies past the end of one of its pieces.
export PYTORCH_NO_CUDA_MEMORY_CACHING=1
passed=0
failed=0
# Racecheck (of CUDA 13.0) does not know that a bulk copy is done when its barrier is; the backward pass reads LSE and delta
# after such copies. Nor does it know __syncthreads where teams of warps have met at barriers of their own before: it reports what
# is read before against what is written after (in the machine code, with BAR.SYNC 0x0 between them).
for tool in "memcheck" "racecheck --check-bulk-copy no"; do
    parts="plain features decode"
    [ "$tool" = memcheck ] && parts="$parts decode-teams"
    for part in $parts; do
        # shellcheck disable=SC2086 # options stand beside the name
        if timeout "${PART_SECONDS:-300}" compute-sanitizer --tool $tool --error-exitcode 9 --kernel-regex kns=flashtune \
            python3 scripts/sanitizer_problems.py "$part"; then
            passed=$((passed + 1))
        else
            # 9: the tool found something; 124: the time ran out.
            echo "FAILED: $tool, $part: exit status $?"
            failed=$((failed + 1))
        fi
    done
done
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
