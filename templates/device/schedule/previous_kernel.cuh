// The wait for the kernel before this one in the same pass. Every kernel of a pass but the first
// calls it. It knows no buffer.
//
// From sm_90 on a kernel is launched while the kernel before it still runs (programmatic dependent
// launch, requested by src/kernel/launch.rs). The wait returns when that kernel has ended and its
// writes are visible. Before the wait, a kernel may read only memory that no kernel of the pass
// writes.

#include "device/ptx/sync.cuh"

__device__ __forceinline__ void wait_for_previous_kernel() {
    if constexpr (kArch >= 90) wait_for_previous_grid();
}
