// The places of a sequence's keys in device memory. Keys lie one after another in the rows of k and
// v, or in the pages of a block table (kPageSize > 0). It knows neither masks, copies nor
// pipelines.
//
// A page is kPageSize rows of one batch entry of k and v. Entry i of a sequence's row of the table
// names the page of the keys from i * kPageSize on. Entries and keys past the sequence's length are
// never read, except that TMA may read the rest of the last page. Only the device knows the table.
// An entry that names no page is read as the last page, so no access leaves k and v.

#include "device/attention/sequence.cuh"

// Keys of a page, as a divisor: 1 without pages, where the quotient is not in use.
constexpr uint32 kPageKeys = kPageSize > 0 ? kPageSize : 1;

// Elements from a tensor's start to a head's row 0: of the sequence or, with pages, of page 0.
__device__ __forceinline__ int64 place_of_keys(const KernelParams& params, const TensorView& view, const Sequence& sequence, int head_kv) {
    if constexpr (kPageSize > 0) return head_kv * view.stride_head;
    return sequence.place_k(params, view, head_kv);
}

// The page of a key; 0 without pages.
__device__ __forceinline__ uint32 page_of_key(const KernelParams& params, const Sequence& sequence, int key) {
    if constexpr (kPageSize == 0) return 0;
    const int entry = params.block_table[sequence.batch * params.block_table_stride + uint32(key) / kPageKeys];
    // An entry that names no page stands for the last page.
    return min(uint32(entry), uint32(params.num_pages - 1));
}
// Elements from the head's row 0 to a key of the sequence. Copies of blocks use KeyPages instead.
__device__ __forceinline__ int64 place_in_page(const TensorView& view, int key, uint32 page) {
    if constexpr (kPageSize == 0) return key * view.stride_seqlen;
    return page * view.stride_batch + uint32(key) % kPageKeys * view.stride_seqlen;
}
__device__ __forceinline__ int64 place_of_key(const KernelParams& params, const TensorView& view, const Sequence& sequence, int key) {
    return place_in_page(view, key, page_of_key(params, sequence, key));
}

// The part of the table that the copy of one block of kKeys keys needs. It is fetched one block
// ahead, so that no copy waits for it. With kIsLate the table's entries become pages where they are
// used: the compiler may otherwise put the first use of a load right behind it, where a warp waits
// for the table in every block.
template <int kKeys, bool kIsLate = false>
struct KeyPages {
    // Whether the rows of a block are evenly apart: without pages, or if each block lies within one
    // page.
    static constexpr bool kIsEven = kPageSize == 0 || kPageSize % kKeys == 0;
    static constexpr int kFetches = kIsEven ? 1 : (kKeys + 31) / 32;

    const int* table;      // row of this sequence
    const int& num_pages;  // a reference into the constant bank saves a register
    int seqlen_k;
    // If kIsEven, the block's page. Otherwise lane l holds the pages of its keys l, l + 32, ...
    // With kIsLate these are entries.
    int pages[kFetches];

    __device__ __forceinline__ KeyPages(const KernelParams& params, const Sequence& sequence)
        : num_pages(params.num_pages), seqlen_k(sequence.seqlen_k) {
        if constexpr (kPageSize > 0) table = params.block_table + sequence.batch * params.block_table_stride;
    }

    __device__ __forceinline__ void fetch(int block, int end_block, int lane) {
        Entries entries;
        if constexpr (kPageSize > 0) fetch_ahead(entries, block, end_block, lane), take(entries);
    }

    // The same in two calls, between which other work hides the latency: fetch_ahead reads the
    // table's entries, and take turns them into pages.
    using Entries = int[kFetches];
    __device__ __forceinline__ void fetch_ahead(Entries& entries, int block, int end_block, int lane) const {
        #pragma unroll
        for (int i = 0; i < kFetches; ++i) {
            const int64 key = int64(block) * kKeys + (kIsEven ? 0 : i * 32 + lane);
            entries[i] = block < end_block && key < seqlen_k ? __ldg(table + uint32(key) / kPageKeys) : 0;
        }
    }
    __device__ __forceinline__ void take(const Entries& entries) {
        // The minimum is unsigned, so a negative entry becomes the last page too.
        #pragma unroll
        for (int i = 0; i < kFetches; ++i) pages[i] = kIsLate ? entries[i] : page_of_entry(entries[i]);
    }
    __device__ __forceinline__ int page_of_entry(int entry) const { return min(uint32(entry), uint32(num_pages - 1)); }
    __device__ __forceinline__ int late(int entry) const { return kIsLate ? page_of_entry(entry) : entry; }

    // The page of a row of the block. All lanes of a warp call it.
    __device__ __forceinline__ int page_of(int row) const {
        if constexpr (kIsEven) return late(pages[0]);
        int page = __shfl_sync(0xffffffff, pages[0], row % 32);
        #pragma unroll
        for (int i = 1; i < kFetches; ++i) {
            const int other = __shfl_sync(0xffffffff, pages[i], row % 32);
            if (row / 32 == i) page = other;
        }
        return late(page);
    }

    // The place of a row of the block within its page.
    static __device__ __forceinline__ uint32 row_in_page(int block, int row) { return (uint32(block) * kKeys + row) % kPageKeys; }

    // Elements from the head's row 0 to the block's first row, if rows are evenly apart.
    __device__ __forceinline__ int64 place(const TensorView& view, int block) const {
        const int64 key = int64(block) * kKeys;
        if constexpr (kPageSize == 0) return key * view.stride_seqlen;
        else return late(pages[0]) * view.stride_batch + int64(uint32(key) % kPageKeys) * view.stride_seqlen;
    }

    // Elements from the head's row 0 to a row of the block, if rows are not evenly apart. All lanes
    // of a warp call it.
    __device__ __forceinline__ int64 place(const TensorView& view, int block, int row) const {
        return page_of(row) * view.stride_batch + int64(row_in_page(block, row)) * view.stride_seqlen;
    }
};
