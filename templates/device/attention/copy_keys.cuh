// Copies of a block of keys into a tile of padded rows by threads: from evenly spaced rows, or from
// pages of any size. The sm80 and decode kernels use it. It knows no ring and no pipeline.

#include "device/attention/key_pages.cuh"
#include "device/layout/copy_elements.cuh"
#include "device/layout/padded_tile.cuh"

// A block of keys into a tile, by kThreads threads in whole warps. The first keys_left rows and
// cols_left columns are copied and the others zeroed, so that nothing past the sequence's end gets
// into a product. `source` is the head's row 0, of the sequence or of page 0. The caller commits.
template <class Tile, int kThreads, class Pages>
__device__ __forceinline__ void copy_keys(uint32 tile, const Element* source, const TensorView& view,
                                          const Pages& pages, int block, int keys_left, int cols_left, int thread) {
    constexpr int kChunks = Tile::kCols / kVec;  // per row
    constexpr int kTotal = kBlockN * kChunks;
    constexpr bool kIsEven = Pages::kIsEven;
    // Where a row's chunks divide the threads, a thread keeps its column and steps over rows.
    constexpr bool kKeepsColumn = kThreads % kChunks == 0;
    constexpr int kRowStep = kKeepsColumn ? kThreads / kChunks : 0;
    const Element* even = source;
    if constexpr (kIsEven) even += pages.place(view, block);
    const Element* next = even + (thread / kChunks) * view.stride_seqlen + thread % kChunks * kVec;
    // The addresses of all copies do not fit the registers where each row has its own page, copies
    // are narrow, or each copy has its own column.
    constexpr int kSteps = (kTotal + kThreads - 1) / kThreads;
    constexpr int kUnroll = kIsEven && kKeepsColumn && kVec == 8 ? kSteps : 4;
    #pragma unroll kUnroll
    for (int i = 0; i < kSteps; ++i) {
        const int index = thread + i * kThreads, row = index / kChunks, col = index % kChunks * kVec;
        const Element* from = next;
        if constexpr (!kIsEven) {
            from = source + pages.place(view, block, row) + col;
        } else if constexpr (kKeepsColumn) {
            next += kRowStep * view.stride_seqlen;
        } else {
            from = even + row * view.stride_seqlen + col;
        }
        // Only the last step ends early, behind `place`, which all lanes of a warp call.
        if (kTotal % kThreads != 0 && index >= kTotal) break;
        copy_elements<kVec>(tile + uint32(row * Tile::kStride + col) * kElementBytes, from, row < keys_left && col < cols_left);
    }
}
