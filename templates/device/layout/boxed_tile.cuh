// Tiles of keys that TMA fills, for decode with the sm80 products: addresses for ldmatrix, and the
// copies. It knows tensor maps and key pages but no product and no schedule.
//
// A tile is boxes of 64 columns side by side, each [rows][128 bytes] in the 128-byte swizzle
// (layout/swizzle.cuh), so ldmatrix has no bank conflict. Columns past the head dim hold zeros. A
// tile lives in a slot of the caller's ring, until all warps that read it have met.

#include "device/attention/key_pages.cuh"
#include "device/layout/padded_tile.cuh"
#include "device/layout/tensor_map.cuh"
#include "device/ptx/shared.cuh"

template <int kRows_, int kCols_>
struct BoxedTile {
    static constexpr int kRows = kRows_;
    static constexpr int kCols = round_up(kCols_, 8);
    static constexpr int kBoxes = (kCols + kBoxCols - 1) / kBoxCols;
    static constexpr int kBoxBytes = kRows * kBoxRowBytes;
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

// Rows of one box: all keys of a tile, or the part of them that lies in one page.
template <int kKeys>
constexpr int kKeyBoxRows = kPageSize == 0 || kPageSize > kKeys ? kKeys : kPageSize;

// Loads a block of keys into a tile. A whole warp calls it, and the thread with `issues` starts the
// copies. `barrier` counts the bytes. Keys past the sequence's end arrive as zeros. A box in a page
// always arrives whole, with that page's rows.
template <class Tile>
__device__ __forceinline__ void load_key_boxes(uint32 tile, const TensorMap& map, uint32 barrier, const KeyPages<Tile::kRows>& pages, int block, int head, const MapRows& rows, bool issues) {
    if constexpr (kPageSize == 0) {
        if (!issues) return;
        #pragma unroll
        for (int box = 0; box < Tile::kBoxes; ++box) tma_load(tile + box * Tile::kBoxBytes, map, barrier, box * kBoxCols, block * Tile::kRows, head, rows);
    } else {
        constexpr int kRows = kKeyBoxRows<Tile::kRows>;
        static_assert(kRows % 8 == 0 && Tile::kRows % kRows == 0 && kPageSize % kRows == 0, "a box lies in one page and begins where the swizzle's pattern does");
        #pragma unroll
        for (int row = 0; row < Tile::kRows; row += kRows) {
            const int page = pages.page_of(row);
            if (!issues) continue;
            #pragma unroll
            for (int box = 0; box < Tile::kBoxes; ++box) {
                // Past the sequence's end the box starts behind the page's last row, so nothing is
                // read.
                const int first = block * Tile::kRows + row < pages.seqlen_k ? pages.row_in_page(block, row) : kPageSize;
                tma_load_4d(tile + box * Tile::kBoxBytes + row * kBoxRowBytes, map, barrier, box * kBoxCols, first, head, page);
            }
        }
    }
}

// Writes zeros to the rows of a tile from `first` on, with kThreads threads.
template <class Tile, int kThreads>
__device__ __forceinline__ void clear_rows(uint32 tile, int first, int thread) {
    for (int index = first * 8 + thread; index < Tile::kRows * 8; index += kThreads) {
        #pragma unroll
        for (int box = 0; box < Tile::kBoxes; ++box) {
            store_zeros(tile + box * Tile::kBoxBytes + index * 16);
        }
    }
}
