#!/bin/sh
# Makes a pack of the preset `common`, unless the file is newer than all that it is made from. It
# needs NVRTC. FLASHTUNE_CLI names a command line that is built; else `make cli` builds one. It runs
# on this machine, whatever machine the library is for.
#
# usage: make_pack.sh ARCHS FILE [--if-possible]
#
# ARCHS          as --arch of `flashtune pack`; FILE.archs keeps them
# --if-possible  without NVRTC, leave no FILE and say how to get one
set -eu
cd "$(dirname "$0")/.."
archs=$1 pack=$2

if [ -f "$pack" ] && [ "$(cat "$pack.archs" 2> /dev/null)" = "$archs" ] &&
    [ -z "$(find src templates tuning-db Cargo.toml -newer "$pack" -type f | head -n 1)" ]; then
    exit 0
fi
[ -n "${FLASHTUNE_CLI-}" ] || make --no-print-directory cli
cli=${FLASHTUNE_CLI:-target/cli/release/flashtune}
if [ "${3-}" = --if-possible ] && ! "$cli" info --json | grep -q '"libnvrtc":{"found":"'; then
    rm -f "$pack"
    echo "no pack: no NVRTC was found, so the first call of each problem will compile for one or two seconds; to mend it: python3 -m pip install nvidia-cuda-nvrtc, then make install"
    exit 0
fi
mkdir -p "$(dirname "$pack")"
"$cli" pack --arch "$archs" --preset common --output "$pack"
echo "$archs" > "$pack.archs"
