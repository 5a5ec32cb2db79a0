// The producer of the sm90 backward kernels: one thread of a CTA, which starts the copies of a
// tile's K and V, and of the blocks of Q and dO that meet the tile, with their LSE and delta.
//
// Consumers release a slot by its empty barrier; the copy engine fills it and its full barrier.
// The kernel defines beforehand Shared, which says where slots and barriers lie, kCtas, the CTAs
// that do a tile together, kQHasRing: Q has a ring of slots of its own, or shares dO's, and
// kDirectTiles: so many tiles, 3 for any more, are all keys of a head and follow each other in a
// CTA; or 0; and kSplitsLast: only the last tiles of each head are split. This file knows nothing
// of what consumers compute.

#include "device/layout/tensor_map.cuh"
#include "device/schedule/dq_turns.cuh"
#include "device/schedule/group_walk.cuh"
#include "device/schedule/listed_slots.cuh"
#include "device/schedule/previous_kernel.cuh"
#include "device/schedule/tile_feed.cuh"

struct TensorMaps {
    const TensorMap &q, &k, &v, &dout;
};

constexpr int kCtaKeys = kBlockN / kCtas;
// Boxes of a block of Q and dO that a CTA copies into all CTAs of the tile.
constexpr int kShareK = (kBoxesK + kCtas - 1) / kCtas, kShareV = (kBoxesV + kCtas - 1) / kCtas;

// A block's boxes of Q or dO. Where two CTAs do a tile, each copies its share of the boxes into
// both.
template <int kBoxes, int kShare>
__device__ __forceinline__ void load_boxes(uint32 slots, uint32 slot, const TensorMap& map, uint32 barrier,
                                           int row, int head, const MapRows& rows, uint32 rank) {
    if constexpr (kCtas == 1) {
        #pragma unroll
        for (int box = 0; box < kBoxes; ++box) {
            tma_load(slots + slot * (kBoxes * kBytesBoxM) + box * kBytesBoxM, map, barrier, box * kBoxCols, row, head, rows);
        }
    } else {
        for (int box = int(rank) * kShare; box < min(kBoxes, int(rank + 1) * kShare); ++box) {
            tma_load_both(slots + slot * (kBoxes * kBytesBoxM) + box * kBytesBoxM, map, barrier, box * kBoxCols, row, head, rows);
        }
    }
}

// A tile's K.
template <class Memory, class RingKv>
__device__ __forceinline__ void load_k(const TensorMaps& maps, const Memory& smem, const Tile& tile, const MapRows& rows_k, int key, uint32 rank, const RingKv& ring_kv) {
    barrier_wait(smem.empty_k(ring_kv.slot), ring_kv.parity ^ 1);
    barrier_expect(smem.full_k(ring_kv.slot), kBytesK + (kCtas - 1) * kShareK * kBytesBoxN);
    #pragma unroll
    for (int box = 0; box < kBoxesK; ++box) {
        tma_load(smem.k + ring_kv.slot * kBytesK + box * kBytesBoxN, maps.k, smem.full_k(ring_kv.slot), box * kBoxCols, key, tile.head, rows_k);
    }
    if constexpr (kCtas > 1) {
        // The other CTA's keys, this one's share of the columns.
        const int other_key = tile.first + int(rank ^ 1) * kCtaKeys;
        #pragma unroll
        for (int box = 0; box < kShareK; ++box) {
            tma_load(smem.other_k + box * kBytesBoxN, maps.k, smem.full_k(ring_kv.slot), (int(rank) * kShareK + box) * kBoxCols, other_key, tile.head, rows_k);
        }
    }
}

