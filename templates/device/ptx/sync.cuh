// Barriers among the threads of a CTA, fences between the generic and the asynchronous proxy, and
// the wait for the kernel before (PTX ISA, "bar.sync", "fence.proxy.async", "griddepcontrol").

#include "device/types.cuh"

// Meets kThreads threads, whole warps, at a named barrier. Barrier 0 is that of __syncthreads.
template <int kThreads>
__device__ __forceinline__ void named_barrier(int id) {
    asm volatile("bar.sync %0, %1;" :: "r"(id), "n"(kThreads) : "memory");
}
__device__ __forceinline__ void warpgroup_barrier(int id) { named_barrier<128>(id); }

// Before wgmma or TMA reads shared memory that ordinary stores of this thread wrote.
__device__ __forceinline__ void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// Before a copy that must come after what this thread knows to be done in device memory.
__device__ __forceinline__ void fence_async_proxy_of_all() { asm volatile("fence.proxy.async;" ::: "memory"); }

// Waits until the grid before has ended and what it wrote is visible.
__device__ __forceinline__ void wait_for_previous_grid() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
