// Scales of single keys between the producer and the consumers of the sm90 forward kernel: where
// they lie beside K's slot, and how V's become factors of fp16 numbers.
//
// With kFoldsScalesOfV the producer multiplies numbers of V by their key's scale, in fp16. These
// scales are divided by a power of two first, the unit, since v may be small or large throughout. A
// tile's unit rises where a block's largest scale would leave fp16's range, and O is lowered then
// (scales.cuh).

#include "device/eight.cuh"
#include "device/ptx/eight.cuh"
#include "sm90/forward/shared.cuh"

// A scale over its unit is at most this power of two, so that a product is below 2^16.
constexpr int kMostOverUnitLog2 = kKeyFormat == kE5m2 ? 0 : 6;
// The largest scale of the block for which the unit rises is lower by this power of two. So the
// unit rises again only for scales that are 16 times as large. Numbers of e5m2 need the range that
// this takes.
constexpr int kUnitRoomLog2 = kKeyFormat == kE5m2 ? 0 : 4;

// The scale of K of a block's row, in floats from the slot's scales on. A lane of the quad that
// holds the row's scores reads its own scales in order.
__device__ __forceinline__ int place_of_k_scale(int row) { return row % 8 / 2 * kScaleRow + row / 8 * 2 + row % 2; }

// The unit for a block whose largest scale of V has these bits, where the blocks before have
// `unit`, as bits too. Bits of positive numbers are ordered as the numbers are. A unit and its
// reciprocal are normal numbers. Before the first scale above 0 the unit is 0.
__device__ __forceinline__ uint32 raised_unit(uint32 unit, uint32 largest) {
    if (__uint_as_float(largest) <= __uint_as_float(unit) * (1 << kMostOverUnitLog2)) return unit;
    const int exponent = int(largest >> 23) + 1 + kUnitRoomLog2 - kMostOverUnitLog2;
    return uint32(min(max(exponent, 1), 252)) << 23;
}
__device__ __forceinline__ float inverse_of_unit(uint32 unit) { return __uint_as_float((254u << 23) - unit); }

// Multiplies eight numbers by a pair of one factor.
__device__ __forceinline__ void multiply_numbers(uint4& numbers, uint32 factor) {
    numbers.x = multiply_fp16_pairs(numbers.x, factor), numbers.y = multiply_fp16_pairs(numbers.y, factor);
    numbers.z = multiply_fp16_pairs(numbers.z, factor), numbers.w = multiply_fp16_pairs(numbers.w, factor);
}
