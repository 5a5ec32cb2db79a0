// Loads from and stores to shared memory by 32-bit address (PTX ISA, "ld.shared", "st.shared").
// This file knows no layout: callers compute addresses.
//
// All accesses are volatile and stay on their side of a barrier. Accesses that also clobber memory
// stay in order with every other access to memory.

#include "device/types.cuh"

__device__ __forceinline__ float load_float(uint32 from) {
    float value;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(from));
    return value;
}
__device__ __forceinline__ uint16 load_half_word(uint32 from) {
    uint16 value;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(value) : "r"(from));
    return value;
}
__device__ __forceinline__ uint32 load_word(uint32 from) {
    uint32 word;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(word) : "r"(from));
    return word;
}
__device__ __forceinline__ uint2 load_two_words(uint32 from) {
    uint2 words;
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(words.x), "=r"(words.y) : "r"(from));
    return words;
}
__device__ __forceinline__ uint4 load_four_words(uint32 from) {
    uint4 words;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w) : "r"(from));
    return words;
}

__device__ __forceinline__ void store_half_word(uint32 to, uint16 value) {
    asm volatile("st.shared.u16 [%0], %1;" :: "r"(to), "h"(value) : "memory");
}
__device__ __forceinline__ void store_word(uint32 to, uint32 word) {
    asm volatile("st.shared.u32 [%0], %1;" :: "r"(to), "r"(word) : "memory");
}
__device__ __forceinline__ void store_two_floats(uint32 to, float first, float second) {
    asm volatile("st.shared.v2.f32 [%0], {%1, %2};" :: "r"(to), "f"(first), "f"(second) : "memory");
}
// Stores 16 bytes of zeros.
__device__ __forceinline__ void store_zeros(uint32 to) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" :: "r"(to), "r"(0) : "memory");
}

// ---- in order with every other access to memory

__device__ __forceinline__ uint32 load_word_in_order(uint32 from) {
    uint32 word;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(word) : "r"(from) : "memory");
    return word;
}
__device__ __forceinline__ void load_floats(float (&x)[2], uint32 address) {
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x[0]), "=f"(x[1]) : "r"(address) : "memory");
}
__device__ __forceinline__ void store_floats(uint32 address, const float (&x)[4]) {
    asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};"
                 :: "r"(address), "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]) : "memory");
}
__device__ __forceinline__ uint4 load_chunk(uint32 address) {
    uint4 x;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "r"(address) : "memory");
    return x;
}
__device__ __forceinline__ int load_int(uint32 from) {
    int x;
    asm volatile("ld.shared.s32 %0, [%1];" : "=r"(x) : "r"(from) : "memory");
    return x;
}
__device__ __forceinline__ int2 load_two_ints(uint32 from) {
    int2 x;
    asm volatile("ld.shared.v2.s32 {%0, %1}, [%2];" : "=r"(x.x), "=r"(x.y) : "r"(from) : "memory");
    return x;
}
__device__ __forceinline__ int4 load_four_ints(uint32 from) {
    int4 x;
    asm volatile("ld.shared.v4.s32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "r"(from) : "memory");
    return x;
}
__device__ __forceinline__ void store_int(uint32 to, int x) {
    asm volatile("st.shared.s32 [%0], %1;" :: "r"(to), "r"(x) : "memory");
}
__device__ __forceinline__ void store_two_ints(uint32 to, int a, int b) {
    asm volatile("st.shared.v2.s32 [%0], {%1, %2};" :: "r"(to), "r"(a), "r"(b) : "memory");
}
__device__ __forceinline__ void store_four_ints(uint32 to, int a, int b, int c, int d) {
    asm volatile("st.shared.v4.s32 [%0], {%1, %2, %3, %4};" :: "r"(to), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}
