// Accesses to device memory that CUDA C++ has no name for (PTX ISA, "red", "ld.acquire").

#include "device/types.cuh"

__device__ __forceinline__ void add_float(float* at, float x) {
    asm volatile("red.global.add.f32 [%0], %1;" :: "l"(__cvta_generic_to_global(at)), "f"(x) : "memory");
}
// Four neighbouring floats at once, aligned to 16 bytes; sm_90 on (PTX ISA 8.1,
// "red.global.add.v4.f32").
__device__ __forceinline__ void add_floats(float* at, const float (&x)[4]) {
    asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};"
                 :: "l"(__cvta_generic_to_global(at)), "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]) : "memory");
}

// What another thread of the GPU released before it counted up is visible after this load.
__device__ __forceinline__ uint32 load_acquire(const uint32* from) {
    uint32 value;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];"
                 : "=r"(value) : "l"(__cvta_generic_to_global(from)) : "memory");
    return value;
}
// Counts up, after all that this thread has done and knows to be done.
__device__ __forceinline__ void count_up_release(uint32* counter) {
    asm volatile("red.release.gpu.global.add.u32 [%0], 1;" :: "l"(__cvta_generic_to_global(counter)) : "memory");
}
