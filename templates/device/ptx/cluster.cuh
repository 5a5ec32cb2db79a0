// Thread-block clusters (PTX ISA, "cluster"): ranks, addresses in another CTA's shared memory, and
// what a CTA writes and signals there. `there` and `barrier` are addresses from address_in.

#include "device/types.cuh"

__device__ __forceinline__ uint32 cluster_rank() {
    uint32 rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}
// The same place in the shared memory of the CTA of that rank.
__device__ __forceinline__ uint32 address_in(uint32 rank, uint32 address) {
    uint32 there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
    return there;
}
// Meets all threads of the cluster.
__device__ __forceinline__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}

// Arrives on another CTA's barrier. The arrival orders what this thread has read, and what it wrote
// to its own shared memory, as the release of a slot needs it. A release at cluster scope would
// wait for all of the thread's additions in device memory.
__device__ __forceinline__ void barrier_arrive_in(uint32 barrier) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" :: "r"(barrier) : "memory");
}
// The same after this thread has written to the other CTA's shared memory. The reader waits with
// Writers::kCluster.
__device__ __forceinline__ void barrier_arrive_written_in(uint32 barrier) {
    asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" :: "r"(barrier) : "memory");
}

__device__ __forceinline__ void store_ints_in(uint32 there, int a, int b, int c, int d) {
    asm volatile("st.shared::cluster.v4.s32 [%0], {%1, %2, %3, %4};"
                 :: "r"(there), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}
// Copies from this CTA's shared memory; the other CTA's `barrier` counts the bytes.
__device__ __forceinline__ void bulk_copy_in(uint32 there, uint32 from, uint32 bytes, uint32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 :: "r"(there), "r"(from), "r"(bytes), "r"(barrier) : "memory");
}
