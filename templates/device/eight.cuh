// 8-bit numbers of k and v (kKeyFormat) as fp16 and as q's 16-bit type. All conversions are exact:
// fp16 and bf16 have each number of the formats. src/eight.rs has the formats.

#include "device/key_formats.cuh"
#include "device/numeric.cuh"
#include "device/ptx/eight.cuh"

// Four numbers as two pairs of fp16: the bytes 0 and 1, then 2 and 3; crossed 0 and 2, then 1 and
// 3.
template <bool kIsCrossed>
__device__ __forceinline__ void eight_to_fp16(uint32 four, uint32& first, uint32& second) {
    // Selectors that put a byte into the upper half of each 16 bits, above zeros.
    constexpr uint32 kFirst = kIsCrossed ? 0x2404 : 0x1404, kSecond = kIsCrossed ? 0x3414 : 0x3424;
    if constexpr (kKeyFormat == kE4m3 && kConvertsFp8) {
        if constexpr (kIsCrossed) four = permute_bytes(four, 0, 0x3120);
        first = e4m3_to_fp16(uint16(four)), second = e4m3_to_fp16(uint16(four >> 16));
    } else if constexpr (kKeyFormat == kE4m3) {
        first = permute_bytes(four, 0, kFirst), second = permute_bytes(four, 0, kSecond);
        // One bit lower, exponent and mantissa are those of an fp16 number that is 2^8 times too
        // small, denormals included.
        constexpr uint32 kFactor = 0x5c005c00;  // 2^8
        first = multiply_fp16_pairs((first >> 1 & 0x3f803f80) | (first & 0x80008000), kFactor);
        second = multiply_fp16_pairs((second >> 1 & 0x3f803f80) | (second & 0x80008000), kFactor);
        if (((four & 0x7f7f7f7f) + 0x01010101) & 0x80808080) {
            // NaN is the number of largest magnitude, 480 by the rule above.
            if ((first & 0x7fff) == 0x5f80) first |= 0x7fff;
            if ((first & 0x7fff0000) == 0x5f800000) first |= 0x7fff0000;
            if ((second & 0x7fff) == 0x5f80) second |= 0x7fff;
            if ((second & 0x7fff0000) == 0x5f800000) second |= 0x7fff0000;
        }
    } else if constexpr (kKeyFormat == kE5m2) {
        first = permute_bytes(four, 0, kFirst), second = permute_bytes(four, 0, kSecond);
    } else {
        // The bits of 1024 + 128 + x.
        constexpr uint32 kAbove = 0x64646464, kMiddle = 0x64806480;
        four ^= 0x80808080;
        first = subtract_fp16_pairs(permute_bytes(four, kAbove, kIsCrossed ? 0x4240 : 0x4140), kMiddle);
        second = subtract_fp16_pairs(permute_bytes(four, kAbove, kIsCrossed ? 0x4341 : 0x4342), kMiddle);
    }
}

// The same, where the upper half needs no shift.
template <bool kIsCrossed>
__device__ __forceinline__ void eight_to_fp16_pairs(uint32 four, uint32& first, uint32& second) {
    if constexpr (kKeyFormat == kE4m3 && kConvertsFp8) {
        if constexpr (kIsCrossed) four = permute_bytes(four, 0, 0x3120);
        e4m3_to_fp16_pairs(four, first, second);
    } else {
        eight_to_fp16<kIsCrossed>(four, first, second);
    }
}

// Four numbers as two pairs of q's type: the bytes 0 and 1, then 2 and 3.
__device__ __forceinline__ void eight_to_elements(uint32 four, uint32& first, uint32& second) {
    if constexpr (kIsBf16 && kKeyFormat == kInt8) {
        // The bits of 128 + the number's low seven bits, less those of 128 or, where the number is
        // negative, of 256.
        constexpr uint32 kAbove = 0x43434343, kLowBits = 0x437f437f, kSign = 0x43804380;
        first = permute_bytes(four, kAbove, 0x4140), second = permute_bytes(four, kAbove, 0x4342);
        first = subtract_bf16_pairs(first & kLowBits, first & kSign);
        second = subtract_bf16_pairs(second & kLowBits, second & kSign);
        return;
    }
    eight_to_fp16_pairs<false>(four, first, second);
    if constexpr (kIsBf16) {
        first = pack2(fp16_to_float(uint16(first)), fp16_to_float(uint16(first >> 16)));
        second = pack2(fp16_to_float(uint16(second)), fp16_to_float(uint16(second >> 16)));
    }
}
