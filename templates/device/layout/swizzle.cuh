// The 128-byte swizzle of shared memory, as TMA writes it and as wgmma and ldmatrix read it. Every
// boxed layout uses this file. It knows boxes but no tensor.
//
// A box is 64 columns of some rows, stored as rows of 128 bytes. The 16-byte chunk c of row r lies
// at chunk c ^ r % 8 of the row, so one chunk column of eight rows lies in different banks. A box
// begins at a multiple of 1024 bytes. Operands wider than 64 columns are boxes one after the other.

#include "device/types.cuh"

constexpr int kBoxCols = 64;
constexpr int kBoxRowBytes = 128;

// The place of a chunk, in bytes from the start of its row. It takes row % 8 alone, so a caller
// whose rows begin at a multiple of 8 can compute it from the lane.
__device__ __forceinline__ constexpr int swizzled(int chunk, int row_mod_8) {
    return (chunk ^ row_mod_8) * 16;
}

// The place of a lane's row of four 8 x 8 matrices (ptx/matrix.cuh), in a box that holds an
// accumulator transposed. The matrices cover 16 rows of the box and the 16 columns of the lane's
// warp. The next 16 rows lie 16 * kBoxRowBytes further on.
__device__ __forceinline__ uint32 transposed_place(int warp, int lane) {
    return (lane / 16 * 8 + lane % 8) * kBoxRowBytes + swizzled(warp * 2 + lane / 8 % 2, lane % 8);
}
