// CUDA C++ for g++: the qualifiers, variables, types and functions that NVRTC knows without a
// header, as far as the kernels use them. It stands in front of every rendered text.

#pragma once

#include "device.h"

#define __global__
#define __device__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))
// A static array has one copy for each thread of the host, which runs one CTA of such a kernel at a
// time. The stand-in for NVRTC replaces declarations of dynamic shared memory (nvrtc.cpp).
#define __shared__ thread_local

#define threadIdx (emulator::self->thread_index)
#define blockIdx (emulator::self->block_index)
#define blockDim (emulator::self->block_dim)
#define gridDim (emulator::self->grid_dim)

struct alignas(8) int2 { int x, y; };
struct alignas(16) int4 { int x, y, z, w; };
struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

template <class To, class From>
inline To bits_as(From from) {
    static_assert(sizeof(To) == sizeof(From), "a reinterpretation");
    To to;
    __builtin_memcpy(&to, &from, sizeof(to));
    return to;
}
inline float __fmul_rn(float x, float y) { return x * y; }
inline float __fadd_rn(float x, float y) { return x + y; }
inline float __int_as_float(int x) { return bits_as<float>(x); }
inline float __uint_as_float(unsigned x) { return bits_as<float>(x); }
inline int __float_as_int(float x) { return bits_as<int>(x); }
inline unsigned __float_as_uint(float x) { return bits_as<unsigned>(x); }

inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(unsigned(x)); }

inline float fmaf(float x, float y, float z) { return __builtin_fmaf(x, y, z); }
inline float ceilf(float x) { return __builtin_ceilf(x); }
inline float fmaxf(float x, float y) { return __builtin_fmaxf(x, y); }
inline float fminf(float x, float y) { return __builtin_fminf(x, y); }
inline int __float2int_rn(float x) {
    if (x != x) return 0;
    return x >= 0x1p31f ? 0x7fffffff : x < -0x1p31f ? -0x7fffffff - 1 : int(__builtin_rintf(x));
}
inline float fabsf(float x) { return __builtin_fabsf(x); }
inline float log2f(float x) { return __builtin_log2f(x); }
inline float logf(float x) { return __builtin_logf(x); }
inline float tanhf(float x) { return __builtin_tanhf(x); }
inline float __fdividef(float x, float y) { return x / y; }
inline float max(float x, float y) { return __builtin_fmaxf(x, y); }
inline float min(float x, float y) { return __builtin_fminf(x, y); }
template <class A, class B>
constexpr auto max(A a, B b) -> decltype(a + b) {
    using Common = decltype(a + b);
    return Common(a) < Common(b) ? Common(b) : Common(a);
}
template <class A, class B>
constexpr auto min(A a, B b) -> decltype(a + b) {
    using Common = decltype(a + b);
    return Common(b) < Common(a) ? Common(b) : Common(a);
}

// Byte i of the result is the byte of y:x that the i-th half byte of the selector names.
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
    const unsigned long long both = (unsigned long long)y << 32 | x;
    unsigned result = 0;
    for (int i = 0; i < 4; ++i) {
        const unsigned which = selector >> 4 * i & 15;
        unsigned byte = unsigned(both >> 8 * (which & 7)) & 0xff;
        if (which & 8) byte = byte & 0x80 ? 0xff : 0;
        result |= byte << 8 * i;
    }
    return result;
}

template <class T>
inline T __ldg(const T* from) { return *from; }
template <class T>
inline T atomicAdd(T* to, T value) {
    if constexpr (sizeof(T) == 4 && T(0.5f) == T(0)) {
        return __atomic_fetch_add(to, value, __ATOMIC_SEQ_CST);
    } else {
        const T before = *to;
        *to = before + value;
        return before;
    }
}
template <class T>
inline T atomicMax(T* to, T value) {
    const T before = *to;
    if (before < value) *to = value;
    return before;
}
inline void __threadfence() {}

inline unsigned long long __cvta_generic_to_global(const void* pointer) { return (unsigned long long)pointer; }
inline unsigned __cvta_generic_to_shared(const void* pointer) {
    const unsigned long long offset = static_cast<const char*>(pointer) - emulator::self->shared;
    if (offset > emulator::self->shared_bytes) emulator::fail("the address of %p, which is not in dynamic shared memory", pointer);
    return emulator::kSharedBase + unsigned(offset);
}

// ---- warps and CTAs

inline void check_mask(unsigned mask) {
    if (mask != 0xffffffffu) emulator::fail("a warp's function with the mask %x: the emulator knows whole warps", mask);
}
inline void __syncthreads() { emulator::sync_threads(); }
inline int __syncthreads_or(int vote) { return emulator::sync_threads_or(vote != 0); }
inline void __syncwarp(unsigned mask = 0xffffffffu) { check_mask(mask), emulator::sync_warp(); }
inline unsigned __ballot_sync(unsigned mask, int vote) { return check_mask(mask), emulator::ballot(vote != 0); }
inline int __any_sync(unsigned mask, int vote) { return check_mask(mask), emulator::ballot(vote != 0) != 0; }
template <class T>
inline T __shfl_sync(unsigned mask, T value, int lane) {
    check_mask(mask);
    return bits_as<T>(emulator::shuffle(bits_as<unsigned>(value), unsigned(lane) % 32));
}
template <class T>
inline T __shfl_xor_sync(unsigned mask, T value, int lanes) {
    check_mask(mask);
    return bits_as<T>(emulator::shuffle(bits_as<unsigned>(value), emulator::self->lane ^ unsigned(lanes)));
}
