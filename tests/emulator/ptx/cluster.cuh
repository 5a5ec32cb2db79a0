// Stands in for device/ptx/cluster.cuh. A copy to another CTA arrives late: when no warp
// can go on without it. Until then its target holds NaN.

#include "device/types.cuh"

__device__ __forceinline__ uint32 cluster_rank() { return emulator::self->rank; }
__device__ __forceinline__ uint32 address_in(uint32 rank, uint32 address) { return address | (rank + 1) << emulator::kRankShift; }
__device__ __forceinline__ void cluster_sync() { emulator::cluster_sync(); }

__device__ __forceinline__ void barrier_arrive_in(uint32 barrier) { emulator::barrier_arrive(barrier); }
__device__ __forceinline__ void barrier_arrive_written_in(uint32 barrier) { emulator::barrier_arrive(barrier); }

__device__ __forceinline__ void store_ints_in(uint32 there, int a, int b, int c, int d) { emulator::store_ints_in(there, a, b, c, d); }
__device__ __forceinline__ void bulk_copy_in(uint32 there, uint32 from, uint32 bytes, uint32 barrier) {
    emulator::bulk_copy_in(there, from, bytes, barrier);
}
