// Stands in for device/ptx/tma.cuh. A load's target holds NaN from the call on. Its bytes
// arrive when no warp can go on without them, in a random order among all loads in flight. A store
// reads shared memory at the wait for that, and writes device memory at the wait for the writes.

#include "device/types.cuh"

struct alignas(64) TensorMap { uint64 opaque[16]; };

__device__ __forceinline__ void tma_prefetch(const TensorMap&) {}

__device__ __forceinline__ void tma_load_4d(uint32 to, const TensorMap& map, uint32 barrier, int x0, int x1, int x2, int x3) {
    const int at[4] = {x0, x1, x2, x3};
    emulator::tma_load(to, &map, barrier, 4, at, 0);
}
__device__ __forceinline__ void tma_load_5d(uint32 to, const TensorMap& map, uint32 barrier,
                                            int x0, int x1, int x2, int x3, int x4) {
    const int at[5] = {x0, x1, x2, x3, x4};
    emulator::tma_load(to, &map, barrier, 5, at, 0);
}

constexpr uint16 kBothCtas = 3;
__device__ __forceinline__ void tma_load_both_4d(uint32 to, const TensorMap& map, uint32 barrier,
                                                 int x0, int x1, int x2, int x3) {
    const int at[4] = {x0, x1, x2, x3};
    emulator::tma_load(to, &map, barrier, 4, at, kBothCtas);
}
__device__ __forceinline__ void tma_load_both_5d(uint32 to, const TensorMap& map, uint32 barrier,
                                                 int x0, int x1, int x2, int x3, int x4) {
    const int at[5] = {x0, x1, x2, x3, x4};
    emulator::tma_load(to, &map, barrier, 5, at, kBothCtas);
}

__device__ __forceinline__ void tma_store_4d(const TensorMap& map, uint32 from, int x0, int x1, int x2, int x3) {
    const int at[4] = {x0, x1, x2, x3};
    emulator::tma_store(&map, from, 4, at);
}
__device__ __forceinline__ void tma_store_5d(const TensorMap& map, uint32 from, int x0, int x1, int x2, int x3, int x4) {
    const int at[5] = {x0, x1, x2, x3, x4};
    emulator::tma_store(&map, from, 5, at);
}
__device__ __forceinline__ void tma_store_commit() { emulator::bulk_commit(); }

__device__ __forceinline__ void bulk_load(uint32 to, const void* from, uint32 bytes, uint32 barrier) {
    emulator::bulk_load(to, from, bytes, barrier);
}
__device__ __forceinline__ void bulk_add(float* to, uint32 from, uint32 bytes) {
    emulator::bulk_add(to, from, bytes);
    emulator::bulk_commit();
}
__device__ __forceinline__ void bulk_wait_read() { emulator::bulk_wait_read(); }
__device__ __forceinline__ void bulk_wait() { emulator::bulk_wait(); }
