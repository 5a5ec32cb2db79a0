// Stands in for device/ptx/eight.cuh.

#include "device/types.cuh"

__device__ __forceinline__ uint32 permute_bytes(uint32 a, uint32 b, uint32 selector) {
    const uint64 all = uint64(b) << 32 | a;
    uint32 bytes = 0;
    for (int i = 0; i < 4; ++i) bytes |= uint32(all >> (selector >> (4 * i) & 7) * 8 & 0xff) << 8 * i;
    return bytes;
}

constexpr bool kConvertsFp8 = kArch >= 89;

__device__ __forceinline__ uint32 fp16_bits(float x) { return bits_as<uint16>(static_cast<_Float16>(x)); }

__device__ __forceinline__ uint32 e4m3_to_fp16(uint16 pair) {
    const auto wide = [](uint32 byte) -> uint32 {
        if ((byte & 0x7f) == 0x7f) return 0x7fff;
        const float magnitude = static_cast<float>(bits_as<_Float16>(uint16((byte & 0x7f) << 7))) * 256.f;
        return fp16_bits(magnitude) | (byte & 0x80) << 8;
    };
    return wide(pair & 0xff) | wide(pair >> 8) << 16;
}

__device__ __forceinline__ void e4m3_to_fp16_pairs(uint32 four, uint32& first, uint32& second) {
    first = e4m3_to_fp16(uint16(four)), second = e4m3_to_fp16(uint16(four >> 16));
}

// Rounds by fp32's own rounding: a sum with a large number loses the bits that the format lacks.
__device__ __forceinline__ uint32 narrow_float(float x, int mantissa, int bias, float largest) {
    const uint32 sign = __float_as_uint(x) >> 24 & 0x80;
    if (x != x) return 0x7f;
    float magnitude = fabsf(x);
    if (magnitude > largest) magnitude = largest;
    int exponent = int(__float_as_uint(magnitude) >> 23) - 127;
    if (exponent < 1 - bias) exponent = 1 - bias;
    const float anchor = __uint_as_float(uint32(exponent + 23 - mantissa + 127) << 23) * 1.5f;
    volatile float sum = magnitude + anchor;
    const float rounded = sum - anchor;
    const uint32 bits = __float_as_uint(rounded);
    const int top = int(bits >> 23) - 127;
    if (rounded == 0.f) return sign;
    if (top < 1 - bias) return sign | uint32(rounded / __uint_as_float(uint32(1 - bias - mantissa + 127) << 23));
    return sign | uint32(top + bias) << mantissa | (bits >> (23 - mantissa) & ((1u << mantissa) - 1));
}
__device__ __forceinline__ uint16 fp32_to_e4m3(float low, float high) {
    return uint16(narrow_float(low, 3, 7, 448.f) | narrow_float(high, 3, 7, 448.f) << 8);
}
__device__ __forceinline__ uint16 fp32_to_e5m2(float low, float high) {
    return uint16(narrow_float(low, 2, 15, 57344.f) | narrow_float(high, 2, 15, 57344.f) << 8);
}

__device__ __forceinline__ uint32 saturated_bytes(int low, int high, uint32 upper) {
    const auto byte = [](int x) -> uint32 { return uint32(x < -128 ? -128 : x > 127 ? 127 : x) & 0xff; };
    return upper << 16 | byte(high) << 8 | byte(low);
}

__device__ __forceinline__ uint32 floats_to_fp16_pair(float low, float high) { return fp16_bits(low) | fp16_bits(high) << 16; }
__device__ __forceinline__ void fp16_pair_to_floats(uint32 pair, float& low, float& high) {
    low = static_cast<float>(bits_as<_Float16>(uint16(pair))), high = static_cast<float>(bits_as<_Float16>(uint16(pair >> 16)));
}
__device__ __forceinline__ uint32 multiply_fp16_pairs(uint32 a, uint32 b) {
    float x[2], y[2];
    fp16_pair_to_floats(a, x[0], x[1]), fp16_pair_to_floats(b, y[0], y[1]);
    return fp16_bits(x[0] * y[0]) | fp16_bits(x[1] * y[1]) << 16;
}
__device__ __forceinline__ uint32 subtract_fp16_pairs(uint32 a, uint32 b) {
    float x[2], y[2];
    fp16_pair_to_floats(a, x[0], x[1]), fp16_pair_to_floats(b, y[0], y[1]);
    return fp16_bits(x[0] - y[0]) | fp16_bits(x[1] - y[1]) << 16;
}
// bf16 is the upper half of fp32; differences that bf16 does not hold are cut.
__device__ __forceinline__ uint32 subtract_bf16_pairs(uint32 a, uint32 b) {
    const float low = __uint_as_float(a << 16) - __uint_as_float(b << 16);
    const float high = __uint_as_float(a & 0xffff0000) - __uint_as_float(b & 0xffff0000);
    return __float_as_uint(low) >> 16 | (__float_as_uint(high) & 0xffff0000);
}

__device__ __forceinline__ uint32 largest_of_warp(uint32 value) {
    for (int step = 16; step > 0; step /= 2) {
        const uint32 other = __shfl_xor_sync(0xffffffff, value, step);
        if (other > value) value = other;
    }
    return value;
}
