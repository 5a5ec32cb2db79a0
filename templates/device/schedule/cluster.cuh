// What two CTAs of a cluster share of a schedule: arrivals on both CTAs' barriers, and the tiles
// that one of the two producers passes on to both.

#include "device/ptx/cluster.cuh"
#include "device/schedule/tile_slots.cuh"

__device__ __forceinline__ void barrier_arrive_in_both(uint32 barrier) {
    barrier_arrive_in(address_in(0, barrier)), barrier_arrive_in(address_in(1, barrier));
}

// TileSlots for a cluster: the producer of rank 0 passes tiles on to both CTAs. Before it uses a
// slot anew, it waits until every consumer warp of both CTAs and the other producer have released
// it.
struct ClusterTileSlots {
    TileSlots own;

    __device__ __forceinline__ void init(int consumer_warps) const {
        for (int slot = 0; slot < TileSlots::kSlots; ++slot) barrier_init(own.full(slot), 1), barrier_init(own.empty(slot), 2 * consumer_warps + 1);
    }
    __device__ __forceinline__ void put(uint32 nth, const Tile& tile) const {
        barrier_wait(own.empty(nth), TileSlots::parity(nth) ^ 1);
        #pragma unroll
        for (int to = 0; to < 2; ++to) {
            // Without Tile::begin, which the backward pass does not use.
            store_ints_in(address_in(to, own.place(nth)), tile.first, tile.head, tile.batch, tile.blocks);
            barrier_arrive_written_in(address_in(to, own.full(nth)));
        }
    }
    __device__ __forceinline__ Tile get(uint32 nth) const {
        barrier_wait<Writers::kCluster>(own.full(nth), TileSlots::parity(nth));
        return own.get(nth);
    }
    // By rank 1's producer.
    __device__ __forceinline__ void release_one(uint32 nth) const { barrier_arrive_in(address_in(0, own.empty(nth))); }
    // By each consumer warp.
    __device__ __forceinline__ void release(uint32 nth, int lane) const {
        __syncwarp();  // every lane has read
        if (lane == 0) release_one(nth);
    }
};
