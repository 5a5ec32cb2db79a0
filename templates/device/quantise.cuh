// The rules by which 16-bit elements become 8-bit numbers (kKeyFormat): the scale of a largest
// magnitude, and the number nearest to a quotient. They are those of src/eight.rs, and the bits are
// the same. kv_append_eight and quantize use them. It knows no row and no tensor.

#include "device/eight.cuh"

constexpr int kMostCols = 512;

constexpr float kLargest = kKeyFormat == kE4m3 ? 448.f : kKeyFormat == kE5m2 ? 57344.f : 127.f;

// The largest value of a warp's lanes.
__device__ __forceinline__ float largest_of_lanes(float top) {
    // Bits of numbers that are not negative are ordered as the numbers are.
    return __uint_as_float(largest_of_warp(__float_as_uint(top)));
}

// Smaller largest magnitudes have the scale 1.
constexpr float kLeastMagnitude = 0x1p-100f;

// The scale of numbers whose largest magnitude is `largest`.
__device__ __forceinline__ float scale_of(float largest) {
    const float finite = fminf(largest, __uint_as_float(0x7f7fffff));
    return largest >= kLeastMagnitude ? finite / kLargest : 1.f;
}

// A float of kMantissa bits and a bias, by integer operations.
template <int kMantissa, int kBias>
__device__ __forceinline__ uint32 narrow_by_bits(float x) {
    const uint32 sign = __float_as_uint(x) >> 24 & 0x80;
    if (x != x) return 0x7f;
    const float magnitude = fminf(fabsf(x), kLargest);
    constexpr uint32 kNormal = uint32(127 + 1 - kBias) << 23, kDropped = 23 - kMantissa;
    const uint32 bits = __float_as_uint(magnitude);
    if (bits < kNormal) {
        // Adding a number whose last bit is the smallest denormal rounds to it.
        const float anchor = __uint_as_float(uint32(127 + 1 - kBias + 23 - kMantissa) << 23);
        return sign | (__float_as_uint(magnitude + anchor) - __float_as_uint(anchor));
    }
    return sign | ((bits + (1u << (kDropped - 1)) - 1 + (bits >> kDropped & 1)) >> kDropped) - (uint32(127 - kBias) << kMantissa);
}

// The nearest integer, -127 or above. NaN becomes 0.
__device__ __forceinline__ int narrow_to_int(float x) { return max(__float2int_rn(x), -127); }

// Two numbers, the first in the low byte.
__device__ __forceinline__ uint32 narrow_two(float first, float second) {
    if constexpr (kKeyFormat == kInt8) {
        return saturated_bytes(narrow_to_int(first), narrow_to_int(second), 0);
    } else if constexpr (kKeyFormat == kE4m3) {
        if constexpr (kConvertsFp8) return fp32_to_e4m3(first, second);
        return narrow_by_bits<3, 7>(first) | narrow_by_bits<3, 7>(second) << 8;
    } else {
        if constexpr (kConvertsFp8) return fp32_to_e5m2(first, second);
        return narrow_by_bits<2, 15>(first) | narrow_by_bits<2, 15>(second) << 8;
    }
}

// Four numbers, the first in the low byte.
__device__ __forceinline__ uint32 narrow_four(const float (&x)[4]) {
    if constexpr (kKeyFormat == kInt8) {
        return saturated_bytes(narrow_to_int(x[0]), narrow_to_int(x[1]), narrow_two(x[2], x[3]));
    } else {
        return narrow_two(x[0], x[1]) | narrow_two(x[2], x[3]) << 16;
    }
}
