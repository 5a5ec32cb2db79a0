// Two blocks of threads that share their shared memory (PTX ISA, "cluster"): an address in the other one's, arrivals on its
// barriers, copies into it, one tensor copy for both, and the tiles that one passes on to both.

__device__ __forceinline__ uint32 cluster_rank() {
    uint32 rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}
// The same place in the shared memory of the block of that rank.
__device__ __forceinline__ uint32 address_in(uint32 rank, uint32 address) {
    uint32 there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
    return there;
}
// All threads of both blocks.
__device__ __forceinline__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}
// `barrier` is an address from address_in. Orders what this thread has read and wrote to its own shared memory, as a slot's release
// needs it. (Release at the cluster's scope waits for all of a thread's additions in device memory.)
__device__ __forceinline__ void barrier_arrive_in(uint32 barrier) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" :: "r"(barrier) : "memory");
}
__device__ __forceinline__ void barrier_arrive_in_both(uint32 barrier) {
    barrier_arrive_in(address_in(0, barrier)), barrier_arrive_in(address_in(1, barrier));
}
// The same after writing to the other block's shared memory, and waiting for it.
__device__ __forceinline__ void barrier_arrive_written_in(uint32 barrier) {
    asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" :: "r"(barrier) : "memory");
}
__device__ __forceinline__ void barrier_wait_written(uint32 barrier, uint32 parity) {
    uint32 done = 0;
    while (!done) {
        asm volatile(
            "{\n"
            ".reg .pred p;\n"
            "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n"
            "selp.u32 %0, 1, 0, p;\n"
            "}\n" : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
    }
}
// A copy from this block's shared memory; `to` and `barrier` are addresses from address_in.
__device__ __forceinline__ void bulk_copy_in(uint32 to, uint32 from, uint32 bytes, uint32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" :: "r"(to), "r"(from), "r"(bytes), "r"(barrier) : "memory");
}
// A box to the same place of both blocks; each one's `barrier` counts the bytes that it gets.
__device__ __forceinline__ void tma_load_both(uint32 to, const TensorMap& map, uint32 barrier, int col, int row, int head, const MapRows& rows) {
    if constexpr (kIsVarlen) {
        asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%2, %3, %4, %5, %6}], [%7], %8;"
                     :: "r"(to), "l"(&map), "r"(col), "r"(row + rows.shift), "r"(kMapRows), "r"(rows.end), "r"(head), "r"(barrier), "h"(uint16(3)) : "memory");
    } else {
        asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%2, %3, %4, %5}], [%6], %7;"
                     :: "r"(to), "l"(&map), "r"(col), "r"(row), "r"(head), "r"(rows.batch), "r"(barrier), "h"(uint16(3)) : "memory");
    }
}

// TileSlots for a cluster: the producer of rank 0 passes tiles on to both blocks. What it waits for before it uses a slot anew
// is that every consumer warp of both and the other producer are done with it.
struct ClusterTileSlots {
    TileSlots own;

    __device__ __forceinline__ void init(int consumer_warps) const {
        for (int slot = 0; slot < TileSlots::kSlots; ++slot) barrier_init(own.full(slot), 1), barrier_init(own.empty(slot), 2 * consumer_warps + 1);
    }
    __device__ __forceinline__ void put(uint32 turn, const Tile& tile) const {
        barrier_wait(own.empty(turn), TileSlots::parity(turn) ^ 1);
        #pragma unroll
        for (int to = 0; to < 2; ++to) {
            // Without the first block, which consumers of the backward pass have no use for.
            asm volatile("st.shared::cluster.v4.s32 [%0], {%1, %2, %3, %4};" :: "r"(address_in(to, own.place(turn))), "r"(tile.first), "r"(tile.head), "r"(tile.batch), "r"(tile.blocks) : "memory");
            barrier_arrive_written_in(address_in(to, own.full(turn)));
        }
    }
    __device__ __forceinline__ Tile get(uint32 turn) const {
        barrier_wait_written(own.full(turn), TileSlots::parity(turn));
        return own.get(turn);
    }
    // By rank 1's producer.
    __device__ __forceinline__ void release_one(uint32 turn) const { barrier_arrive_in(address_in(0, own.empty(turn))); }
    // By each consumer warp.
    __device__ __forceinline__ void release(uint32 turn, int lane) const {
        __syncwarp();  // every lane has read
        if (lane == 0) release_one(turn);
    }
};
