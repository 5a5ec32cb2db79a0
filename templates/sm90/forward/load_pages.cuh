// The producer of the sm90 forward kernel if keys lie in pages (device/attention/key_pages.cuh).
// load.cuh has the copies of Q, and of keys without pages.
//
// Where pages hold whole boxes of 8 rows or more, one warp copies keys by TMA: its lanes share the
// lookups in the block table. Else the four warps of the warpgroup copy keys by cp.async, 16 bytes
// at a time, into the same swizzled boxes. Either way rows behind the sequence's end arrive as
// zeros, except in a box that a page holds whole. The consumers clear those rows of V.

#include "device/attention/key_boxes.cuh"
#include "device/ptx/cp_async.cuh"
#include "device/ptx/sync.cuh"
#include "device/schedule/tile_feed.cuh"
#include "sm90/forward/load.cuh"

using BoxedK = BoxedTile<kBlockN, kHeadDim>;
using BoxedV = BoxedTile<kBlockN, kHeadDimV>;

// The copies of one head's keys by the loader threads. `Pages` looks up the pages of the next
// block, which `fetch` names.
template <bool kByTma>
struct PageLoader;

// By TMA: a barrier counts the bytes of its slot.
template <>
struct PageLoader<true> {
    const KernelParams& params;
    const Shared& shared;
    const TensorMap &map_k, &map_v;
    const int lane;
    Ring<kKStages> ring_k;
    Ring<kVStages> ring_v;

    using Pages = KeyPages<kBlockN>;
    __device__ __forceinline__ void fetch(Pages& pages, int block, int begin, int end) const {
        pages.fetch(block, block < begin ? block : end, lane);
    }
    __device__ __forceinline__ void load_k(const Pages& pages, int block, int head_kv) {
        barrier_wait(shared.empty_k(ring_k.slot), ring_k.parity ^ 1);
        if (lane == 0) barrier_expect(shared.full_k(ring_k.slot), kBytesK);
        load_boxes<BoxedK>(shared.k_slot(ring_k.slot), map_k, shared.full_k(ring_k.slot), pages, block, head_kv, {}, lane == 0);
        ring_k.advance();
    }
    __device__ __forceinline__ void load_v(const Pages& pages, int block, int head_kv) {
        barrier_wait(shared.empty_v(ring_v.slot), ring_v.parity ^ 1);
        if (lane == 0) barrier_expect(shared.full_v(ring_v.slot), kBytesV);
        load_boxes<BoxedV>(shared.v_slot(ring_v.slot), map_v, shared.full_v(ring_v.slot), pages, block, head_kv, {}, lane == 0);
        ring_v.advance();
    }
    __device__ __forceinline__ void arrive_pending() {}
};

// By cp.async: every loader thread arrives once for a slot, when its share of the copies is there.
// A thread starts the copies of one more slot before it waits for those of the slot before.
template <>
struct PageLoader<false> {
    const KernelParams& params;
    const Shared& shared;
    const TensorMap &map_k, &map_v;  // not in use
    const int lane;
    Ring<kKStages> ring_k;
    Ring<kVStages> ring_v;
    uint32 pending = 0;  // the barrier of the slot whose copies are in flight, or 0

    // A warp copies a quarter of a block's rows, and looks up their pages alone.
    static constexpr int kWarpRows = kBlockN / 4;
    using Pages = KeyPages<kWarpRows>;
    static __device__ __forceinline__ int quarter(int block) { return block * 4 + uniform(threadIdx.x / 32); }

    __device__ __forceinline__ void fetch(Pages& pages, int block, int begin, int end) const {
        pages.fetch(quarter(block), block < begin ? quarter(block) : end * 4, lane);
    }
    __device__ __forceinline__ void load_k(const Pages& pages, int block, int head_kv) {
        wait_for(shared.empty_k(ring_k.slot), ring_k.parity ^ 1);
        copy<BoxedK, kHeadDim>(shared.k_slot(ring_k.slot), params.k, pages, block, head_kv);
        commit(shared.full_k(ring_k.slot));
        ring_k.advance();
    }
    __device__ __forceinline__ void load_v(const Pages& pages, int block, int head_kv) {
        wait_for(shared.empty_v(ring_v.slot), ring_v.parity ^ 1);
        copy<BoxedV, kHeadDimV>(shared.v_slot(ring_v.slot), params.v, pages, block, head_kv);
        commit(shared.full_v(ring_v.slot));
        ring_v.advance();
    }
    // Waits for the copies in flight, and arrives for them.
    __device__ __forceinline__ void arrive_pending() {
        if (pending == 0) return;
        cp_async_wait<0>();
        arrive();
        pending = 0;
    }

private:
    // The consumers may need the pending slot before they empty the one waited for. So the thread
    // must arrive for it before it waits, and a test that may suspend the thread would be a wait.
    __device__ __forceinline__ void wait_for(uint32 empty, uint32 parity) {
        if (barrier_test_wait(empty, parity)) return;
        arrive_pending();
        barrier_wait(empty, parity);
    }
    __device__ __forceinline__ void commit(uint32 full) {
        cp_async_commit();
        if (pending != 0) {
            cp_async_wait<1>();
            arrive();
        }
        pending = full;
    }
    __device__ __forceinline__ void arrive() const {
        fence_async_proxy();  // wgmma reads what this thread has copied
        barrier_arrive(pending);
    }
    // Eight lanes copy 64 columns of a row, so a warp copies four rows at a time.
    template <class Boxed, int kCols>
    __device__ __forceinline__ void copy(uint32 tile, const TensorView& view, const Pages& pages, int block, int head_kv) const {
        const int chunk = lane % 8, first = (quarter(block) - block * 4) * kWarpRows;
        const uint16* source = static_cast<const uint16*>(view.data) + head_kv * view.stride_head + chunk * 8;
        #pragma unroll 1
        for (int at = lane / 8; at < kWarpRows; at += 4) {
            const int row = first + at;
            const uint16* from = source + pages.place(view, quarter(block), at);
            const bool exists = block * kBlockN + row < pages.seqlen_k;
            const uint32 to = tile + row * kBoxRowBytes + swizzled(chunk, row % 8);
            #pragma unroll
            for (int box = 0; box < Boxed::kBoxes; ++box) {
                cp_async<16>(to + box * Boxed::kBoxBytes, from + box * kBoxCols, exists && box * kBoxCols + chunk * 8 < kCols);
            }
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
    TileFeed<QueryTiles> feed(params, tile_counter);
    for (uint32 nth = 0;; ++nth) {
        if (is_first) shared.tiles.put(nth, feed.tile());
        __syncwarp();  // no lane waits for the tile before the first one has put it there
        const Tile tile = shared.tiles.get(nth);
        shared.tiles.release(nth, lane);
        if (tile.first < 0) break;
        const int head_kv = tile.head / params.group_size, end = tile.begin + tile.blocks;
        const Sequence sequence(params, tile.batch);
        Loader::Pages pages(params, sequence);
        loader.fetch(pages, end - 1, tile.begin, end);
        for (int block = end - 1; block >= tile.begin; --block) {
            if (is_first && block == tile.begin) feed.draw_next();
            loader.load_k(pages, block, head_kv);
            if (is_first && block == end - 1) load_q(ring_q, shared, map_q, tile, map_rows_q(params, sequence, params.map_rows_q));
            loader.load_v(pages, block, head_kv);
            loader.fetch(pages, block - 1, tile.begin, end);
        }
        // The next tile comes when the consumers are done with an earlier one.
        loader.arrive_pending();
        if (is_first) feed.advance();
    }
    if (is_first) feed.finish();
}
