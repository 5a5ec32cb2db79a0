// The producer of the sm90 forward kernel over keys of 16 bits without pages: one thread starts the
// copies of Q, K and V, by TMA, one box after the other.
//
// Each copy waits for an empty slot, starts, and moves the ring on. Barriers of shared.cuh tell the
// consumers of arrivals. load_pages.cuh, load_eight.cuh and convert_in_place.cuh have the other
// producers.

#include "device/attention/block_list.cuh"
#include "device/attention/sequence.cuh"
#include "device/schedule/ring.cuh"
#include "device/schedule/tile_order.cuh"
#include "sm90/forward/shared.cuh"
#include "sm90/forward/widened_load.cuh"
#include "sm90/load_q.cuh"

struct TileLoader {
    const KernelParams& params;
    const Shared& shared;
    const TensorMap &map_q, &map_k, &map_v;
    Ring<kQStages> ring_q;
    Ring<kVStages> ring_v;
    Ring<kKStages> ring_k;

    // Loads a tile, the CTA's nth, with the scales of a widened K and V. `feed` draws the next tile
    // before the last blocks.
    template <class Feed>
    __device__ __forceinline__ void load(const Tile& tile, uint32 nth, Feed& feed) {
        const int head_kv = tile.head / params.group_size;
        if constexpr (kHasKeyFactors) {
            load_blocks(tile, feed, factors_of_keys(params, Sequence(params, tile.batch), head_kv));
        } else {
            if constexpr (kHasTileFactors) {
                if (tile.blocks > 0) put_tile_scales(shared.tile_scales(nth), params, Sequence(params, tile.batch), head_kv);
            }
            load_blocks(tile, feed);
        }
    }

private:
    // Loads K of the tile's first block, Q and V of this block, then K and V of each further block.
    // `factors`: the sequence's row of them, with kHasKeyFactors.
    template <class Feed>
    __device__ __forceinline__ void load_blocks(const Tile& tile, Feed& feed, const float* factors = nullptr) {
        const int head_kv = tile.head / params.group_size, last_block = tile.begin + tile.blocks - 1;
        const Sequence sequence(params, tile.batch);
        const MapRows rows_q = map_rows_q(params, sequence, params.map_rows_q);
        const MapRows rows_k = map_rows_k(params, sequence, params.map_rows_k);
        const MapRows rows_v = map_rows_k(params, sequence, params.map_rows_v);
        const KeyList list(params, sequence, tile.head, tile.first);
        // With two K slots the next tile's first K is due one block after this tile's last.
        const bool draws_early = kKStages <= 2 || feed.knows_second();
        for (int position = last_block; position >= tile.begin; --position) {
            if (position == min(last_block, tile.begin + draws_early)) feed.draw_next();
            ListedTile listed;
            int block = position;
            if constexpr (kHasBlockMask) listed = list.at(position), block = listed.tile;
            load_k(block, head_kv, rows_k, listed, tile.head, factors);
            if (position == last_block) load_q(ring_q, shared, map_q, tile, rows_q);
            load_v(block, head_kv, rows_v);
        }
    }

    // Loads K of the sequence's block `block`. Under a block mask consumers read `listed` beside
    // the slot, and with kHasKeyFactors the block's part of `factors`.
    __device__ __forceinline__ void load_k(int block, int head_kv, const MapRows& rows, const ListedTile& listed, int head, const float* factors) {
        barrier_wait(shared.empty_k(ring_k.slot), ring_k.parity ^ 1);
        if constexpr (kHasBlockMask) shared.listed_slots.put(ring_k.slot, listed, head);
        barrier_expect(shared.full_k(ring_k.slot), kBytesK + (kHasKeyFactors ? kSlotScaleBytes : 0));
        if constexpr (kHasKeyFactors) bulk_load(shared.slot_scales(ring_k.slot), factors + block * kBlockN, kSlotScaleBytes, shared.full_k(ring_k.slot));
        #pragma unroll
        for (int box = 0; box < kBoxesQK; ++box) {
            tma_load(shared.k_slot(ring_k.slot) + box * kBlockN * kBoxRowBytes, map_k, shared.full_k(ring_k.slot),
                     box * kBoxCols, block * kBlockN, head_kv, rows);
        }
        ring_k.advance();
    }

    __device__ __forceinline__ void load_v(int block, int head_kv, const MapRows& rows) {
        barrier_wait(shared.empty_v(ring_v.slot), ring_v.parity ^ 1);
        barrier_expect(shared.full_v(ring_v.slot), kBytesV);
        #pragma unroll
        for (int box = 0; box < kBoxesV; ++box) {
            tma_load(shared.v_slot(ring_v.slot) + box * kBlockN * kBoxRowBytes, map_v, shared.full_v(ring_v.slot),
                     box * kBoxCols, block * kBlockN, head_kv, rows);
        }
        ring_v.advance();
    }
};
