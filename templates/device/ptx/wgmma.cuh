// The order of a warpgroup's asynchronous products (PTX ISA, "wgmma"), and the register counts of
// its threads.
//
// ptx/wgmma.tera gives the products themselves, one function for each shape that a kernel lists.
// All four warps of a warpgroup call each function here together. This file knows no operand:
// layout/operand.cuh describes those.

#include "device/types.cuh"

// Orders this warpgroup's accesses to registers before later products.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
// Ends a group of products.
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until at most kPending groups of products are in flight.
template <int kPending>
__device__ __forceinline__ void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(kPending) : "memory"); }

// Keeps ordinary arithmetic on an accumulator from moving across this line. The compiler does not
// know that a product may still write the accumulator.
template <int kTiles>
__device__ __forceinline__ void pin(float (&acc)[kTiles][4]) {
    #pragma unroll
    for (int i = 0; i < kTiles * 4; ++i) asm volatile("" : "+f"(acc[i / 4][i % 4]) :: "memory");
}
// The same for an operand in registers, which is to be made before the fence.
template <int kSteps>
__device__ __forceinline__ void pin(uint32 (&operand)[kSteps][4]) {
    #pragma unroll
    for (int i = 0; i < kSteps * 4; ++i) asm volatile("" : "+r"(operand[i / 4][i % 4]) :: "memory");
}

// Raises or lowers the registers of each thread of this warpgroup. The CTA has one pool of
// registers, which the launch shares out evenly.
template <int kRegisters>
__device__ __forceinline__ void more_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" :: "n"(kRegisters)); }
template <int kRegisters>
__device__ __forceinline__ void fewer_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" :: "n"(kRegisters)); }
