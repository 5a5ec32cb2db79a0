// Instructions for 8-bit numbers: bytes moved within registers, and conversions to and from fp16
// and fp32 (PTX ISA, "prmt", "cvt", "cvt.pack", "redux"). device/eight.cuh builds conversions of
// all formats from them. This file knows kArch but no format and no tensor.

#include "device/types.cuh"

// Nibble i of the selector names the byte of (a, b) that becomes byte i: 0-3 of a, 4-7 of b.
__device__ __forceinline__ uint32 permute_bytes(uint32 a, uint32 b, uint32 selector) {
    uint32 bytes;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(bytes) : "r"(a), "r"(b), "r"(selector));
    return bytes;
}

// Whether there are instructions for fp8.
constexpr bool kConvertsFp8 = kArch >= 89;

// Two e4m3 numbers as fp16. NaN stays NaN.
__device__ __forceinline__ uint32 e4m3_to_fp16(uint16 pair) {
    uint32 wide = 0;
    if constexpr (kConvertsFp8) asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(wide) : "h"(pair));
    return wide;
}

// Four e4m3 numbers as two pairs of fp16, without a shift of the upper half.
__device__ __forceinline__ void e4m3_to_fp16_pairs(uint32 four, uint32& first, uint32& second) {
    if constexpr (kConvertsFp8) {
        asm("{ .reg .b16 low, high; mov.b32 {low, high}, %2; cvt.rn.f16x2.e4m3x2 %0, low; cvt.rn.f16x2.e4m3x2 %1, high; }"
            : "=r"(first), "=r"(second) : "r"(four));
    }
}

// Two fp32 numbers as e4m3 or e5m2, rounded to nearest even and clamped to the largest; `low` goes
// to the low byte. NaN stays NaN.
__device__ __forceinline__ uint16 fp32_to_e4m3(float low, float high) {
    uint16 pair = 0;
    if constexpr (kConvertsFp8) asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
    return pair;
}
__device__ __forceinline__ uint16 fp32_to_e5m2(float low, float high) {
    uint16 pair = 0;
    if constexpr (kConvertsFp8) asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
    return pair;
}

// Two integers as bytes, clamped to -128 and 127, below the low half of `upper`. `low` goes to the
// low byte.
__device__ __forceinline__ uint32 saturated_bytes(int low, int high, uint32 upper) {
    uint32 bytes;
    asm("cvt.pack.sat.s8.s32.b32 %0, %1, %2, %3;" : "=r"(bytes) : "r"(high), "r"(low), "r"(upper));
    return bytes;
}

// Products and differences of pairs of fp16.
__device__ __forceinline__ uint32 multiply_fp16_pairs(uint32 a, uint32 b) {
    uint32 product;
    asm("mul.f16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
    return product;
}
__device__ __forceinline__ uint32 subtract_fp16_pairs(uint32 a, uint32 b) {
    uint32 difference;
    asm("sub.f16x2 %0, %1, %2;" : "=r"(difference) : "r"(a), "r"(b));
    return difference;
}
// Differences of pairs of bf16, from sm_90 on.
__device__ __forceinline__ uint32 subtract_bf16_pairs(uint32 a, uint32 b) {
    uint32 difference = 0;
    if constexpr (kArch >= 90) asm("sub.bf16x2 %0, %1, %2;" : "=r"(difference) : "r"(a), "r"(b));
    return difference;
}

// Two fp32 numbers as a pair of fp16, rounded to nearest even.
__device__ __forceinline__ uint32 floats_to_fp16_pair(float low, float high) {
    uint32 pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

// The largest value of a warp's lanes.
__device__ __forceinline__ uint32 largest_of_warp(uint32 value) {
    uint32 largest;
    asm volatile("redux.sync.max.u32 %0, %1, 0xffffffff;" : "=r"(largest) : "r"(value));
    return largest;
}
