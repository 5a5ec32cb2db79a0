// Quantises rows of 16-bit elements to 8-bit numbers (kKeyFormat): one warp holds a row in fp32.
// The rules are those of src/eight.rs, and the bits are the same. kv_append_eight and quantize use
// it. It knows no tensor.
//
// A lane has kVec neighbouring columns, then as many 32 * kVec columns further on.

#include "device/eight.cuh"

constexpr int kMostCols = 512;
constexpr int kSteps = kMostCols / (32 * kVec);

constexpr float kLargest = kKeyFormat == kE4m3 ? 448.f : kKeyFormat == kE5m2 ? 57344.f : 127.f;

// As many elements as an access has.
struct __align__(kVec * 2) Elements16 { uint16 values[kVec]; };
struct __align__(kVec) Bytes8 { uint8 values[kVec]; };

// A row of at most kMostCols columns. Columns past its end are 0.
struct WarpRow {
    float x[kSteps][kVec];

    static __device__ __forceinline__ int col(int step, int lane) { return (step * 32 + lane) * kVec; }

    __device__ __forceinline__ void load(const uint16* row, int cols, int lane) {
        #pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            Elements16 loaded = {};
            if (col(step, lane) < cols) loaded = *reinterpret_cast<const Elements16*>(row + col(step, lane));
            #pragma unroll
            for (int i = 0; i < kVec; ++i) x[step][i] = unpack(loaded.values[i]);
        }
    }

    // The lane's largest magnitude. NaN does not count.
    __device__ __forceinline__ float largest() const {
        float top = 0.f;
        #pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            #pragma unroll
            for (int i = 0; i < kVec; ++i) top = fmaxf(top, fabsf(x[step][i]));
        }
        return top;
    }

    __device__ __forceinline__ void store(uint16* row, int cols, int lane) const {
        #pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            if (col(step, lane) >= cols) continue;
            Elements16 narrow;
            #pragma unroll
            for (int i = 0; i < kVec; ++i) narrow.values[i] = uint16(pack2(x[step][i], 0.f));
            *reinterpret_cast<Elements16*>(row + col(step, lane)) = narrow;
        }
    }

    // The numbers nearest to x / scale.
    __device__ __forceinline__ void store_eight(uint8* row, int cols, float scale, int lane) const;
};

// The largest value of a warp's lanes.
__device__ __forceinline__ float largest_of_lanes(float top) {
    // Bits of numbers that are not negative are ordered as the numbers are.
    return __uint_as_float(largest_of_warp(__float_as_uint(top)));
}

// The scale of numbers whose largest magnitude is `largest`.
__device__ __forceinline__ float scale_of(float largest) {
    const float finite = fminf(largest, __uint_as_float(0x7f7fffff));
    return largest >= 0x1p-100f ? finite / kLargest : 1.f;
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

// Two numbers, the first in the low byte.
__device__ __forceinline__ uint32 narrow_two(float first, float second) {
    if constexpr (kKeyFormat == kInt8) {
        const auto of = [](float x) -> uint32 { return x != x ? 0 : uint32(__float2int_rn(fminf(fmaxf(x, -127.f), 127.f))) & 0xff; };
        return of(first) | of(second) << 8;
    } else if constexpr (kKeyFormat == kE4m3) {
        if constexpr (kConvertsFp8) return fp32_to_e4m3(first, second);
        return narrow_by_bits<3, 7>(first) | narrow_by_bits<3, 7>(second) << 8;
    } else {
        if constexpr (kConvertsFp8) return fp32_to_e5m2(first, second);
        return narrow_by_bits<2, 15>(first) | narrow_by_bits<2, 15>(second) << 8;
    }
}

__device__ __forceinline__ void WarpRow::store_eight(uint8* row, int cols, float scale, int lane) const {
    const float factor = 1.f / scale;
    #pragma unroll
    for (int step = 0; step < kSteps; ++step) {
        if (col(step, lane) >= cols) continue;
        Bytes8 narrow;
        #pragma unroll
        for (int i = 0; i < kVec; i += 2) {
            const uint32 two = narrow_two(x[step][i] * factor, i + 1 < kVec ? x[step][i + 1 < kVec ? i + 1 : i] * factor : 0.f);
            narrow.values[i] = uint8(two);
            if (i + 1 < kVec) narrow.values[i + 1 < kVec ? i + 1 : i] = uint8(two >> 8);
        }
        *reinterpret_cast<Bytes8*>(row + col(step, lane)) = narrow;
    }
}
