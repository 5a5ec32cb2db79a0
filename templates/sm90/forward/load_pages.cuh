// The producer of the sm90 forward kernel if keys lie in pages (device/attention/key_pages.cuh).
// load.cuh has the copies of Q, and of keys without pages.
//
// Where pages hold boxes of whole eights of rows, TMA copies keys. Up to four warps share the boxes
// of a block, since a thread takes 200 cycles to start one. Else four warps copy keys by cp.async,
// 16 bytes at a time, into the same swizzled boxes. Either way rows behind the sequence's end
// arrive as zeros, except in a box that a page holds whole. The consumers clear those rows of V.

#include "device/attention/key_boxes.cuh"
#include "device/ptx/cp_async.cuh"
#include "device/ptx/sync.cuh"
#include "sm90/forward/load.cuh"
#include "sm90/forward/loader_tiles.cuh"

using BoxedK = BoxedTile<kBlockN, kHeadDim>;
using BoxedV = BoxedTile<kBlockN, kHeadDimV>;

// The copies of one head's keys by the loader threads. `Pages` looks up the pages of the next
// block, which `fetch` names.
template <bool kByTma>
struct PageLoader;

// By TMA: a barrier counts the bytes of its slot. Part i of a block, a row of boxes or one of its
// boxes, belongs to loader warp i mod kLoaderWarps, whose lane 0 starts it. Each warp arrives with
// the bytes of its own parts. All lanes wait for an empty slot, as a warp, since a lane that falls
// behind could miss a phase of the barrier and wait for ever. If lane 0 alone waits, it parts from
// the others, which took up to 1.26 times as long
// (docs/tuning/pages.md#a-lane-that-waited-for-ever).
template <>
struct PageLoader<true> {
    const KernelParams& params;
    const Shared& shared;
    const TensorMap &map_k, &map_v;
    const int lane;
    Ring<kKStages> ring_k;
    Ring<kVStages> ring_v;

    static constexpr int kWarps = kPagesByTma ? kLoaderWarps : 1;  // NVRTC compiles this without pages too
    static constexpr int kMostParts = (kParts + kWarps - 1) / kWarps;  // of a warp
    static_assert(!kPagesByTma || kMostParts <= 32, "a lane has the page of one part");

    // Lane i looks up the page of the warp's part i.
    struct Pages {
        using Entries = int;
        const int* table;
        const int& num_pages;
        const int seqlen_k;
        int page;

        __device__ __forceinline__ Pages(const KernelParams& params, const Sequence& sequence)
            : table(params.block_table + sequence.batch * params.block_table_stride), num_pages(params.num_pages), seqlen_k(sequence.seqlen_k) {}
        // The minimum is unsigned, so a negative entry becomes the last page too.
        __device__ __forceinline__ void take(Entries entry) { page = min(uint32(entry), uint32(num_pages - 1)); }
    };
    const int warp = kWarps == 1 ? 0 : uniform(threadIdx.x / 32);
    int head_kv = 0;

    // The row of a block at which the warp's part `nth` begins, past the block where there is none.
    __device__ __forceinline__ int part_row(int nth) const { return (nth * kWarps + warp) / kPartsOfRow * kKeyBoxRows; }
    // The box of that row with which it begins.
    __device__ __forceinline__ int part_box(int nth) const { return (nth * kWarps + warp) % kPartsOfRow; }
    __device__ __forceinline__ void begin_tile(int head) { head_kv = head; }
    __device__ __forceinline__ void fetch(const Pages& pages, Pages::Entries& entry, int block, int begin) const {
        const int row = part_row(lane);
        const uint32 key = uint32(block) * kBlockN + row;
        entry = block >= begin && row < kBlockN && key < uint32(pages.seqlen_k) ? __ldg(pages.table + key / kPageKeys) : 0;
    }
    __device__ __forceinline__ void load_k(const Pages& pages, int block) {
        barrier_wait_as_warp(shared.empty_k(ring_k.slot), ring_k.parity ^ 1);
        load<BoxedK>(shared.k_slot(ring_k.slot), map_k, shared.full_k(ring_k.slot), pages, block);
        ring_k.advance();
    }
    __device__ __forceinline__ void load_v(const Pages& pages, int block) {
        barrier_wait_as_warp(shared.empty_v(ring_v.slot), ring_v.parity ^ 1);
        load<BoxedV>(shared.v_slot(ring_v.slot), map_v, shared.full_v(ring_v.slot), pages, block);
        ring_v.advance();
    }

private:
    template <class Boxed>
    __device__ __forceinline__ void load(uint32 tile, const TensorMap& map, uint32 barrier, const Pages& pages, int block) const {
        constexpr int kBoxes = Boxed::kBoxes / kPartsOfRow;  // of a part
        constexpr uint32 kBytes = kBoxes * kKeyBoxRows * kBoxRowBytes;
        // Warps that have a part less than the first one.
        constexpr bool kIsEven = kParts % kWarps == 0;
        const bool has_last = kIsEven || part_row(kMostParts - 1) < kBlockN;
        if (lane == 0) barrier_expect(barrier, kMostParts * kBytes - (has_last ? 0 : kBytes));
        #pragma unroll
        for (int nth = 0; nth < kMostParts; ++nth) {
            const int page = kMostParts == 1 && kPageKeys % kBlockN == 0 ? pages.page : __shfl_sync(0xffffffff, pages.page, nth);
            const int row = part_row(nth);
            if (lane != 0 || nth == kMostParts - 1 && !has_last) continue;
            const uint32 key = uint32(block) * kBlockN + row;
            // A box of keys that do not exist begins behind the page's last row: no row is read.
            const int first = key < uint32(pages.seqlen_k) ? key % kPageKeys : kPageSize;
            #pragma unroll
            for (int i = 0; i < kBoxes; ++i) {
                const int box = part_box(nth) + i;
                tma_load_4d(tile + box * Boxed::kBoxBytes + row * kBoxRowBytes, map, barrier, box * kBoxCols, first, head_kv, page);
            }
        }
    }
};

