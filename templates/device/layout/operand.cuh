// Shared-memory operands of wgmma: their descriptors, and the offsets of their k16 steps (PTX ISA,
// "matrix descriptor").
//
// An operand is boxes of 64 columns (layout/swizzle.cuh). Where its inner dimension lies along the
// columns, a product's k16 steps go through a box's columns and then on to the next box. Where it
// lies along the rows, they go down the rows. Offsets are in units of 16 bytes, as descriptors
// count.

#include "device/layout/swizzle.cuh"

// A descriptor's high word: the 128-byte swizzle; 8 rows of 128 bytes lie 1024 bytes apart.
constexpr uint32 kDescriptorHigh = (1024 / 16) | 1u << 30;
// Its low word: the address, and how far neighbouring boxes lie apart where a product reads several
// of them.
__device__ __forceinline__ uint32 descriptor_low(uint32 address, uint32 leading_bytes) {
    return (address & 0x3ffff) >> 4 | (leading_bytes / 16) << 16;
}
__device__ __forceinline__ uint64 descriptor(uint32 low) { return uint64(kDescriptorHigh) << 32 | low; }

// The k16 step of that number along the columns of boxes of kRows rows, of which kBoxSteps steps
// hold columns in use.
template <int kRows, int kBoxSteps = kBoxCols / 16>
__device__ __forceinline__ constexpr uint32 column_step(int step) {
    return step / kBoxSteps * (kRows * kBoxRowBytes / 16) + step % kBoxSteps * 2;
}
// The k16 step of that number down the rows.
__device__ __forceinline__ constexpr uint32 row_step(int step) { return step * (16 * kBoxRowBytes / 16); }
