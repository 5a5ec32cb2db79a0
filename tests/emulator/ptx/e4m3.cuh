// Stands in for device/ptx/e4m3.cuh.

#include "device/types.cuh"

// Rounds to nearest even. Values past 448 become 448, and NaN becomes 0x7f.
__device__ __forceinline__ uint32 rounded_e4m3(float x) {
    const uint32 sign = __float_as_uint(x) >> 24 & 0x80;
    if (x != x) return 0x7f;
    const float size = fminf(fabsf(x), 448.f);
    // Steps of 2^-9 up to 2^-6, then eight steps between neighbouring powers of two.
    int exponent;
    __builtin_frexpf(size, &exponent);
    const int step = size == 0.f || exponent < -5 ? -9 : exponent - 4;
    const float steps = __builtin_rintf(__builtin_ldexpf(size, -step));
    // Eight steps from 2^-6 on are the exponent field 1, whose mantissa is 0.
    const uint32 low = uint32(steps) + uint32(step + 9) * 8;
    return sign | low;
}
__device__ __forceinline__ uint32 pack4_e4m3(float a, float b, float c, float d) {
    return rounded_e4m3(a) | rounded_e4m3(b) << 8 | rounded_e4m3(c) << 16 | rounded_e4m3(d) << 24;
}
