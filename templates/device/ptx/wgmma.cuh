// The order of a warpgroup's asynchronous products (PTX ISA, "wgmma"), and the registers of its
// threads.
//
// The products themselves come from ptx/wgmma.tera, one function for each shape that a kernel
// lists. All four warps of a warpgroup call each of these functions together.

#include "device/types.cuh"

// Orders this warpgroup's accesses to registers before the products that follow.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
// Ends a group of products.
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until at most kPending groups run on.
template <int kPending>
__device__ __forceinline__ void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(kPending) : "memory"); }

// Keeps plain arithmetic on an accumulator from moving across: the compiler does not know that a
// product runs on.
template <int kTiles>
__device__ __forceinline__ void pin(float (&acc)[kTiles][4]) {
    #pragma unroll
    for (int i = 0; i < kTiles * 4; ++i) asm volatile("" : "+f"(acc[i / 4][i % 4]) :: "memory");
}

// Takes registers from the pool of the CTA, or gives some back. A kernel's launch shares all of
// them out evenly.
template <int kRegisters>
__device__ __forceinline__ void more_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" :: "n"(kRegisters)); }
template <int kRegisters>
__device__ __forceinline__ void fewer_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" :: "n"(kRegisters)); }
