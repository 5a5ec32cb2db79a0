// Stands in for device/ptx/global.cuh. A thread that loads an unchanged counter again waits
// until the counter changes, so that a loop over load_acquire lets other threads run.

#include "device/types.cuh"

__device__ __forceinline__ void add_float(float* at, float x) { *at += x; }
__device__ __forceinline__ void add_floats(float* at, const float (&x)[4]) {
    if (uint64(at) % 16 != 0) emulator::fail("add_floats at %p, which is not aligned to 16 bytes", static_cast<void*>(at));
    for (int i = 0; i < 4; ++i) at[i] += x[i];
}
__device__ __forceinline__ void load_floats_if(float (&x)[4], const float* from, bool is_loaded) {
    for (int i = 0; i < 4; ++i) x[i] = is_loaded ? from[i] : 0.f;
}
__device__ __forceinline__ void store_floats_if(float* to, const float (&x)[4], bool is_stored) {
    for (int i = 0; is_stored && i < 4; ++i) to[i] = x[i];
}
__device__ __forceinline__ void add_floats_if(float* to, const float (&x)[4], bool is_added) {
    if (is_added) add_floats(to, x);
}

__device__ __forceinline__ void store_four_words(void* to, const uint32 (&x)[4]) {
    if (uint64(to) % 16 != 0) emulator::fail("store_four_words at %p, which is not aligned to 16 bytes", to);
    for (int i = 0; i < 4; ++i) static_cast<uint32*>(to)[i] = x[i];
}

__device__ __forceinline__ uint4 load_read_only_if(const void* from, bool is_loaded) {
    if (!is_loaded) return {0, 0, 0, 0};
    if (uint64(from) % 16 != 0) emulator::fail("load_read_only_if at %p, which is not aligned to 16 bytes", from);
    return *static_cast<const uint4*>(from);
}

__device__ __forceinline__ void load_read_only_into(uint4& x, const void* from, bool is_loaded) {
    if (is_loaded) x = load_read_only_if(from, true);
}

__device__ __forceinline__ uint32 load_acquire(const uint32* from) { return emulator::load_acquire(from); }
__device__ __forceinline__ void count_up_release(uint32* counter) { __atomic_fetch_add(counter, 1, __ATOMIC_SEQ_CST); }
