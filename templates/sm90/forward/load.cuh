// The producer's copies in the sm90 forward kernel: one box after the other of K and V, by TMA.
//
// One thread of the producer warpgroup calls these functions. Each waits for an empty slot, starts
// the copy into it and moves the ring on. Barriers of shared.cuh tell the consumers of arrivals.

#include "device/schedule/ring.cuh"
#include "device/schedule/tile_order.cuh"
#include "sm90/forward/shared.cuh"
#include "sm90/load_q.cuh"

// Loads K of the sequence's block `block`. Under a block mask consumers read `listed` beside the
// slot.
__device__ __forceinline__ void load_k(Ring<kKStages>& ring, const Shared& shared, const TensorMap& map, int block,
                                       int head_kv, const MapRows& rows, const ListedTile& listed, int head) {
    barrier_wait(shared.empty_k(ring.slot), ring.parity ^ 1);
    if constexpr (kHasBlockMask) shared.listed_slots.put(ring.slot, listed, head);
    barrier_expect(shared.full_k(ring.slot), kBytesK);
    #pragma unroll
    for (int box = 0; box < kBoxesQK; ++box) {
        tma_load(shared.k_slot(ring.slot) + box * kBlockN * kBoxRowBytes, map, shared.full_k(ring.slot),
                 box * kBoxCols, block * kBlockN, head_kv, rows);
    }
    ring.advance();
}

__device__ __forceinline__ void load_v(Ring<kVStages>& ring, const Shared& shared, const TensorMap& map, int block,
                                       int head_kv, const MapRows& rows) {
    barrier_wait(shared.empty_v(ring.slot), ring.parity ^ 1);
    barrier_expect(shared.full_v(ring.slot), kBytesV);
    #pragma unroll
    for (int box = 0; box < kBoxesV; ++box) {
        tma_load(shared.v_slot(ring.slot) + box * kBlockN * kBoxRowBytes, map, shared.full_v(ring.slot),
                 box * kBoxCols, block * kBlockN, head_kv, rows);
    }
    ring.advance();
}