// By cp.async: a slot's barrier takes an arrival of every loader thread, which comes when the
// thread's share of the copies is there. No loader waits for a copy, so as many are in flight as
// slots are empty. The consumers fence the asynchronous proxy after their wait.
template <>
struct PageLoader<false> {
    const KernelParams& params;
    const Shared& shared;
    const TensorMap &map_k, &map_v;  // not in use
    const int lane;
    Ring<kKStages> ring_k;
    Ring<kVStages> ring_v;

    // A warp copies a quarter of a block's rows. Eight lanes copy 64 columns of a row, so a warp
    // copies four rows at a time. What follows from the thread alone is computed once: each
    // instruction of a loader warp waits for the one before it, and they set the kernel's pace.
    static constexpr int kWarpRows = kBlockN / 4;
    // A thread looks up the page of each of its rows, or of the first where all are in one page.
    static constexpr bool kIsEven = kPageKeys % kWarpRows == 0;
    static constexpr int kLookups = kIsEven ? 1 : kWarpRows / 4;

    struct Pages {
        using Entries = int[kLookups];
        const int* table;
        const int& num_pages;
        const int seqlen_k;
        int pages[kLookups];

        __device__ __forceinline__ Pages(const KernelParams& params, const Sequence& sequence)
            : table(params.block_table + sequence.batch * params.block_table_stride), num_pages(params.num_pages), seqlen_k(sequence.seqlen_k) {}
        __device__ __forceinline__ void take(const Entries& entries) {
            // The minimum is unsigned, so a negative entry becomes the last page too.
            #pragma unroll
            for (int i = 0; i < kLookups; ++i) pages[i] = min(uint32(entries[i]), uint32(num_pages - 1));
        }
        // Elements from the head's row 0 to a key, of which `lookup` has the page.
        __device__ __forceinline__ int64 place(const TensorView& view, uint32 key, int lookup) const {
            return pages[lookup] * view.stride_batch + int64(key % kPageKeys) * view.stride_seqlen;
        }
    };
    const int warp = uniform(threadIdx.x / 32);
    const int row = warp * kWarpRows + lane / 8;  // the thread's first row of a block; the others are 4, 8, ... behind
    const uint32 first_chunk = row * kBoxRowBytes + swizzled(lane % 8, row % 8);  // of that row's chunk in a box
    const uint16 *source_k = nullptr, *source_v = nullptr;  // the chunk of the head's columns in row 0 of page 0

