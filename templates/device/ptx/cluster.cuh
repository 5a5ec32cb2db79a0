// Thread-block clusters (PTX ISA, "cluster"): ranks, addresses in another CTA's shared memory, and
// stores, copies and arrivals there. One function wraps each instruction. The arguments `there` and
// `barrier` are addresses from address_in. schedule/cluster.cuh knows the protocol between CTAs;
// this file does not.

#include "device/types.cuh"

__device__ __forceinline__ uint32 cluster_rank() {
    uint32 rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}
// Maps an address of this CTA's shared memory to the same place in the CTA of the given rank.
__device__ __forceinline__ uint32 address_in(uint32 rank, uint32 address) {
    uint32 there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
    return there;
}
// Waits until all threads of the cluster have arrived. Writes to shared memory before the call are
// visible to the whole cluster after it.
__device__ __forceinline__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}

// Arrives on a barrier of another CTA, to release a slot. The arrival orders this thread's earlier
// reads and its writes to its own shared memory. A release at cluster scope would also wait for all
// of the thread's additions to device memory.
__device__ __forceinline__ void barrier_arrive_in(uint32 barrier) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" :: "r"(barrier) : "memory");
}
// Arrives on a barrier of another CTA after this thread has written to that CTA's shared memory.
// The release orders these writes before the arrival. The reader waits with Writers::kCluster.
__device__ __forceinline__ void barrier_arrive_written_in(uint32 barrier) {
    asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" :: "r"(barrier) : "memory");
}

// Stores four ints to another CTA's shared memory. `there` is aligned to 16 bytes.
__device__ __forceinline__ void store_ints_in(uint32 there, int a, int b, int c, int d) {
    asm volatile("st.shared::cluster.v4.s32 [%0], {%1, %2, %3, %4};"
                 :: "r"(there), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}
// Copies `bytes` from this CTA's shared memory to another CTA. The other CTA's `barrier` counts the
// bytes.
__device__ __forceinline__ void bulk_copy_in(uint32 there, uint32 from, uint32 bytes, uint32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 :: "r"(there), "r"(from), "r"(bytes), "r"(barrier) : "memory");
}
