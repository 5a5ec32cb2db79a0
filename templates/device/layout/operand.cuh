// Shared-memory operands of wgmma: descriptors, and the offsets of k16 steps (PTX ISA, "matrix
// descriptor"). It knows boxes but no product's shape.
//
// An operand is boxes of 64 columns in the 128-byte swizzle (layout/swizzle.cuh). If the inner
// dimension lies along the columns, the k16 steps of a product go through the columns of a box and
// then to the next box. If it lies along the rows, they go down the rows. Offsets count 16 bytes,
// as in descriptors.

#include "device/layout/swizzle.cuh"

// The high word of a descriptor: the 128-byte swizzle, and 1024 bytes from one group of 8 rows of
// 128 bytes to the next.
constexpr uint32 kDescriptorHigh = (1024 / 16) | 1u << 30;
// The low word of a descriptor: the address, and the distance between neighbouring boxes for a
// product that reads several of them.
__device__ __forceinline__ uint32 descriptor_low(uint32 address, uint32 leading_bytes) {
    return (address & 0x3ffff) >> 4 | (leading_bytes / 16) << 16;
}
__device__ __forceinline__ uint64 descriptor(uint32 low) { return uint64(kDescriptorHigh) << 32 | low; }

// The offset of k16 step `step` along the columns. Boxes have kRows rows, and kBoxSteps steps of
// each box hold columns in use.
template <int kRows, int kBoxSteps = kBoxCols / 16>
__device__ __forceinline__ constexpr uint32 column_step(int step) {
    return step / kBoxSteps * (kRows * kBoxRowBytes / 16) + step % kBoxSteps * 2;
}
// The offset of k16 step `step` down the rows.
__device__ __forceinline__ constexpr uint32 row_step(int step) { return step * (16 * kBoxRowBytes / 16); }

// The operands of kSteps k16 steps down the rows, and of those along the columns from kBegin on.
template <int kSteps>
struct RowSteps {
    uint64 of[kSteps];

    __device__ __forceinline__ explicit RowSteps(uint32 low) {
        #pragma unroll
        for (int step = 0; step < kSteps; ++step) of[step] = descriptor(low + row_step(step));
    }
};
template <int kRows, int kSteps, int kBegin = 0>
struct ColumnSteps {
    uint64 of[kSteps];

    __device__ __forceinline__ explicit ColumnSteps(uint32 low) {
        #pragma unroll
        for (int step = 0; step < kSteps; ++step) of[step] = descriptor(low + column_step<kRows>(kBegin + step));
    }
};
