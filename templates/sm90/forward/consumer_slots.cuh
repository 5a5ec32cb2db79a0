// How a consumer warpgroup of the sm90 forward kernel waits for slots of Q, K and V, releases them,
// and skips blocks that other warpgroups need and this one does not. It knows barriers and rings,
// and nothing of the products.
//
// Some arguments are references to integers. NVRTC then gives the kernel the registers that it
// gives to lambdas in the kernel (docs/tuning/sm90-forward.md).

#include "device/attention/block_list.cuh"
#include "device/ptx/mbarrier.cuh"
#include "device/ptx/sync.cuh"
#include "device/schedule/ring.cuh"
#include "sm90/forward/shared.cuh"

// Waits for a slot of K or V, which wgmma reads next.
__device__ __forceinline__ void wait_full(uint32 full, uint32 parity) {
    barrier_wait(full, parity);
    if constexpr (kPagesByThreads) fence_async_proxy();
}

// Waits for K. Under a block mask `listed` becomes its block.
__device__ __forceinline__ void wait_full_k(const Shared& shared, const Ring<kKStages>& ring, ListedTile& listed) {
    wait_full(shared.full_k(ring.slot), ring.parity);
    if constexpr (kHasBlockMask) listed = shared.listed_slots.listed(ring.slot);
}

// Releases a slot of K. `arrives` holds in one thread of the warpgroup. With kWarpsReleaseK each
// warp reads what lies beside the slot, a listed block or scales, and arrives for itself.
__device__ __forceinline__ void release_slot_k(uint32 empty, const int& lane, const bool& arrives) {
    if constexpr (kWarpsReleaseK) {
        __syncwarp();
        if (lane == 0) barrier_arrive(empty);
    } else {
        if (arrives) barrier_arrive(empty);
    }
}

// Releases a slot whose contents the warpgroup does not read. One thread releases it for four
// warps, so all four must have seen the contents arrive. Elsewhere they wait for the same wgmma
// first. `barrier` is the warpgroup's.
__device__ __forceinline__ void skip_slot(uint32 full, uint32 parity, uint32 empty, bool arrives, int barrier) {
    barrier_wait(full, parity);
    warpgroup_barrier(barrier);
    if (arrives) barrier_arrive(empty);
}
__device__ __forceinline__ void skip_slot_k(const Shared& shared, Ring<kKStages>& ring, int lane, bool arrives, int barrier) {
    if constexpr (kWarpsReleaseK) {
        barrier_wait(shared.full_k(ring.slot), ring.parity);
        release_slot_k(shared.empty_k(ring.slot), lane, arrives);
    } else {
        skip_slot(shared.full_k(ring.slot), ring.parity, shared.empty_k(ring.slot), arrives, barrier);
    }
    ring.advance();
}
__device__ __forceinline__ void skip_slot_v(const Shared& shared, Ring<kVStages>& ring, bool arrives, int barrier) {
    skip_slot(shared.full_v(ring.slot), ring.parity, shared.empty_v(ring.slot), arrives, barrier);
    ring.advance();
}

// Passes the Q slot of a tile whose keys no row of the warpgroup sees. With kStoresFromQ the tile's
// O goes to that slot. Then the slot before the ring's, which holds the last stored O (the kernel's
// o_slot), is released once its copy has ended.
__device__ __forceinline__ void skip_slot_q(const Shared& shared, Ring<kQStages>& ring, const Tile& tile, const int& consumer, const bool& arrives) {
    if constexpr (kStoresFromQ) {
        if (tile.blocks > 0) {
            if (arrives) {
                bulk_wait_read();
                barrier_arrive(shared.empty_q(ring.slot ^ 1, consumer));
            }
            barrier_wait(shared.full_q(ring.slot, consumer), ring.parity);
            ring.advance();
        } else {
            if (arrives) bulk_wait_read();  // the epilogue is about to write the slot again
            warpgroup_barrier(1 + consumer);
        }
    } else if (tile.blocks > 0) {
        skip_slot(shared.full_q(ring.slot, consumer), ring.parity, shared.empty_q(ring.slot, consumer), arrives, 1 + consumer);
        ring.advance();
    }
}
