// Stands in for device/ptx/math.cuh. The approximations are exact to fp32's rounding, so
// they show no error of the special function unit.

#include "device/types.cuh"

__device__ __forceinline__ uint32 pack2(float low, float high) {
    if constexpr (kIsBf16) {
        const auto rounded = [](float x) -> uint32 {
            const uint32 bits = __float_as_uint(x);
            if (x != x) return 0x7fff;  // the NaN of cvt.rn.bf16x2
            return bits + 0x7fff + (bits >> 16 & 1) >> 16;
        };
        return rounded(low) | rounded(high) << 16;
    } else {
        return bits_as<uint16>(static_cast<_Float16>(low)) | uint32(bits_as<uint16>(static_cast<_Float16>(high))) << 16;
    }
}

__device__ __forceinline__ float fp16_to_float(uint16 value) { return static_cast<float>(bits_as<_Float16>(value)); }

// Subnormal inputs and results count as 0.
__device__ __forceinline__ float flushed(float x) { return fabsf(x) < 0x1p-126f ? x * 0.f : x; }
__device__ __forceinline__ float exp2_approx(float x) { return flushed(__builtin_exp2f(flushed(x))); }
__device__ __forceinline__ float log2_of_sfu(float x) { return __builtin_log2f(x); }
