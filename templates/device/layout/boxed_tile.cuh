// Tiles that TMA fills, for kernels with the sm80 products: addresses for ldmatrix. It knows no
// copy, no product and no schedule.
//
// A tile is boxes of 64 columns side by side, each [rows][128 bytes] in the 128-byte swizzle
// (layout/swizzle.cuh), so ldmatrix has no bank conflict. Columns past the head dim hold zeros. A
// tile lives in a slot of the caller's ring, until all warps that read it have met.

#include "device/layout/round_up.cuh"
#include "device/layout/swizzle.cuh"

template <int kRows_, int kCols_>
struct BoxedTile {
    static constexpr int kRows = kRows_;
    static constexpr int kCols = round_up(kCols_, 8);
    static constexpr int kBoxes = (kCols + kBoxCols - 1) / kBoxCols;
    static constexpr int kBoxBytes = kRows * kBoxRowBytes;
    static constexpr bool kMoves = true;  // columns are reached by `moved`
    static constexpr int kBytes = kBoxes * kBoxBytes;
    static_assert(kRows % 8 == 0, "boxes begin where the swizzle's pattern does");

    // As Tile::place and Tile::moved (layout/padded_tile.cuh). The swizzle changes bits of the
    // chunk number alone, so `moved` applies constant columns by an xor.
    static __device__ __forceinline__ uint32 place(uint32 tile, int row, int chunk) {
        return tile + uint32(row * kBoxRowBytes + swizzled(chunk % 8, row % 8) + chunk / 8 * kBoxBytes);
    }
    static __device__ __forceinline__ uint32 moved(uint32 at, int rows, int cols) {
        return (at ^ uint32(cols % kBoxCols * 2)) + rows * kBoxRowBytes + cols / kBoxCols * kBoxBytes;
    }
    // The tile from row `row`, a multiple of 8, and from the first column `col` of a box.
    static __device__ __forceinline__ uint32 part(uint32 tile, int row, int col) { return tile + row * kBoxRowBytes + col / kBoxCols * kBoxBytes; }
};
