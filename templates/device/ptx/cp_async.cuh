// Asynchronous copies of single threads from device memory to shared memory (PTX ISA, "cp.async").
// The sm80 and decode layouts fill their tiles with them. This file knows no tile: callers compute
// addresses and validity.

#include "device/types.cuh"

// Copies kBytes (4, 8 or 16). Where `valid` is false, it writes zeros and does not read the source.
template <int kBytes>
__device__ __forceinline__ void cp_async(uint32 target, const void* source, bool valid) {
    const int bytes = valid ? kBytes : 0;
    if constexpr (kBytes == 16) {
        asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;"
                     :: "r"(target), "l"(source), "r"(bytes) : "memory");
    } else {
        asm volatile("cp.async.ca.shared.global [%0], [%1], %3, %2;"
                     :: "r"(target), "l"(source), "r"(bytes), "n"(kBytes) : "memory");
    }
}
// Arrives at an mbarrier once all copies that this thread has started are there. The arrival is one
// of those that the barrier was set up for ("cp.async.mbarrier.arrive.noinc"). It fences nothing:
// before wgmma reads the bytes, its threads call fence_async_proxy after their wait.
__device__ __forceinline__ void cp_async_arrive(uint32 barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" :: "r"(barrier) : "memory");
}
// Ends this thread's current group of copies.
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most kPending of this thread's groups are in flight. Other threads see the copied
// bytes only after a barrier.
template <int kPending>
__device__ __forceinline__ void cp_async_wait() { asm volatile("cp.async.wait_group %0;" :: "n"(kPending) : "memory"); }
