// Accesses to device memory that CUDA C++ has no name for (PTX ISA, "red", "ld.acquire"). dQ's
// accumulator adds through this file, and counters order additions by it. It knows neither the
// accumulator's layout nor what a counter counts.

#include "device/types.cuh"

// Adds one float in device memory. The addition is atomic and returns nothing.
__device__ __forceinline__ void add_float(float* at, float x) {
    asm volatile("red.global.add.f32 [%0], %1;" :: "l"(__cvta_generic_to_global(at)), "f"(x) : "memory");
}
// Adds four neighbouring floats, aligned to 16 bytes, from sm_90 on (PTX ISA 8.1,
// "red.global.add.v4.f32").
__device__ __forceinline__ void add_floats(float* at, const float (&x)[4]) {
    asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};"
                 :: "l"(__cvta_generic_to_global(at)), "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]) : "memory");
}

// Four neighbouring floats, aligned to 16 bytes, under a predicate instead of a branch: a branch
// around them would serialise the wgmma that runs (ptxas, C7520). Without the predicate the loaded
// floats are 0.
__device__ __forceinline__ void load_floats_if(float (&x)[4], const float* from, bool is_loaded) {
    x[0] = x[1] = x[2] = x[3] = 0.f;
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %5, 0; @p ld.global.v4.f32 {%0, %1, %2, %3}, [%4]; }"
                 : "+f"(x[0]), "+f"(x[1]), "+f"(x[2]), "+f"(x[3]) : "l"(__cvta_generic_to_global(from)), "r"(int(is_loaded)) : "memory");
}
__device__ __forceinline__ void store_floats_if(float* to, const float (&x)[4], bool is_stored) {
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %5, 0; @p st.global.v4.f32 [%4], {%0, %1, %2, %3}; }"
                 :: "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]), "l"(__cvta_generic_to_global(to)), "r"(int(is_stored)) : "memory");
}
__device__ __forceinline__ void add_floats_if(float* to, const float (&x)[4], bool is_added) {
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %5, 0; @p red.global.add.v4.f32 [%4], {%0, %1, %2, %3}; }"
                 :: "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]), "l"(__cvta_generic_to_global(to)), "r"(int(is_added)) : "memory");
}

// Sixteen bytes, aligned to as many. NVRTC splits some such stores of a uint4.
__device__ __forceinline__ void store_four_words(void* to, const uint32 (&x)[4]) {
    asm volatile("st.global.v4.u32 [%4], {%0, %1, %2, %3};"
                 :: "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "l"(__cvta_generic_to_global(to)) : "memory");
}

// Sixteen bytes that no thread writes while the kernel runs; zeros unless `is_loaded`.
__device__ __forceinline__ uint4 load_read_only_if(const void* from, bool is_loaded) {
    uint4 x = make_uint4(0, 0, 0, 0);
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %5, 0; @p ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4]; }"
                 : "+r"(x.x), "+r"(x.y), "+r"(x.z), "+r"(x.w) : "l"(__cvta_generic_to_global(from)), "r"(int(is_loaded)));
    return x;
}

// The same, but `x` keeps what it holds unless `is_loaded`.
__device__ __forceinline__ void load_read_only_into(uint4& x, const void* from, bool is_loaded) {
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %5, 0; @p ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4]; }"
                 : "+r"(x.x), "+r"(x.y), "+r"(x.z), "+r"(x.w) : "l"(__cvta_generic_to_global(from)), "r"(int(is_loaded)));
}

// Loads a counter with acquire at GPU scope. Writes that another thread released by
// count_up_release are visible after this load.
__device__ __forceinline__ uint32 load_acquire(const uint32* from) {
    uint32 value;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];"
                 : "=r"(value) : "l"(__cvta_generic_to_global(from)) : "memory");
    return value;
}
// Adds 1 to a counter with release at GPU scope. The release orders this thread's earlier writes,
// and writes it has observed, before the addition.
__device__ __forceinline__ void count_up_release(uint32* counter) {
    asm volatile("red.release.gpu.global.add.u32 [%0], 1;" :: "l"(__cvta_generic_to_global(counter)) : "memory");
}
