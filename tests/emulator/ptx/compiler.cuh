// Stands in for device/ptx/compiler.cuh. These functions restrain ptxas and compute nothing.

#include "device/types.cuh"

__device__ __forceinline__ void make_opaque(int&) {}
__device__ __forceinline__ void make_opaque(int&, int&, uint32&) {}
__device__ __forceinline__ void make_opaque(int64&) {}
__device__ __forceinline__ void make_opaque(const int*&) {}
__device__ __forceinline__ void make_opaque(float*&) {}
template <class T>
__device__ __forceinline__ T& in_memory(T& object) { return object; }

__device__ __forceinline__ void compiler_fence() {}
