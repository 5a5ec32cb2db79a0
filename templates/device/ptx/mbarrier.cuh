// mbarriers in shared memory (PTX ISA, "mbarrier"), one function for each instruction in use.
//
// The phases of a barrier alternate in parity. A waiter names the parity of the phase whose end it
// waits for. A fresh barrier is in phase 0, so a wait for parity 1 passes at once: a producer finds
// empty slots at the start that way. schedule/ring.cuh counts phases. This file knows single
// barriers and no ring.

#include "device/types.cuh"

// Sets up a barrier whose phases each take `arrivals` arrivals.
__device__ __forceinline__ void barrier_init(uint32 barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(barrier), "r"(arrivals) : "memory");
}
// Orders the initialisation of barriers before their use by the copy engine and by other CTAs of
// the cluster. The threads of the CTA still need a CTA or cluster barrier.
__device__ __forceinline__ void barrier_init_done() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Arrives with release at CTA scope: this thread's earlier accesses come before the waiter's
// accesses after its wait.
__device__ __forceinline__ void barrier_arrive(uint32 barrier) {
    asm volatile("mbarrier.arrive.release.cta.shared::cta.b64 _, [%0];" :: "r"(barrier) : "memory");
}
// Arrives, and keeps the phase open until `bytes` bytes have been copied too.
__device__ __forceinline__ void barrier_expect(uint32 barrier, uint32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [%0], %1;"
                 :: "r"(barrier), "r"(bytes) : "memory");
}

// The threads whose writes a waiter reads after its wait. kCta: threads of the waiter's CTA, and
// copies whose bytes the barrier counts. kCluster: threads of the whole cluster.
enum class Writers { kCta, kCluster };

// Returns whether the phase of this parity is over. The hardware may suspend the thread for a while
// before it returns false. The acquire orders the wait before the thread's later accesses, at the
// scope of kWriters.
template <Writers kWriters>
__device__ __forceinline__ bool barrier_try_wait(uint32 barrier, uint32 parity) {
    uint32 done;
    if constexpr (kWriters == Writers::kCta) {
        asm volatile(
            "{\n"
            ".reg .pred p;\n"
            "mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 p, [%1], %2;\n"
            "selp.u32 %0, 1, 0, p;\n"
            "}\n" : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
    } else {
        asm volatile(
            "{\n"
            ".reg .pred p;\n"
            "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n"
            "selp.u32 %0, 1, 0, p;\n"
            "}\n" : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
    }
    return done != 0;
}
// The same without any delay, for writers of the waiter's CTA.
__device__ __forceinline__ bool barrier_test_wait(uint32 barrier, uint32 parity) {
    uint32 done;
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "mbarrier.test_wait.parity.acquire.cta.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n"
        "}\n" : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
    return done != 0;
}
template <Writers kWriters = Writers::kCta>
__device__ __forceinline__ void barrier_wait(uint32 barrier, uint32 parity) {
    while (!barrier_try_wait<kWriters>(barrier, parity)) {}
}

// A wait of all lanes of a warp, of which one then starts the copies of the next phase.
// `__syncwarp` keeps every lane until all have seen this phase, so none misses it.
__device__ __forceinline__ void barrier_wait_as_warp(uint32 barrier, uint32 parity) {
    barrier_wait(barrier, parity);
    __syncwarp();
}
