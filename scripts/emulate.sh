#!/bin/sh
# Runs a command in which flashtune finds an emulated GPU: its CUDA kernels then run on the CPU.
#
#     scripts/emulate.sh [--arch sm_90] [--sms N] [--seed N] [--overlaps] [--lags] [--templates FOLDER] [--] COMMAND...
#
# --arch       sm_80, sm_86, sm_89, sm_90, sm_100 or sm_120; sm_90 if it is not given
# --sms        the number of SMs, as of the real GPU if it is not given; few SMs give each CTA
#              many tiles
# --seed       chooses the order in which warps run and copies arrive
# --overlaps   hides what a kernel wrote from the kernel behind it until that waits
# --lags       in one warpgroup of each CTA, lanes 1 to 31 of a warp run only if nothing else can
# --templates  a folder as FLASHTUNE_TEMPLATES names; tests/emulator/ptx replaces its device/ptx
#
# The emulator (tests/emulator) is compiled by g++ into target/emulator when its sources change.
# Kernels are kept there too. CONTRIBUTING.md says what the emulator shows.
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
templates=
while [ $# -gt 0 ]; do
    case $1 in
    --arch) export FLASHTUNE_EMULATOR_ARCH="$2"; shift 2 ;;
    --sms) export FLASHTUNE_EMULATOR_SMS="$2"; shift 2 ;;
    --seed) export FLASHTUNE_EMULATOR_SEED="$2"; shift 2 ;;
    --overlaps) export FLASHTUNE_EMULATOR_OVERLAPS=1; shift ;;
    --lags) export FLASHTUNE_EMULATOR_LAGS=1; shift ;;
    --templates) templates=$(cd "$2" && pwd); shift 2 ;;
    --) shift; break ;;
    -*) echo "emulate.sh: unknown option $1" >&2; exit 2 ;;
    *) break ;;
    esac
done
[ $# -gt 0 ] || { sed -n '2,13s/^# \{0,1\}//p' "$0" >&2; exit 2; }

source=$root/tests/emulator
folder=${FLASHTUNE_EMULATOR_DIR:-$root/target/emulator}
mkdir -p "$folder"
(
    # Two commands may start at once.
    flock 9
    sum=$(cat "$source"/*.cpp "$source"/engine/* "$source"/cuda/* "$source"/ptx/* | sha256sum)
    [ "$(cat "$folder/sum" 2>/dev/null)" = "$sum" ] && exit 0
    flags="-std=c++20 -fPIC -shared -Wall -Wextra -Werror"
    # A process that runs now keeps the file that it has opened.
    g++ $flags -O2 -g1 -march=native -Wl,-soname,libcuda.so.1 -o "$folder/new" "$source"/engine/*.cpp -ldl
    mv "$folder/new" "$folder/libcuda.so.1"
    g++ $flags -O1 -o "$folder/new" "$source/nvrtc.cpp" -ldl
    mv "$folder/new" "$folder/libnvrtc.so.13"
    cp "$source"/cuda/*.h "$folder/"
    rm -rf "$folder/templates"
    mkdir -p "$folder/templates/device"
    cp -r "$source/ptx" "$folder/templates/device/ptx"
    echo "$sum" > "$folder/sum"
) 9> "$folder/lock"

export FLASHTUNE_TEMPLATES="$folder/templates"
if [ -n "$templates" ]; then
    FLASHTUNE_TEMPLATES=$(mktemp -d)
    trap 'rm -rf "$FLASHTUNE_TEMPLATES"' EXIT
    cp -r "$templates/." "$FLASHTUNE_TEMPLATES/"
    mkdir -p "$FLASHTUNE_TEMPLATES/device/ptx"
    cp "$source"/ptx/* "$FLASHTUNE_TEMPLATES/device/ptx/"
fi
export LD_LIBRARY_PATH="$folder${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}" FLASHTUNE_NVRTC="$folder/libnvrtc.so.13"
export FLASHTUNE_CACHE_DIR="$folder/cache" FLASHTUNE_REQUIRE_GPU=1 FLASHTUNE_EMULATED=1
"$@"
