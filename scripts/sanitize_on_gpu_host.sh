#!/bin/sh
# Runs a small set of problems under compute-sanitizer's memcheck and racecheck on a GPU host. A
# part that fails does not stop the others. Ends with 'N passed, N failed'. PART_SECONDS=N (300)
# limits the time of each part.
set -u
cd "$(dirname "$0")/.."
export FLASHTUNE_LIBRARY="${FLASHTUNE_LIBRARY:-$PWD/build/gpu-host/lib/libflashtune.so}"
export PYTHONPATH="$PWD/bindings/python${PYTHONPATH:+:$PYTHONPATH}"
# torch's memory pool would hide accesses past the end of a tensor.
export PYTORCH_NO_CUDA_MEMORY_CACHING=1
passed=0
failed=0
# Racecheck of CUDA 13.0 has three blind spots. It does not know that the mbarrier of a bulk copy
# completes that copy; the backward pass reads LSE and delta after such copies. Where teams of warps
# have met at named barriers, it also misses a later __syncthreads: it then reports reads before
# against writes after it, although the machine code has BAR.SYNC 0x0 between them. And it does not
# know that a __syncwarp orders the reads of all lanes before the mbarrier arrival of one lane. So
# it reports the slots of tiles once a producer reuses one, from the fifth tile on. A test kernel
# with nothing but such a ring of slots had the same report, and none if all lanes arrive.
for tool in "memcheck" "racecheck --check-bulk-copy no"; do
    parts="plain features decode eight-bits e4m3"
    [ "$tool" = memcheck ] && parts="$parts decode-teams few-heads"
    for part in $parts; do
        # shellcheck disable=SC2086 # $tool holds a name and its options
        if timeout "${PART_SECONDS:-300}" compute-sanitizer --tool $tool --error-exitcode 9 --kernel-regex kns=flashtune \
            python3 scripts/sanitizer_problems.py "$part"; then
            passed=$((passed + 1))
        else
            # 9: the tool found an error; 124: the time ran out.
            echo "FAILED: $tool, $part: exit status $?"
            failed=$((failed + 1))
        fi
    done
done
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
