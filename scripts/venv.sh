#!/bin/sh
# Fills .venv with what the tests need beside Rust: numpy, pytest, and NVRTC and nvdisasm to compile kernels without a
# GPU and look at them. Without a network it says so and leaves what is there: the tests then skip what they lack, or
# fail under FLASHTUNE_REQUIRE_NVRTC=1 and FLASHTUNE_REQUIRE_NVDISASM=1.
cd "$(dirname "$0")/.." || exit 1

if [ ! -x .venv/bin/python ]; then
    rm -rf .venv
    python3 -m venv .venv || { rm -rf .venv; echo "SKIPPED: python3 -m venv does not work here"; exit 0; }
fi
# NVRTC 13.0 is what the kernels are checked with; another one is found where the machine has it. nvdisasm reads the
# cubins of older versions.
for packages in "numpy pytest" "ml_dtypes" "nvidia-cuda-nvrtc==13.0.*" "nvidia-cuda-nvdisasm==13.*"; do
    # shellcheck disable=SC2086  # one word for each package
    .venv/bin/python -m pip install --quiet --disable-pip-version-check --retries 1 $packages ||
        echo "SKIPPED: pip could not install $packages"
done
exit 0
