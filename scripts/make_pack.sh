#!/bin/sh
# Makes a pack of a preset, unless the file is newer than all that it is made from, and of the same
# architectures, preset and NVRTC. It needs NVRTC. FLASHTUNE_CLI names a command line that is built;
# else `make cli` builds one. It runs on this machine, whatever machine the library is for.
#
# FILE.stamp keeps the architectures, the NVRTC's version and the preset of a FILE that was made
# here. Any other FILE stays as it is.
#
# usage: make_pack.sh ARCHS FILE [--if-possible]
#
# ARCHS          as --arch of `flashtune pack`; "" for those of FILE.stamp, or sm_90a without one
# PACK_PRESET    in the environment, as --preset; if empty, that of FILE.stamp, or common without one
# --if-possible  where no pack can be made, leave no FILE, say why and succeed
set -eu
cd "$(dirname "$0")/.."
archs=$1 pack=$2 option=${3-}
stamp=$pack.stamp

without() {
    echo "no pack: $1, so the first call of each problem will compile for one or two seconds; $2"
    exit 0
}

# The stamp is written after its pack.
if [ -f "$pack" ] && { [ ! -f "$stamp" ] || [ -n "$(find "$pack" -newer "$stamp")" ]; }; then
    echo "$pack stays: 'make pack' did not make it; without the file, one is made"
    exit 0
fi
made_archs='' made_nvrtc='' made_preset=''
[ ! -f "$stamp" ] || read -r made_archs made_nvrtc made_preset < "$stamp" || true
made_preset=${made_preset:-common}
archs=${archs:-${made_archs:-sm_90a}}
preset=${PACK_PRESET:-$made_preset}

[ -n "${FLASHTUNE_CLI-}" ] || make --no-print-directory cli
cli=${FLASHTUNE_CLI:-target/cli/release/flashtune}
# Empty where none is found. A pack that is there then need not be made anew.
nvrtc=$("$cli" info --json |
    sed -n 's/.*"libnvrtc":{"found":"[^"]*","version":\[\([0-9]*\),\([0-9]*\)\].*/\1.\2/p')
if [ -f "$pack" ] && [ "$archs ${nvrtc:-$made_nvrtc} $preset" = "$made_archs $made_nvrtc $made_preset" ] &&
    [ -z "$(find src templates tuning-db Cargo.toml -newer "$pack" -type f | head -n 1)" ]; then
    exit 0
fi
rm -f "$pack"
if [ "$option" = --if-possible ] && [ -z "$nvrtc" ]; then
    without "no NVRTC was found" "to mend it: python3 -m pip install nvidia-cuda-nvrtc, then make install"
fi
rm -f "$stamp"
mkdir -p "$(dirname "$pack")"
if ! "$cli" pack --arch "$archs" --preset "$preset" --output "$pack"; then
    [ "$option" = --if-possible ] || exit 1
    without "making one for $archs failed, as said above" "PACK_ARCH names other architectures"
fi
echo "$archs $nvrtc $preset" > "$stamp"
