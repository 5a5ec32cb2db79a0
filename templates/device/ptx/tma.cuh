// Copies by the copy engine (PTX ISA, "cp.async.bulk.tensor", "cp.async.bulk",
// "cp.reduce.async.bulk").
//
// Coordinates count elements, the innermost dimension first. A load's bytes are counted by a
// barrier in shared memory; stores and additions are grouped by the thread that issues them.
// layout/tensor_map.cuh knows what the coordinates mean.

#include "device/types.cuh"

struct alignas(64) TensorMap { uint64 opaque[16]; };

__device__ __forceinline__ void tma_prefetch(const TensorMap& map) {
    asm volatile("prefetch.tensormap [%0];" :: "l"(&map) : "memory");
}

// Copies go to this CTA's own shared memory. Before PTX ISA 8.6 `shared::cluster` is the only name
// for it; compilers that know GPUs past sm_90 have `shared::cta`, without which sm_120 asks at each
// copy whose memory it is.
constexpr bool kNamesOwnShared = kArch >= 100;

__device__ __forceinline__ void tma_load_4d(uint32 to, const TensorMap& map, uint32 barrier, int x0, int x1, int x2, int x3) {
    if constexpr (kNamesOwnShared) {
        asm volatile("cp.async.bulk.tensor.4d.shared::cta.global.mbarrier::complete_tx::bytes "
                     "[%0], [%1, {%2, %3, %4, %5}], [%6];"
                     :: "r"(to), "l"(&map), "r"(x0), "r"(x1), "r"(x2), "r"(x3), "r"(barrier) : "memory");
    } else {
        asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
                     "[%0], [%1, {%2, %3, %4, %5}], [%6];"
                     :: "r"(to), "l"(&map), "r"(x0), "r"(x1), "r"(x2), "r"(x3), "r"(barrier) : "memory");
    }
}
__device__ __forceinline__ void tma_load_5d(uint32 to, const TensorMap& map, uint32 barrier,
                                            int x0, int x1, int x2, int x3, int x4) {
    if constexpr (kNamesOwnShared) {
        asm volatile("cp.async.bulk.tensor.5d.shared::cta.global.mbarrier::complete_tx::bytes "
                     "[%0], [%1, {%2, %3, %4, %5, %6}], [%7];"
                     :: "r"(to), "l"(&map), "r"(x0), "r"(x1), "r"(x2), "r"(x3), "r"(x4), "r"(barrier) : "memory");
    } else {
        asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes "
                     "[%0], [%1, {%2, %3, %4, %5, %6}], [%7];"
                     :: "r"(to), "l"(&map), "r"(x0), "r"(x1), "r"(x2), "r"(x3), "r"(x4), "r"(barrier) : "memory");
    }
}

// To the same place in both CTAs of a cluster of two. Each CTA's barrier counts the bytes that it
// gets.
constexpr uint16 kBothCtas = 3;
__device__ __forceinline__ void tma_load_both_4d(uint32 to, const TensorMap& map, uint32 barrier,
                                                 int x0, int x1, int x2, int x3) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
                 "[%0], [%1, {%2, %3, %4, %5}], [%6], %7;"
                 :: "r"(to), "l"(&map), "r"(x0), "r"(x1), "r"(x2), "r"(x3), "r"(barrier), "h"(kBothCtas) : "memory");
}
__device__ __forceinline__ void tma_load_both_5d(uint32 to, const TensorMap& map, uint32 barrier,
                                                 int x0, int x1, int x2, int x3, int x4) {
    asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
                 "[%0], [%1, {%2, %3, %4, %5, %6}], [%7], %8;"
                 :: "r"(to), "l"(&map), "r"(x0), "r"(x1), "r"(x2), "r"(x3), "r"(x4), "r"(barrier), "h"(kBothCtas)
                 : "memory");
}

// Stores run in the order of issue; each commit ends a group of this thread's.
__device__ __forceinline__ void tma_store_4d(const TensorMap& map, uint32 from, int x0, int x1, int x2, int x3) {
    asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%1, %2, %3, %4}], [%5];"
                 :: "l"(&map), "r"(x0), "r"(x1), "r"(x2), "r"(x3), "r"(from) : "memory");
}
__device__ __forceinline__ void tma_store_5d(const TensorMap& map, uint32 from, int x0, int x1, int x2, int x3, int x4) {
    asm volatile("cp.async.bulk.tensor.5d.global.shared::cta.bulk_group [%0, {%1, %2, %3, %4, %5}], [%6];"
                 :: "l"(&map), "r"(x0), "r"(x1), "r"(x2), "r"(x3), "r"(x4), "r"(from) : "memory");
}
__device__ __forceinline__ void tma_store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Contiguous bytes, a multiple of 16 and aligned to 16.
__device__ __forceinline__ void bulk_load(uint32 to, const void* from, uint32 bytes, uint32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 :: "r"(to), "l"(__cvta_generic_to_global(from)), "r"(bytes), "r"(barrier) : "memory");
}
// Adds floats of shared memory to floats in device memory. Each call is a group of its own of this
// thread.
__device__ __forceinline__ void bulk_add(float* to, uint32 from, uint32 bytes) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;\n"
                 "cp.async.bulk.commit_group;"
                 :: "l"(__cvta_generic_to_global(to)), "r"(from), "r"(bytes) : "memory");
}
// Waits until this thread's groups have read shared memory.
__device__ __forceinline__ void bulk_wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
// Waits until what this thread's groups write has arrived.
__device__ __forceinline__ void bulk_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
