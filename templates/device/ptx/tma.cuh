// Copies by the copy engine, TMA (PTX ISA, "cp.async.bulk.tensor", "cp.async.bulk",
// "cp.reduce.async.bulk").
//
// Coordinates count elements, the innermost dimension first. A barrier in shared memory counts the
// bytes of a load. The thread that issues stores and additions groups them. layout/tensor_map.cuh
// knows the meaning of the coordinates; this file does not.

#include "device/types.cuh"

struct alignas(64) TensorMap { uint64 opaque[16]; };

__device__ __forceinline__ void tma_prefetch(const TensorMap& map) {
    asm volatile("prefetch.tensormap [%0];" :: "l"(&map) : "memory");
}

// Whether the target may be named `shared::cta`. All loads but the multicast ones go to this CTA's
// own shared memory. Before PTX ISA 8.6 `shared::cluster` is the only name for it. Compilers that
// know GPUs past sm_90 have `shared::cta`. Without it, sm_120 looks up at each copy whose shared
// memory the address is in.
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

// Loads a box to the same place in both CTAs of a cluster of two. Each CTA's barrier counts the
// bytes that this CTA receives.
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

// Stores run in the order of issue. Each commit ends a group of this thread's stores.
__device__ __forceinline__ void tma_store_4d(const TensorMap& map, uint32 from, int x0, int x1, int x2, int x3) {
    asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%1, %2, %3, %4}], [%5];"
                 :: "l"(&map), "r"(x0), "r"(x1), "r"(x2), "r"(x3), "r"(from) : "memory");
}
__device__ __forceinline__ void tma_store_5d(const TensorMap& map, uint32 from, int x0, int x1, int x2, int x3, int x4) {
    asm volatile("cp.async.bulk.tensor.5d.global.shared::cta.bulk_group [%0, {%1, %2, %3, %4, %5}], [%6];"
                 :: "l"(&map), "r"(x0), "r"(x1), "r"(x2), "r"(x3), "r"(x4), "r"(from) : "memory");
}
__device__ __forceinline__ void tma_store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Copies contiguous bytes to shared memory. `bytes` is a multiple of 16, and both addresses are
// aligned to 16.
__device__ __forceinline__ void bulk_load(uint32 to, const void* from, uint32 bytes, uint32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 :: "r"(to), "l"(__cvta_generic_to_global(from)), "r"(bytes), "r"(barrier) : "memory");
}
// Adds floats in shared memory to floats in device memory. Each call is a group of its own of this
// thread.
__device__ __forceinline__ void bulk_add(float* to, uint32 from, uint32 bytes) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;\n"
                 "cp.async.bulk.commit_group;"
                 :: "l"(__cvta_generic_to_global(to)), "r"(from), "r"(bytes) : "memory");
}
// Waits until this thread's groups have read shared memory. The buffer may then be overwritten.
__device__ __forceinline__ void bulk_wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
// Waits until the writes of this thread's groups have arrived in device memory.
__device__ __forceinline__ void bulk_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
