// Empty instructions that hold the compiler back: no machine code comes of them.

#include "device/types.cuh"

// Makes a value unknown to the compiler, which then keeps it instead of computing it, or what
// follows from it, anew.
__device__ __forceinline__ void make_opaque(int& value) { asm volatile("" : "+r"(value)); }
__device__ __forceinline__ void make_opaque(int& a, int& b, uint32& c) { asm volatile("" : "+r"(a), "+r"(b), "+r"(c)); }
__device__ __forceinline__ void make_opaque(int64& value) { asm volatile("" : "+l"(value)); }

// No access to memory moves across.
__device__ __forceinline__ void compiler_fence() { asm volatile("" ::: "memory"); }
