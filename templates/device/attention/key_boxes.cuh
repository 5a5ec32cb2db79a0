// Copies of a block of keys into a tile of boxes by TMA: from a tensor's rows, or from pages that
// hold whole boxes. The sm90 forward kernel and, from sm_90 on, the decode kernel use it. It knows
// no ring and no pipeline.

#include "device/attention/key_pages.cuh"
#include "device/layout/boxed_tile.cuh"
#include "device/layout/tensor_map.cuh"
#include "device/ptx/shared.cuh"

__device__ __forceinline__ constexpr int greatest_common_divisor(int a, int b) { return b == 0 ? a : greatest_common_divisor(b, a % b); }

// Rows of a box: all keys of a block, or the most that divide a block and a page. Pages are copied
// by boxes only if these are multiples of 8 rows, after which the swizzle's pattern repeats.
constexpr int kKeyBoxRows = kPageSize == 0 ? kBlockN : greatest_common_divisor(kBlockN, kPageSize);

// A block of keys into a tile. A whole warp calls it, and the thread with `issues` starts the
// copies. `first_col` is the tile's. Keys past the sequence's end arrive as zeros, except that a
// box in a page arrives whole.
template <class Tile, class Pages>
__device__ __forceinline__ void load_boxes(uint32 tile, const TensorMap& map, uint32 barrier, const Pages& pages,
                                           int block, int head, const MapRows& rows, bool issues, int first_col = 0) {
    if constexpr (kPageSize == 0) {
        if (!issues) return;
        #pragma unroll
        for (int box = 0; box < Tile::kBoxes; ++box) {
            tma_load(tile + box * Tile::kBoxBytes, map, barrier, first_col + box * kBoxCols, block * kBlockN, head, rows);
        }
    } else {
        #pragma unroll
        for (int row = 0; row < kBlockN; row += kKeyBoxRows) {
            const int page = pages.page_of(row);
            if (!issues) continue;
            #pragma unroll
            for (int box = 0; box < Tile::kBoxes; ++box) {
                // A box of keys that do not exist begins behind the page's last row: no row is
                // read.
                const int first = block * kBlockN + row < pages.seqlen_k ? pages.row_in_page(block, row) : kPageSize;
                tma_load_4d(tile + box * Tile::kBoxBytes + row * kBoxRowBytes, map, barrier, first_col + box * kBoxCols, first, head, page);
            }
        }
    }
}

// Writes zeros to a tile's rows from `first` on, by kThreads threads. A weight of 0 cancels
// whatever a page holds behind the last key, except NaN and inf.
template <class Tile, int kThreads>
__device__ __forceinline__ void clear_rows(uint32 tile, int first, int thread) {
    for (int index = first * 8 + thread; index < Tile::kRows * 8; index += kThreads) {
        #pragma unroll
        for (int box = 0; box < Tile::kBoxes; ++box) store_zeros(tile + box * Tile::kBoxBytes + index * 16);
    }
}
