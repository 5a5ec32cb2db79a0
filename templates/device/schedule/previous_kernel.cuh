// The kernels of a pass follow one another closely. From sm_90 on each kernel after the first is
// launched while the one before it still runs (programmatic dependent launch). It waits here until
// that kernel has ended and what it wrote is visible. Before the wait a kernel may only read what
// no kernel of the pass writes. src/kernel/launch.rs asks for it.

#include "device/ptx/sync.cuh"

__device__ __forceinline__ void wait_for_previous_kernel() {
    if constexpr (kArch >= 90) wait_for_previous_grid();
}
