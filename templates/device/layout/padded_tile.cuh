// Shared-memory tiles of 16-bit or fp32 elements with padded rows, and the asynchronous copies that
// fill them. The sm80 kernels, decode and backward_convert use them. It knows no mask, no pipeline
// and no sequence.
//
// A tile is [rows][stride] without a swizzle. The columns are padded to a multiple of 8, and the
// stride to an odd number of 16-byte chunks. Eight consecutive rows then start in eight different
// bank groups, so ldmatrix has no conflict. Every address is one base register plus an immediate,
// which a swizzle (layout/boxed_tile.cuh) would not allow.

#include "device/layout/round_up.cuh"
#include "device/numeric.cuh"
#include "device/ptx/compiler.cuh"
#include "device/ptx/cp_async.cuh"
#include "device/ptx/shared.cuh"

template <int kRows_, int kCols_>
struct Tile {
    static constexpr int kRows = kRows_;
    static constexpr int kCols = round_up(kCols_, 8);        // columns that hold data or zeros
    static constexpr bool kMoves = true;                       // columns are reached by `moved`
    static constexpr int kRowBytes = ((kCols * kElementBytes / 16) | 1) * 16;
    static constexpr int kStride = kRowBytes / kElementBytes;  // elements from row to row
    static constexpr int kBytes = kRows * kRowBytes;

    // The address for ldmatrix of one row of an 8 x 8 matrix of 16-bit elements: 16-byte chunk
    // `chunk` of row `row`.
    static __device__ __forceinline__ uint32 place(uint32 tile, int row, int chunk) { return tile + uint32(row * kStride + chunk * 8) * 2; }
    // Moves an address from `place` by `rows`, a multiple of 8, and by `cols`, a multiple of 16.
    static __device__ __forceinline__ uint32 moved(uint32 at, int rows, int cols) { return at + rows * kStride * 2 + cols * 2; }
    // The tile from row `row` and column `col` on.
    static __device__ __forceinline__ uint32 part(uint32 tile, int row, int col) { return tile + (row * kStride + col) * 2; }
};

// Loads rows [0, rows_left) x columns [0, cols_left) of a (rows, dim) matrix in device memory into
// a tile. The other rows and columns of the tile become zeros. All kThreads threads take part. The
// caller commits, waits and synchronises.
//
// kVec divides cols_left, so no chunk crosses the end of a row. Without kRagged either all rows
// exist or, with rows_left <= 0, none do. A load past the last block is then a predicate: a branch
// would keep ptxas from spreading the copies over the products.
template <bool kRagged, class Tile, int kVec, int kThreads>
__device__ __forceinline__ void load_tile(uint32 tile, const Element* source, int64 stride_row, int rows_left, int cols_left, int thread) {
    constexpr int kChunks = Tile::kCols / kVec;  // per row
    constexpr int kTotal = Tile::kRows * kChunks;
    // If the chunks of a row divide the threads, a thread keeps its column and steps over rows.
    constexpr bool kKeepsColumn = kThreads % kChunks == 0;
    constexpr int kRowStep = kKeepsColumn ? kThreads / kChunks : 0;
    // kRecomputeOffsets makes `thread` opaque, so offsets are computed at each load. Otherwise the
    // compiler keeps them over the products, in registers that may spill. The faster choice depends
    // on the tile, so it is a knob.
    if constexpr (kRecomputeOffsets) make_opaque(thread);
    int row = thread / kChunks, col = thread % kChunks * kVec;
    const Element* from = source + row * stride_row + col;
    #pragma unroll
    for (int i = 0; i < (kTotal + kThreads - 1) / kThreads; ++i) {
        if (!kKeepsColumn && i > 0) {
            const int index = thread + i * kThreads;
            row = index / kChunks, col = index % kChunks * kVec;
            from = source + row * stride_row + col;
        }
        if (kTotal % kThreads != 0 && thread + i * kThreads >= kTotal) break;
        const bool valid = (kRagged ? row : 0) < rows_left && col < cols_left;
        const uint32 to = tile + uint32(row * Tile::kStride + col) * kElementBytes;
        if constexpr (kVec * kElementBytes > 2) {
            // Reads nothing where `valid` is false.
            cp_async<kVec * kElementBytes>(to, from, valid);
        } else {
            // cp.async moves at least 4 bytes, so 2 bytes go by an ordinary store. The caller's
            // barrier orders the store before the readers.
            const uint16 value = valid ? *from : uint16(0);
            store_half_word(to, value);
        }
        if (kKeepsColumn) row += kRowStep, from += kRowStep * stride_row;
    }
}

// Stores rows [0, rows_left) x columns [0, cols_left) of a tile to device memory, with kThreads
// threads (a warp or a CTA).
template <int kRows, class Tile, int kVec, int kThreads>
__device__ __forceinline__ void store_tile(Element* target, int64 stride_row, uint32 tile, int rows_left, int cols_left, int thread) {
    constexpr int kChunks = Tile::kCols / kVec;
    for (int index = thread; index < kRows * kChunks; index += kThreads) {
        const int row = index / kChunks, col = index % kChunks * kVec;
        if (row >= rows_left || col >= cols_left) continue;
        const uint32 from = tile + uint32(row * Tile::kStride + col) * kElementBytes;
        Element* to = target + row * stride_row + col;
        if constexpr (kVec * kElementBytes == 16) {
            *reinterpret_cast<uint4*>(to) = load_four_words(from);
        } else if constexpr (kVec * kElementBytes == 8) {
            *reinterpret_cast<uint2*>(to) = load_two_words(from);
        } else if constexpr (kVec * kElementBytes == 4) {
            *reinterpret_cast<uint32*>(to) = load_word(from);
        } else {
            *reinterpret_cast<uint16*>(to) = load_half_word(from);
        }
    }
}

// Flips the sign of every element of the tile, padding included.
template <class Tile, int kThreads>
__device__ __forceinline__ void negate_tile(uint32 tile, int thread) {
    for (int i = thread; i < Tile::kBytes / 4; i += kThreads) negate_pair(tile + i * 4);
}

// Stores two neighbouring elements into a tile, packed or as fp32.
__device__ __forceinline__ void store_pair(uint32 to, uint32 pair) { store_word(to, pair); }
__device__ __forceinline__ void store_two(uint32 to, float first, float second) {
    if constexpr (kIsFp32) {
        store_two_floats(to, first, second);
    } else {
        store_pair(to, pack2(first, second));
    }
}
