#!/bin/sh
# Builds the wheel for aarch64 and runs the C tests against its library under qemu, on the CPU
# backend. The last line is 'N passed, N failed'. It is no part of CI, since it builds the release
# library a second time.
#
# It needs Rust's std for aarch64 (`rustup target add aarch64-unknown-linux-gnu`),
# qemu-aarch64-static and the C library of aarch64. On Debian: apt install qemu-user-static
# libc6-arm64-cross libgcc-s1-arm64-cross. QEMU and SYSROOT name other places.
set -eu
cd "$(dirname "$0")/.."
target=aarch64-unknown-linux-gnu
qemu=${QEMU:-qemu-aarch64-static}
sysroot=${SYSROOT:-/usr/aarch64-linux-gnu}
tests=${*:-round_trip merge pages key_starts kv_append kv_append_slots const_inputs bad_arguments threads fork ranges tuning junk}

command -v "$qemu" > /dev/null || { echo "test_aarch64.sh: $qemu is not installed; on Debian: apt install qemu-user-static" >&2; exit 1; }
[ -e "$sysroot/lib/ld-linux-aarch64.so.1" ] || { echo "test_aarch64.sh: $sysroot has no lib/ld-linux-aarch64.so.1; on Debian: apt install libc6-arm64-cross" >&2; exit 1; }
make --no-print-directory wheel TARGET=$target PACK=no

library=$PWD/target/manylinux/$target/release/libflashtune.so
soname=$(readelf -d "$library" | sed -n 's/.*(SONAME).*\[\(.*\)\]/\1/p')
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
mkdir "$folder/lib"
ln -s "$library" "$folder/lib/$soname"
passed=0 failed=0
# contexts.c is missing: it counts the threads of the process, and qemu has threads of its own.
for name in $tests; do
    mkdir "$folder/$name"
    build/wheel-tools/bin/python -m ziglang cc -target aarch64-linux-gnu.2.28 -std=c99 -O1 -Wall -Wextra -Werror \
        -I include "tests/c/$name.c" -o "$folder/$name/program" "$library" -lm -ldl -pthread
    if env -u FLASHTUNE_CACHE_DIR -u XDG_CACHE_HOME HOME="$folder/$name" \
        "$qemu" -L "$sysroot" -E LD_LIBRARY_PATH="$folder/lib" "$folder/$name/program" "$folder/$name/cache"; then
        passed=$((passed + 1)) && echo "ok: $name"
    else
        failed=$((failed + 1)) && echo "FAILED: $name"
    fi
done
echo "$passed passed, $failed failed"
[ $failed = 0 ]
