// The copies of a tile's query rows, by one thread of a forward kernel's producer. Each consumer
// has its own slot and barriers. The kernel's shared.cuh says where these are.

#include "device/schedule/ring.cuh"
#include "device/schedule/tile_order.cuh"

__device__ __forceinline__ void load_q(Ring<kQStages>& ring, const Shared& shared, const TensorMap& map, const Tile& tile,
                                       const MapRows& rows) {
    // With kStoresFromQ consumers hold the second slot from the start (the kernel's
    // release_stored).
    const uint32 parity = ring.parity ^ (kStoresFromQ ? ring.slot == 0 : 1);
    #pragma unroll
    for (int consumer = 0; consumer < kConsumers; ++consumer) {
        barrier_wait(shared.empty_q(ring.slot, consumer), parity);
        barrier_expect(shared.full_q(ring.slot, consumer), kBytesQ);
        #pragma unroll
        for (int box = 0; box < kBoxesQK; ++box) {
            tma_load(shared.q_slot(ring.slot, consumer) + box * 64 * kBoxRowBytes, map,
                     shared.full_q(ring.slot, consumer), box * kBoxCols, tile.first + consumer * 64, tile.head, rows);
        }
    }
    ring.advance();
}
