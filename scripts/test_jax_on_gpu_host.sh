#!/bin/sh
# Runs the tests of flashtune.jax on a GPU host, on its CPU and its GPU. The host needs Python 3
# with JAX for CUDA, numpy and pytest, and the library: from FLASHTUNE_LIBRARY, from
# scripts/pack_for_gpu_host.sh or from `make lib`. PYTHON names another Python. Arguments go to
# pytest.
set -eu
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
for library in "${FLASHTUNE_LIBRARY:-}" build/gpu-host/lib/libflashtune.so target/release/libflashtune.so ''; do
    [ -f "$library" ] && break
done
[ -n "$library" ] || { echo "no library: run scripts/pack_for_gpu_host.sh or make lib"; exit 1; }
FLASHTUNE_LIBRARY=$(realpath "$library")
export FLASHTUNE_LIBRARY
# Other processes may need the GPU's memory too.
export XLA_PYTHON_CLIENT_PREALLOCATE=false
"$python" -c '
import jax
print("JAX", jax.__version__, "on", jax.devices())
assert jax.default_backend() == "gpu", "JAX sees no GPU"'
exec "$python" -m pytest -q -rs -p no:cacheprovider bindings/python/tests/test_jax.py \
    bindings/python/tests/test_jax_caches.py bindings/python/tests/test_jax_eight.py "$@"
