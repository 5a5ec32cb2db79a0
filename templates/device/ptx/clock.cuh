// The SM that a thread runs on, and the time there (PTX ISA, "%smid", "%clock64", "%globaltimer").
// The sm_clock kernel uses this file. It knows no schedule and no problem.

#include "device/types.cuh"

__device__ __forceinline__ uint32 sm_index() {
    uint32 sm;
    asm volatile("mov.u32 %0, %%smid;" : "=r"(sm));
    return sm;
}
// Reads the SM's cycle counter and then the GPU's nanosecond timer, in two adjacent instructions.
__device__ __forceinline__ void read_clocks(uint64& cycles, uint64& ns) {
    asm volatile("mov.u64 %0, %%clock64;\n\tmov.u64 %1, %%globaltimer;" : "=l"(cycles), "=l"(ns));
}
