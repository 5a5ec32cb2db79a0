// mbarriers in shared memory (PTX ISA, "mbarrier"): one function for each instruction in use.
//
// A barrier's phases alternate in parity. A waiter names the parity of the phase whose end it waits
// for. A fresh barrier is in phase 0, so a wait for parity 1 passes at once: that is how a producer
// finds empty slots at the start. schedule/ring.cuh counts phases; this file knows single barriers
// alone.

#include "device/types.cuh"

__device__ __forceinline__ void barrier_init(uint32 barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(barrier), "r"(arrivals) : "memory");
}
// Makes the initialised barriers visible to the copy engine.
__device__ __forceinline__ void barrier_init_done() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void barrier_arrive(uint32 barrier) {
    asm volatile("mbarrier.arrive.release.cta.shared::cta.b64 _, [%0];" :: "r"(barrier) : "memory");
}
// Arrives, and keeps the phase open until `bytes` have been copied as well.
__device__ __forceinline__ void barrier_expect(uint32 barrier, uint32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [%0], %1;"
                 :: "r"(barrier), "r"(bytes) : "memory");
}

// Who wrote what a waiter reads after its wait: threads of its own CTA (and copies that the barrier
// counts), or threads of the whole cluster.
enum class Writers { kCta, kCluster };

// Whether the phase of this parity is over; the hardware may suspend the thread for a while before
// it says no.
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
template <Writers kWriters = Writers::kCta>
__device__ __forceinline__ void barrier_wait(uint32 barrier, uint32 parity) {
    while (!barrier_try_wait<kWriters>(barrier, parity)) {}
}
