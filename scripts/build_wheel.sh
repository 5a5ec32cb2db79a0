#!/bin/sh
# Builds the wheel and the source distribution into build/dist. The library in the wheel needs glibc
# 2.28 or later, whatever this machine has: zig links it against that version's symbols. zig,
# cargo-zigbuild and Python's build tools come from PyPI into build/wheel-tools.
#
# build/libflashtune.pack goes into the wheel beside the library, and is made first where it is
# missing or old. NVRTC for it comes from PyPI too, unless FLASHTUNE_NVRTC names one. PACK=no builds
# a wheel without it. STEP=library ends once the library is built.
#
# TARGET=aarch64-unknown-linux-gnu builds for another machine. It needs that target's std:
# `rustup target add aarch64-unknown-linux-gnu`.
set -eu
cd "$(dirname "$0")/.."
tools=build/wheel-tools
out=build/dist

[ "$(uname -s)" = Linux ] || { echo "build_wheel.sh: wheels are built on Linux only" >&2; exit 1; }
target=${TARGET:-$(uname -m)-unknown-linux-gnu}
machine=${target%%-*}
case $target in
x86_64-unknown-linux-gnu | aarch64-unknown-linux-gnu) ;;
*) echo "build_wheel.sh: TARGET is $target; wheels are for x86_64-unknown-linux-gnu and aarch64-unknown-linux-gnu" >&2; exit 1 ;;
esac
platform=manylinux_2_28_$machine

if [ ! -x $tools/bin/cargo-zigbuild ]; then
    rm -rf $tools
    python3 -m venv $tools
    $tools/bin/python -m pip install --quiet --disable-pip-version-check \
        "ziglang>=0.13,<0.17" cargo-zigbuild auditwheel build "setuptools>=77"
fi

# The same crate types as `make lib`, so that one build serves installations too.
PATH="$PWD/$tools/bin:$PATH" cargo-zigbuild rustc --locked --release --lib --no-default-features \
    --crate-type cdylib,staticlib --target "$target.2.28" --target-dir target/manylinux -- -C strip=symbols "$@"
built=target/manylinux/$target/release/libflashtune.so
[ "${STEP-}" != library ] || exit 0

mkdir -p build
"${PYTHON:-python3}" scripts/sbom.py "$target" > "build/flashtune-$machine.cdx.json"

if [ "${PACK-}" != no ]; then
    if [ -z "${FLASHTUNE_NVRTC-}" ]; then
        # The version that scripts/venv.sh installs for the tests.
        ls -d $tools/lib/python3*/site-packages/nvidia_cuda_nvrtc-13.0.*.dist-info > /dev/null 2>&1 ||
            $tools/bin/python -m pip install --quiet --disable-pip-version-check "nvidia-cuda-nvrtc==13.0.*" || {
            echo "build_wheel.sh: pip could not install NVRTC for the pack; FLASHTUNE_NVRTC names the folder of one, and PACK=no builds a wheel without a pack" >&2
            exit 1
        }
        FLASHTUNE_NVRTC=$(echo "$PWD/$tools"/lib/python3*/site-packages/nvidia/cu13/lib)
        export FLASHTUNE_NVRTC
    fi
    sh scripts/make_pack.sh "${PACK_ARCH-}" build/libflashtune.pack
fi
pack=$(sh scripts/built_pack.sh)

# The wheel of another machine stays.
rm -rf $out/*_"$machine".whl $out/*.tar.gz build/lib build/lib.* build/bdist.*
FLASHTUNE_PREBUILT="$PWD/$built" FLASHTUNE_PREBUILT_PACK="$pack" FLASHTUNE_SBOM="$PWD/build/flashtune-$machine.cdx.json" $tools/bin/python -m build --no-isolation --outdir $out \
    --config-setting=--build-option=--plat-name="$platform" --wheel . > build/wheel.log ||
    { cat build/wheel.log >&2; exit 1; }
$tools/bin/python -m build --no-isolation --outdir $out --sdist . > build/sdist.log ||
    { cat build/sdist.log >&2; exit 1; }
rm -rf build/lib build/lib.* build/bdist.* bindings/python/flashtune.egg-info
ls -l $out
