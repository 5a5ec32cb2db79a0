// The 128-byte swizzle of shared memory, as TMA writes it and as wgmma and ldmatrix read it.
//
// A box is 64 columns of some rows, stored as rows of 128 bytes. The 16-byte chunk c of row r lies
// at chunk c ^ r % 8 of the row, so that eight rows of one column of chunks lie in different banks.
// A box begins at a multiple of 1024 bytes. Operands wider than 64 columns are boxes one after the
// other.

#include "device/types.cuh"

constexpr int kBoxCols = 64;
constexpr int kBoxRowBytes = 128;

// Where a chunk lies, in bytes from the start of its row. Of the row it takes row % 8 alone, which
// a caller whose rows begin at a multiple of 8 has from the lane.
__device__ __forceinline__ constexpr int swizzled(int chunk, int row_mod_8) {
    return (chunk ^ row_mod_8) * 16;
}

// Where a lane finds its row of four 8 x 8 matrices (ptx/matrix.cuh) in a box that holds an
// accumulator transposed: 16 rows of the box, and the 16 columns that belong to the lane's warp.
// The next 16 rows lie 16 * kBoxRowBytes further on.
__device__ __forceinline__ uint32 transposed_place(int warp, int lane) {
    return (lane / 16 * 8 + lane % 8) * kBoxRowBytes + swizzled(warp * 2 + lane / 8 % 2, lane % 8);
}
