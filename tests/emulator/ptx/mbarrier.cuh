// Stands in for device/ptx/mbarrier.cuh. The engine counts phases, arrivals and bytes. It reports a
// wait that cannot end as a deadlock. The scope and the proxy of an arrival are not modelled.

#include "device/types.cuh"

__device__ __forceinline__ void barrier_init(uint32 barrier, int arrivals) { emulator::barrier_init(barrier, arrivals); }
__device__ __forceinline__ void barrier_init_done() {}

__device__ __forceinline__ void barrier_arrive(uint32 barrier) { emulator::barrier_arrive(barrier); }
__device__ __forceinline__ void barrier_expect(uint32 barrier, uint32 bytes) { emulator::barrier_expect(barrier, bytes); }

enum class Writers { kCta, kCluster };

template <Writers kWriters>
__device__ __forceinline__ bool barrier_try_wait(uint32 barrier, uint32 parity) {
    emulator::barrier_wait(barrier, parity);
    return true;
}
__device__ __forceinline__ bool barrier_test_wait(uint32 barrier, uint32 parity) {
    return emulator::barrier_test_wait(barrier, parity);
}
template <Writers kWriters = Writers::kCta>
__device__ __forceinline__ void barrier_wait(uint32 barrier, uint32 parity) {
    while (!barrier_try_wait<kWriters>(barrier, parity)) {}
}
__device__ __forceinline__ void barrier_wait_as_warp(uint32 barrier, uint32 parity) {
    barrier_wait(barrier, parity);
    __syncwarp();
}
