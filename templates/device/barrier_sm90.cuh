// mbarriers in shared memory (PTX ISA, "mbarrier"): the producer's copies and the consumers' releases meet on them.
//
// A barrier's phases alternate in parity; a waiter names the parity of the phase whose end it waits for. A fresh barrier
// is in phase 0, so waiting for parity 1 passes at once: that is how a producer finds empty slots at the start.

__device__ __forceinline__ void barrier_init(uint32 barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(barrier), "r"(arrivals) : "memory");
}
// Makes the initialised barriers visible to the copy engine.
__device__ __forceinline__ void barrier_init_done() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

__device__ __forceinline__ void barrier_arrive(uint32 barrier) {
    asm volatile("mbarrier.arrive.release.cta.shared::cta.b64 _, [%0];" :: "r"(barrier) : "memory");
}
// Arrives, and keeps the phase open until `bytes` have been copied as well.
__device__ __forceinline__ void barrier_expect(uint32 barrier, uint32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [%0], %1;" :: "r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ bool barrier_passed(uint32 barrier, uint32 parity) {
    uint32 done;
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n"
        "}\n" : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
    return done != 0;
}
__device__ __forceinline__ void barrier_wait(uint32 barrier, uint32 parity) {
    while (!barrier_passed(barrier, parity)) {}
}

// A position in a ring of slots: the slot, and the parity of its current round.
template <int kSlots>
struct Ring {
    uint32 slot = 0, parity = 0;
    __device__ __forceinline__ void advance() {
        if (++slot == kSlots) slot = 0, parity ^= 1;
    }
    // The parity of the round that the slot before is in.
    __device__ __forceinline__ uint32 parity_before() const { return parity ^ (slot == 0 ? 1 : 0); }
};