    __device__ __forceinline__ void begin_tile(int head_kv) {
        source_k = static_cast<const uint16*>(params.k.data) + head_kv * params.k.stride_head + lane % 8 * 8;
        source_v = static_cast<const uint16*>(params.v.data) + head_kv * params.v.stride_head + lane % 8 * 8;
    }
    __device__ __forceinline__ void fetch(const Pages& pages, Pages::Entries& entries, int block, int begin) const {
        #pragma unroll
        for (int i = 0; i < kLookups; ++i) {
            const uint32 key = uint32(block) * kBlockN + row + i * 4;
            entries[i] = block >= begin && key < uint32(pages.seqlen_k) ? __ldg(pages.table + key / kPageKeys) : 0;
        }
    }
    __device__ __forceinline__ void load_k(const Pages& pages, int block) {
        barrier_wait(shared.empty_k(ring_k.slot), ring_k.parity ^ 1);
        copy<BoxedK, kHeadDim>(shared.k_slot(ring_k.slot), params.k, source_k, pages, block);
        cp_async_arrive(shared.full_k(ring_k.slot));
        ring_k.advance();
    }
    __device__ __forceinline__ void load_v(const Pages& pages, int block) {
        barrier_wait(shared.empty_v(ring_v.slot), ring_v.parity ^ 1);
        copy<BoxedV, kHeadDimV>(shared.v_slot(ring_v.slot), params.v, source_v, pages, block);
        cp_async_arrive(shared.full_v(ring_v.slot));
        ring_v.advance();
    }

private:
    template <class Boxed, int kCols>
    __device__ __forceinline__ void copy(uint32 tile, const TensorView& view, const uint16* source, const Pages& pages, int block) const {
        const uint32 key = uint32(block) * kBlockN + row;
        const int keys_left = pages.seqlen_k - int(key);
        const uint16* from = source + pages.place(view, key, 0);
        #pragma unroll
        for (int at = 0; at < kWarpRows; at += 4) {
            if constexpr (!kIsEven) from = source + pages.place(view, key + at, at / 4);
            // Four rows on, the swizzle flips the third bit of the chunk.
            const uint32 to = tile + at * kBoxRowBytes + (at % 8 ? first_chunk ^ 64 : first_chunk);
            #pragma unroll
            for (int box = 0; box < Boxed::kBoxes; ++box) {
                cp_async<16>(to + box * Boxed::kBoxBytes, from + box * kBoxCols, at < keys_left && box * kBoxCols + lane % 8 * 8 < kCols);
            }
            if constexpr (kIsEven) from += 4 * view.stride_seqlen;
        }
    }
};

// The producer's loop over tiles and their blocks, in the order of load.cuh's caller. The first
// thread feeds tiles and loads Q. The loader warps take a tile from its slot, as consumers do.
__device__ __forceinline__ void load_from_pages(const KernelParams& params, const Shared& shared, const TensorMap& map_q,
                                                const TensorMap& map_k, const TensorMap& map_v, uint32* tile_counter) {
    const int thread = threadIdx.x, lane = thread % 32;
    if (thread >= kLoaderWarps * 32) return;
    const bool is_first = thread == 0;
    using Loader = PageLoader<kPagesByTma>;
    Loader loader{params, shared, map_k, map_v, lane};
    Ring<kQStages> ring_q;
    TileFeed<ForwardTiles> feed(params, tile_counter);
    for (uint32 nth = 0;; ++nth) {
        const Tile tile = take_tile(shared.tiles, feed, nth, is_first, lane);
        if (tile.first < 0) break;
        const int head_kv = tile.head / params.group_size, end = tile.begin + tile.blocks;
        const Sequence sequence(params, tile.batch);
        // The table is read two blocks ahead, since a block's copies begin at once after those of
        // the block before.
        Loader::Pages pages(params, sequence);
        Loader::Pages::Entries entries;
        loader.begin_tile(head_kv);
        loader.fetch(pages, entries, end - 1, tile.begin);
        pages.take(entries);
        loader.fetch(pages, entries, end - 2, tile.begin);
        for (int block = end - 1; block >= tile.begin; --block) {
            if (is_first && block == tile.begin) feed.draw_next();
            loader.load_k(pages, block);
            if (is_first && block == end - 1) load_q(ring_q, shared, map_q, tile, map_rows_q(params, sequence, params.map_rows_q));
            loader.load_v(pages, block);
            pages.take(entries);
            loader.fetch(pages, entries, block - 2, tile.begin);
        }
        if (is_first) feed.end_tile();
    }
    if (is_first) feed.finish();
}

// Clears V of the next block behind the last key, where the sequence's last page may hold NaN.
// Every consumer that reads the block writes the same zeros, so consumers need not wait for one
// another. All threads of the warpgroup take part; `barrier` is the warpgroup's.
__device__ __forceinline__ void clear_past_end(const Shared& shared, const Ring<kVStages>& ring_v, int block, const Sequence& sequence, int thread, int barrier) {
    const int keys_left = sequence.seqlen_k - block * kBlockN;
    if (keys_left >= kBlockN) return;
    barrier_wait(shared.full_v(ring_v.slot), ring_v.parity);
    clear_rows<BoxedV, 128>(shared.v_slot(ring_v.slot), keys_left, thread);
    fence_async_proxy();
    warpgroup_barrier(barrier);  // all four warps have written zeros, and wgmma sees them
}
