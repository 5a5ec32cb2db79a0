// The producer warpgroup of the sm90 forward kernel for e4m3. One warp starts copies by TMA. The
// three others transpose the V blocks that have arrived. The two roles meet at barriers alone, so a
// copy waits for nothing but its slot. Where V^T lies in the workspace, the three have nothing to
// do.

#include "device/attention/key_boxes.cuh"
#include "device/schedule/previous_kernel.cuh"
#include "device/schedule/tile_feed.cuh"
#include "sm90/forward_fp8/shared.cuh"
#include "sm90/forward_fp8/transpose.cuh"
#include "sm90/load_q.cuh"

static_assert(kKeyBoxRows % 8 == 0, "a box begins where the swizzle's pattern does");
static_assert(kLaunchBoxRows == kKeyBoxRows, "src/family computes the same");

// Tiles of pairs of elements, as the tensor maps count them.
using BoxedK = BoxedTile<kBlockN, kHeadDim / 2>;
using BoxedV = BoxedTile<kBlockN, kHeadDimV / 2>;

// The loads of all tiles and their blocks, by one warp. Its first thread feeds tiles and starts
// copies; with pages all lanes look them up.
__device__ __forceinline__ void load_tiles(const KernelParams& params, const Shared& shared, const TensorMap& map_q,
                                           const TensorMap& map_k, const TensorMap& map_v, uint32* tile_counter) {
    const int lane = threadIdx.x % 32;
    const bool is_first = lane == 0;
    if constexpr (kReadsImages) wait_for_previous_kernel();
    Ring<kKStages> ring_k;
    Ring<kReadsImages ? kVtStages : kVStages> ring_v;
    Ring<kQStages> ring_q;
    DrawingFeed<QueryTiles<0>> feed(params, tile_counter);
    for (uint32 nth = 0;; ++nth) {
        if (is_first) shared.tiles.put(nth, feed.tile());
        __syncwarp();  // no lane waits for the tile before the first one has put it there
        const Tile tile = shared.tiles.get(nth);
        shared.tiles.release(nth, lane);
        if (tile.first < 0) break;
        const int head_kv = tile.head / params.group_size, end = tile.begin + tile.blocks;
        const Sequence sequence(params, tile.batch);
        const MapRows rows_k = map_rows_k(params, sequence, params.map_rows_k);
        const MapRows rows_v = map_rows_k(params, sequence, params.map_rows_v);
        // The image of the block before. Blocks follow each other downwards.
        const uint8* image = images_of(params, sequence, head_kv) + int64(end) * kImageBytes;
        const KeyList list(params, sequence, tile.head, tile.first);
        KeyPages<kBlockN> pages(params, sequence);
        KeyPages<kBlockN>::Entries entries;
        const auto fetch = [&](int block) { pages.fetch_ahead(entries, block, block < tile.begin ? block : block + 1, lane); };
        if constexpr (kPageSize > 0) {
            // The table is read two blocks ahead, since a block's copies begin at once after those
            // of the block before.
            fetch(end - 1);
            pages.take(entries);
            fetch(end - 2);
        }
        for (int position = end - 1; position >= tile.begin; --position) {
            int block = position;
            if (is_first && position == tile.begin) feed.draw_next();
            ListedTile listed = {};
            if constexpr (kHasBlockMask) listed = list.at(position), block = listed.tile;
            barrier_wait_as_warp(shared.empty_k(ring_k.slot), ring_k.parity ^ 1);
            if (is_first) {
                if constexpr (kHasBlockMask) shared.listed_slots.put(ring_k.slot, listed, tile.head);
                barrier_expect(shared.full_k(ring_k.slot), kBytesK);
            }
            load_boxes<BoxedK>(shared.k_slot(ring_k.slot), map_k, shared.full_k(ring_k.slot), pages, block, head_kv, rows_k, is_first);
            ring_k.advance();
            if (is_first && position == end - 1) load_q(ring_q, shared, map_q, tile, map_rows_q(params, sequence, params.map_rows_q));
            if constexpr (kReadsImages) {
                barrier_wait_as_warp(shared.empty_vt(ring_v.slot), ring_v.parity ^ 1);
                image -= kImageBytes;
                if (is_first) {
                    barrier_expect(shared.full_vt(ring_v.slot), kImageBytes);
                    bulk_load(shared.vt_slot(ring_v.slot), image, kImageBytes, shared.full_vt(ring_v.slot));
                }
            } else {
                barrier_wait_as_warp(shared.empty_v(ring_v.slot), ring_v.parity ^ 1);
                if (is_first) barrier_expect(shared.full_v(ring_v.slot), kBytesV);
                load_boxes<BoxedV>(shared.v_slot(ring_v.slot), map_v, shared.full_v(ring_v.slot), pages, block, head_kv, rows_v, is_first);
            }
            ring_v.advance();
            if constexpr (kPageSize > 0) {
                pages.take(entries);
                fetch(position - 2);
            }
            __syncwarp();
        }
        if (is_first) feed.advance();
    }
    if (is_first) feed.finish();
}

// The transposition of all V blocks in the order of their loads, by the nth of kTransposers warps.
// It takes a tile from its slot, as a consumer does.
__device__ __forceinline__ void transpose_tiles(const KernelParams& params, const Shared& shared, int nth_warp) {
    const int lane = threadIdx.x % 32;
    Transposer transposer{shared, nth_warp, lane};
    for (uint32 nth = 0;; ++nth) {
        const Tile tile = shared.tiles.get(nth);
        shared.tiles.release(nth, lane);
        if (tile.first < 0) break;
        const int keys = kPageSize > 0 ? Sequence(params, tile.batch).seqlen_k : 0;
        for (int position = tile.begin + tile.blocks - 1; position >= tile.begin; --position) transposer.next(keys - position * kBlockN);
    }
}
