// The schedule that two CTAs of a cluster share: arrivals on both CTAs' barriers, and the tiles
// that one of the two producers passes to both CTAs. Kernels with clusters of two use it. It knows
// no product and no copy of operands.

#include "device/ptx/cluster.cuh"
#include "device/schedule/tile_slots.cuh"

// Arrives on the same barrier in both CTAs of the cluster, with the order of barrier_arrive_in.
__device__ __forceinline__ void barrier_arrive_in_both(uint32 barrier) {
    barrier_arrive_in(address_in(0, barrier)), barrier_arrive_in(address_in(1, barrier));
}

// TileSlots for a cluster. The producer of rank 0 passes tiles to both CTAs. Every consumer warp of
// both CTAs, and the producer of rank 1, release a slot before rank 0 writes it again.
struct ClusterTileSlots {
    TileSlots own;

    __device__ __forceinline__ void init(int consumer_warps) const {
        for (int slot = 0; slot < TileSlots::kSlots; ++slot) barrier_init(own.full(slot), 1), barrier_init(own.empty(slot), 2 * consumer_warps + 1);
    }
    __device__ __forceinline__ void put(uint32 nth, const Tile& tile) const {
        // Orders all reads of the slot's previous tile, in both CTAs, before the stores below.
        barrier_wait(own.empty(nth), TileSlots::parity(nth) ^ 1);
        #pragma unroll
        for (int to = 0; to < 2; ++to) {
            store_ints_in(address_in(to, own.place(nth)), tile.first, tile.head, tile.batch, tile.blocks);
            // Split or alternating walks use these two, in backward passes.
            if constexpr (kMaySplit || kAlternates) store_ints_in(address_in(to, own.place(nth) + 16), tile.begin, tile.split, 0, 0);
            // Orders the store before the reads of that CTA.
            barrier_arrive_written_in(address_in(to, own.full(nth)));
        }
    }
    __device__ __forceinline__ Tile get(uint32 nth) const {
        // Orders rank 0's stores before this CTA's reads. The wait inside TileSlots::get then
        // passes at once.
        barrier_wait<Writers::kCluster>(own.full(nth), TileSlots::parity(nth));
        return own.get(nth);
    }
    // The producer of rank 1 calls it.
    __device__ __forceinline__ void release_one(uint32 nth) const { barrier_arrive_in(address_in(0, own.empty(nth))); }
    // Each consumer warp calls it, after its last read of the slot.
    __device__ __forceinline__ void release(uint32 nth, int lane) const {
        __syncwarp();  // orders the reads of every lane before the arrival
        if (lane == 0) release_one(nth);
    }
};
