// The tiles that a producer passes to the consumers of its CTA. Both number the tiles in the order
// in which the CTA does them (`nth`). It knows Tile and barriers but no operand.
// schedule/cluster.cuh does the same for a cluster.
//
// Shared memory holds kSlots tiles of kTileBytes without a swizzle, then kSlots full barriers and
// kSlots empty barriers, for the kernel's whole life. Consumers hold a tile's slot to the tile's
// end and read the next slot before, so there are more than two slots.

#include "device/ptx/shared.cuh"
#include "device/schedule/ring.cuh"
#include "device/schedule/tile_order.cuh"

struct TileSlots {
    static constexpr int kSlots = 4;
    static constexpr bool kPassesBegin = kHasWindow || kMaySplit || kAlternates;
    static constexpr int kTileBytes = kPassesBegin ? 32 : 16;
    static constexpr int kBytes = kSlots * (kTileBytes + 8 + 8);
    uint32 base;  // address of the tiles, full barriers and empty barriers

    __device__ __forceinline__ uint32 place(uint32 nth) const { return base + nth % kSlots * kTileBytes; }
    __device__ __forceinline__ uint32 full(uint32 nth) const { return base + kSlots * kTileBytes + nth % kSlots * 8; }
    __device__ __forceinline__ uint32 empty(uint32 nth) const { return base + kSlots * (kTileBytes + 8) + nth % kSlots * 8; }
    static __device__ __forceinline__ uint32 parity(uint32 nth) { return nth / kSlots & 1; }

    __device__ __forceinline__ void init(int consumer_warps) const {
        for (int slot = 0; slot < kSlots; ++slot) barrier_init(full(slot), 1), barrier_init(empty(slot), consumer_warps);
    }
    __device__ __forceinline__ void put(uint32 nth, const Tile& tile) const {
        // Orders the consumers' reads of the slot's previous tile before the stores below.
        barrier_wait(empty(nth), parity(nth) ^ 1);
        store_four_ints(place(nth), tile.first, tile.head, tile.batch, tile.blocks);
        if constexpr (kPassesBegin) store_int(place(nth) + 16, tile.begin);
        if constexpr (kMaySplit) store_int(place(nth) + 20, tile.split);
        // Orders the stores before the consumers' reads.
        barrier_arrive(full(nth));
    }
    __device__ __forceinline__ Tile get(uint32 nth) const {
        // Orders the producer's stores before the loads below.
        barrier_wait(full(nth), parity(nth));
        const int4 words = load_four_ints(place(nth));
        Tile tile = {words.x, words.y, words.z, words.w, 0, 0};
        if constexpr (kPassesBegin) tile.begin = load_int(place(nth) + 16);
        if constexpr (kMaySplit) tile.split = load_int(place(nth) + 20);
        return tile;
    }
    // Each consumer warp calls it, after its last read of the slot.
    __device__ __forceinline__ void release(uint32 nth, int lane) const {
        __syncwarp();  // orders the reads of every lane before the arrival
        if (lane == 0) barrier_arrive(empty(nth));
    }
};