// One tile's copies, in the order in which consumers need them: K, the first Q, V, the first dO,
// further Q and dO. Each wait is for the consumers' release of the slot. Each expected count of
// bytes precedes the copies that complete it. K, V and the first Q are loaded before the previous
// kernel has ended. LSE and delta come after it, since it writes them. With kLoadsKLast a CTA's
// later tiles load K behind the first dO: it is released last, with the last products of the tile
// before.
template <bool kLoadsKLast, class Memory, class Feed, class RingKv, class RingQ, class RingDo>
__device__ __forceinline__ void load_tile(const KernelParams& params, const TensorMaps& maps, const Memory& smem, const Tile& tile, bool is_first, uint32 rank,
                                          Feed& feed, RingKv& ring_kv, RingQ& ring_q, RingDo& ring_do) {
    const Sequence sequence(params, tile.batch);
    const MapRows rows_q = map_rows_q(params, sequence, params.map_rows_q), rows_do = map_rows_q(params, sequence, params.map_rows_o);
    const MapRows rows_k = map_rows_k(params, sequence, params.map_rows_k), rows_v = map_rows_k(params, sequence, params.map_rows_v);
    const BlockRange range = query_blocks<kBlockM>(tile.first, min(kBlockN, sequence.seqlen_k - tile.first), sequence);
    const int key = tile.first + int(rank) * kCtaKeys;

    if (!kLoadsKLast || is_first) load_k(maps, smem, tile, rows_k, key, rank, ring_kv);

    bool have_v = false;
    int left = tile.blocks;
    const auto load_block = [&](int head, int block, const ListedTile& listed) {
        if (--left == 0) feed.draw_next();
        const int64 stats = sequence.workspace_row(params, head) + block * kBlockM;
        // ---- Q; under a block mask also the block's number, before the slot is full
        barrier_wait(smem.empty_q(ring_q.slot), ring_q.parity ^ 1);
        if constexpr (kHasBlockMask) smem.listed.put(ring_q.slot, listed, head);
        barrier_expect(smem.full_q(ring_q.slot), kBytesQ + kBytesStats);
        load_boxes<kBoxesK, kShareK>(smem.q, ring_q.slot, maps.q, smem.full_q(ring_q.slot), block * kBlockM, head, rows_q, rank);
        // ---- V, with the tile's first block
        if (!have_v) {
            have_v = true;
            barrier_wait(smem.empty_v(ring_kv.slot), ring_kv.parity ^ 1);
            barrier_expect(smem.full_v(ring_kv.slot), kBytesV);
            #pragma unroll
            for (int box = 0; box < kBoxesV; ++box) {
                tma_load(smem.v + ring_kv.slot * kBytesV + box * kBytesBoxN, maps.v, smem.full_v(ring_kv.slot), box * kBoxCols, key, tile.head, rows_v);
            }
            wait_for_previous_kernel();
        }
        // ---- LSE
        bulk_load(smem.lse + ring_q.slot * kBytesStats, params.lse_log2 + stats, kBytesStats, smem.full_q(ring_q.slot));
        if constexpr (kQHasRing) ring_q.advance();
        // ---- dO and delta
        if constexpr (kCtas == 1) {
            barrier_wait(smem.empty_do(ring_do.slot), ring_do.parity ^ 1);
            barrier_expect(smem.full_do(ring_do.slot), kBytesDo + kBytesStats);
            load_boxes<kBoxesV, kShareV>(smem.dout, ring_do.slot, maps.dout, smem.full_do(ring_do.slot), block * kBlockM, head, rows_do, rank);
            bulk_load(smem.delta + ring_do.slot * kBytesStats, params.delta + stats, kBytesStats, smem.full_do(ring_do.slot));
        } else {
            // A CTA waits for the release of its own share of the boxes alone.
            barrier_wait(smem.empty_do(ring_do.slot, rank), ring_do.parity ^ 1);
            barrier_expect(smem.full_do(ring_do.slot, 0), kShareV * kBytesBoxM + kBytesStats);
            barrier_expect(smem.full_do(ring_do.slot, 1), (kBoxesV - kShareV) * kBytesBoxM);
            load_boxes<kBoxesV, kShareV>(smem.dout, ring_do.slot, maps.dout, smem.full_do(ring_do.slot, rank), block * kBlockM, head, rows_do, rank);
            bulk_load(smem.delta + ring_do.slot * kBytesStats, params.delta + stats, kBytesStats, smem.full_do(ring_do.slot, 0));
        }
        ring_do.advance();
        if (kLoadsKLast && !is_first && left + 1 == tile.blocks) load_k(maps, smem, tile, rows_k, key, rank, ring_kv);
    };
    load_queries(params, sequence, tile, range, left, load_block);
    ring_kv.advance();
}

// The role of the producer thread: tiles in the order of its feed, passed on to the consumers and
// loaded. The CTA of rank 0 feeds all CTAs of a tile; the other one takes the tile from its slot.
// With kDrawsEqual it draws tiles of one length, too (device/schedule/tile_feed.cuh). With
// kSplitsLast it always draws.
template <bool kDrawsEqual = false, bool kLoadsKLast = false, class Memory, class RingKv, class RingQ, class RingDo>
__device__ __forceinline__ void produce(const KernelParams& params, const TensorMaps& maps, const Memory& smem, uint32 rank, uint32* tile_counter,
                                        RingKv& ring_kv, RingQ& ring_q, RingDo& ring_do) {
    const bool feeds = kCtas == 1 || rank == 0;
    constexpr bool kByTicket = kIsDeterministic && kDirectTiles == 0, kWholeHeads = kDirectTiles > 1;
    if constexpr (kByTicket) wait_for_previous_kernel();  // it clears the tickets
    using Tiles = typename Either<kSplitsLast, LastSplitTiles, KeyTiles<kByTicket, kWholeHeads>>::Type;
    TileFeed<Tiles, kCtas, kByTicket, kWholeHeads, (kDrawsEqual || kSplitsLast) && !kWholeHeads> feed(params, !feeds ? nullptr : kByTicket ? ticket_counter(params) : tile_counter);
    // One CTA's feed advances at the end of the loop, a pair's at its start: the other way around
    // either kernel spills more.
    const auto advance = [&] { if constexpr (kCtas == 1) feed.advance(); };
    for (uint32 nth = 0;; ++nth, advance()) {
        Tile tile;
        if (feeds) {
            if (kCtas > 1 && nth > 0) feed.advance();
            tile = feed.tile();
            smem.tiles.put(nth, tile);
        } else if constexpr (kCtas > 1) {
            tile = smem.tiles.get(nth);
            smem.tiles.release_one(nth);
        }
        if (tile.first < 0) break;
        if (tile.blocks == 0) continue;
        load_tile<kLoadsKLast>(params, maps, smem, tile, nth == 0, rank, feed, ring_kv, ring_q, ring_do);
    }
    if (feeds) feed.finish();
}
