// Empty instructions that restrain the compiler. They emit no machine code. Kernels and layouts use
// them where ptxas would otherwise hoist or recompute. Nothing here orders the hardware: barriers
// and fences do (ptx/sync.cuh, ptx/mbarrier.cuh).

#include "device/types.cuh"

// Hides a value from the compiler. The compiler then keeps the value in a register, and can neither
// recompute it nor hoist what follows from it.
__device__ __forceinline__ void make_opaque(int& value) { asm volatile("" : "+r"(value)); }
__device__ __forceinline__ void make_opaque(int& a, int& b, uint32& c) { asm volatile("" : "+r"(a), "+r"(b), "+r"(c)); }
__device__ __forceinline__ void make_opaque(int64& value) { asm volatile("" : "+l"(value)); }
__device__ __forceinline__ void make_opaque(const int*& value) { asm volatile("" : "+l"(value)); }
// Hides where a pointer points, and all that memory holds. An array behind it stays in memory.
__device__ __forceinline__ void make_opaque(float*& value) { asm volatile("" : "+l"(value) :: "memory"); }

// The same object, which the compiler then keeps in memory.
template <class T>
__device__ __forceinline__ T& in_memory(T& object) {
    T* at = &object;
    asm volatile("" : "+l"(at) :: "memory");
    return *at;
}

// Keeps the compiler from moving any access to memory across this line.
__device__ __forceinline__ void compiler_fence() { asm volatile("" ::: "memory"); }
