// The wait for the kernel before this one in the same pass, and the start of the one after it.
// Every kernel of a pass but the first waits. It knows no buffer.
//
// From sm_90 on a kernel is launched while the kernel before it still runs (programmatic dependent
// launch, requested by src/kernel/launch.rs). The wait returns when that kernel has ended and its
// writes are visible. Before the wait, a kernel may read only memory that no kernel of the pass
// writes.
//
// Once every CTA of a kernel has called start_next_kernel, the next kernel's CTAs come to SMs that
// have room for them, and wait there. Without the call they come when every CTA has ended. A kernel
// that calls it also waits for the kernel before it in every CTA, so that its own end follows that
// one's. The first kernel of a pass has none before it. There are two exceptions in a mixed batch.
// The decode kernel calls it without a wait, since src/kernel/launch.rs does not let it overlap the
// kernel before it. sm90's kernel reads nothing of the decode kernel, and waits only at its end. A
// kernel that widens keys for it comes before both and ends alone (src/family/spec.rs).

#include "device/ptx/sync.cuh"

__device__ __forceinline__ void wait_for_previous_kernel() {
    if constexpr (kArch >= 90) wait_for_previous_grid();
}
__device__ __forceinline__ void start_next_kernel() {
    if constexpr (kArch >= 90) start_next_grid();
}
