// Conversions and approximations, one instruction each (PTX ISA, "cvt", "ex2", "lg2"). numeric.cuh
// chooses between them and exact functions. This file knows kIsBf16 but no tensor.

#include "device/types.cuh"

// Packs two fp32 values into a pair of 16-bit elements, rounded to nearest even. `low` goes to the
// low half.
__device__ __forceinline__ uint32 pack2(float low, float high) {
    uint32 pair;
    if constexpr (kIsBf16) {
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    } else {
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    }
    return pair;
}

__device__ __forceinline__ float fp16_to_float(uint16 value) {
    float wide;
    asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(value));
    return wide;
}

// 2^x by the special function unit, within 2 ulp. -inf gives 0, and NaN gives NaN.
__device__ __forceinline__ float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// The binary logarithm by the special function unit, within 4 ulp.
__device__ __forceinline__ float log2_of_sfu(float x) {
    float y;
    asm("lg2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
