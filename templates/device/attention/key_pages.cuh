// Where the keys of a sequence lie, and their way into shared memory: one after another in the rows
// of k and v, or in the pages that a block table names (kPageSize > 0).
//
// A page is kPageSize rows of one batch entry of k and v. Entry i of a sequence's row of the table
// names the page of the keys from i * kPageSize on. Entries and keys past the sequence's length are
// never read, except that TMA may read the rest of the last page. Only the device knows the table:
// an entry that names no page is taken for the last page, so that nothing outside of k and v is
// read.

#include "device/attention/sequence.cuh"
#include "device/ptx/cp_async.cuh"
#include "device/ptx/shared.cuh"

// What the copy of one block of kKeys keys needs of the table. It is fetched a block ahead, so that
// no copy waits for it.
template <int kKeys>
struct KeyPages {
    // Without pages, and where each block lies within one page, a block's rows are evenly apart.
    static constexpr bool kIsEven = kPageSize == 0 || kPageSize % kKeys == 0;
    static constexpr int kFetches = kIsEven ? 1 : (kKeys + 31) / 32;

    const int* table;      // of this sequence
    const int& num_pages;  // in the constant bank: a register less
    int seqlen_k;
    int pages[kFetches];   // even: the block's page; else lane l has the pages of its keys l, l + 32, …

    __device__ __forceinline__ KeyPages(const KernelParams& params, const Sequence& sequence)
        : num_pages(params.num_pages), seqlen_k(sequence.seqlen_k) {
        if constexpr (kPageSize > 0) table = params.block_table + sequence.batch * params.block_table_stride;
    }

    __device__ __forceinline__ void fetch(int block, int end_block, int lane) {
        if constexpr (kPageSize > 0) {
            #pragma unroll
            for (int i = 0; i < kFetches; ++i) {
                const int64 key = int64(block) * kKeys + (kIsEven ? 0 : i * 32 + lane);
                // A negative entry is a large one to the unsigned minimum.
                pages[i] = block < end_block && key < seqlen_k ? min(uint32(__ldg(table + uint32(key) / uint32(kPageSize))), uint32(num_pages - 1)) : 0;
            }
        }
    }

    // The page of a row of the block. All lanes of a warp call it.
    __device__ __forceinline__ int page_of(int row) const {
        if constexpr (kIsEven) return pages[0];
        int page = __shfl_sync(0xffffffff, pages[0], row % 32);
        #pragma unroll
        for (int i = 1; i < kFetches; ++i) {
            const int other = __shfl_sync(0xffffffff, pages[i], row % 32);
            if (row / 32 == i) page = other;
        }
        return page;
    }

    // Where in its page it lies.
    static __device__ __forceinline__ uint32 row_in_page(int block, int row) { return (uint32(block) * kKeys + row) % uint32(kPageSize); }

    // Elements from the head's row 0 to the block's first row, where rows are evenly apart.
    __device__ __forceinline__ int64 place(const TensorView& view, int block) const {
        const int64 key = int64(block) * kKeys;
        if constexpr (kPageSize == 0) return key * view.stride_seqlen;
        else return pages[0] * view.stride_batch + int64(uint32(key) % uint32(kPageSize)) * view.stride_seqlen;
    }

    // The same to a row of the block, where they are not. All lanes of a warp call it.
    __device__ __forceinline__ int64 place(const TensorView& view, int block, int row) const {
        return page_of(row) * view.stride_batch + int64(row_in_page(block, row)) * view.stride_seqlen;
    }
};

// kVec elements, or zeros where `valid` is false; the source is not read then. Two bytes are below
// what cp.async moves: their store is ordered by the caller's barrier.
template <int kVec>
__device__ __forceinline__ void copy_elements(uint32 to, const uint16* from, bool valid) {
    if constexpr (kVec > 1) {
        cp_async<kVec * 2>(to, from, valid);
    } else {
        const uint16 value = valid ? *from : uint16(0);
        store_half_word(to, value);
    }
}

// A block of keys into a tile, by kThreads threads in whole warps: the first keys_left rows and
// cols_left columns, zeros in the others, so that nothing past the sequence's end gets into a
// product. `source` is row 0 of the head: of the sequence, or of page 0.
template <class Tile, int kVec, int kThreads>
__device__ __forceinline__ void load_keys(uint32 tile, const uint16* source, const TensorView& view, const KeyPages<Tile::kRows>& pages, int block, int keys_left, int cols_left, int thread) {
    constexpr int kChunks = Tile::kCols / kVec;  // per row
    constexpr int kTotal = Tile::kRows * kChunks;
    constexpr bool kIsEven = KeyPages<Tile::kRows>::kIsEven;
    // Where the row's chunks divide the threads, a thread keeps its column and steps over rows.
    constexpr bool kKeepsColumn = kThreads % kChunks == 0;
    constexpr int kRowStep = kKeepsColumn ? kThreads / kChunks : 0;
    const uint16* even = source;
    if constexpr (kIsEven) even += pages.place(view, block);
    const uint16* next = even + (thread / kChunks) * view.stride_seqlen + thread % kChunks * kVec;
    // Where each row has its own page, copies are narrow and many, or each has its own column, the
    // addresses of all would not fit the registers.
    constexpr int kSteps = (kTotal + kThreads - 1) / kThreads, kUnroll = kIsEven && kKeepsColumn && kVec == 8 ? kSteps : 4;
    #pragma unroll kUnroll
    for (int i = 0; i < kSteps; ++i) {
        const int index = thread + i * kThreads, row = index / kChunks, col = index % kChunks * kVec;
        const uint16* from = next;
        if constexpr (!kIsEven) {
            from = source + pages.place(view, block, row) + col;
        } else if constexpr (kKeepsColumn) {
            next += kRowStep * view.stride_seqlen;
        } else {
            from = even + row * view.stride_seqlen + col;
        }
        if (kTotal % kThreads != 0 && index >= kTotal) break;  // in the last step alone: the lanes have met in `place`
        copy_elements<kVec>(tile + uint32(row * Tile::kStride + col) * 2, from, row < keys_left && col < cols_left);
    }
}
