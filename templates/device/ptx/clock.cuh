// Which SM a thread runs on, and the time there (PTX ISA, "%smid", "%clock64", "%globaltimer").

#include "device/types.cuh"

__device__ __forceinline__ uint32 sm_index() {
    uint32 sm;
    asm volatile("mov.u32 %0, %%smid;" : "=r"(sm));
    return sm;
}
// The SM's cycle counter and the GPU's nanoseconds, one directly after the other.
__device__ __forceinline__ void read_clocks(uint64& cycles, uint64& ns) {
    asm volatile("mov.u64 %0, %%clock64;\n\tmov.u64 %1, %%globaltimer;" : "=l"(cycles), "=l"(ns));
}
