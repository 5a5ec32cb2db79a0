// Barriers among threads of a CTA, fences between the generic and the asynchronous proxy, the wait
// for the previous kernel and the start of the next one (PTX ISA, "bar.sync", "fence.proxy.async",
// "griddepcontrol").
// Schedules call these functions. This file knows no barrier's number and no schedule.

#include "device/types.cuh"

// Waits until kThreads threads, in whole warps, have arrived at the named barrier. Accesses to
// memory before the call come before those after it, for all of these threads. __syncthreads uses
// barrier 0.
template <int kThreads>
__device__ __forceinline__ void named_barrier(int id) {
    asm volatile("bar.sync %0, %1;" :: "r"(id), "n"(kThreads) : "memory");
}
// Arrives without waiting: this thread is one of the kThreads for which others wait.
template <int kThreads>
__device__ __forceinline__ void named_barrier_arrive(int id) {
    asm volatile("bar.arrive %0, %1;" :: "r"(id), "n"(kThreads) : "memory");
}
__device__ __forceinline__ void warpgroup_barrier(int id) { named_barrier<128>(id); }
// The same for a warpgroup, and whether the vote of each of its threads was true.
__device__ __forceinline__ bool warpgroup_all(int id, bool vote) {
    uint32 all;
    asm volatile(
        "{\n"
        ".reg .pred p, q;\n"
        "setp.ne.u32 q, %2, 0;\n"
        "barrier.red.and.pred p, %1, 128, q;\n"
        "selp.u32 %0, 1, 0, p;\n"
        "}\n" : "=r"(all) : "r"(id), "r"(uint32(vote)) : "memory");
    return all != 0;
}

// Orders this thread's ordinary stores to shared memory before later reads by wgmma or TMA.
__device__ __forceinline__ void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// Orders device-memory accesses that this thread has made or observed before its later asynchronous
// copies.
__device__ __forceinline__ void fence_async_proxy_of_all() { asm volatile("fence.proxy.async;" ::: "memory"); }

// Waits until the previous grid has ended. The writes of that grid are then visible.
__device__ __forceinline__ void wait_for_previous_grid() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
// Lets the next grid start once every CTA of this one has called it or has ended.
__device__ __forceinline__ void start_next_grid() { asm volatile("griddepcontrol.launch_dependents;"); }
