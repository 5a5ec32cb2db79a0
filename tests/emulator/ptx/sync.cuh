// Stands in for device/ptx/sync.cuh. Kernels of a stream run one after the other. The wait for the
// previous grid may show what that grid wrote (engine/memory.cpp). The engine checks the fence of
// the asynchronous proxy: wgmma and TMA may read only stores that their thread has fenced.

#include "device/types.cuh"

template <int kThreads>
__device__ __forceinline__ void named_barrier(int id) { emulator::named_barrier(id, kThreads); }
template <int kThreads>
__device__ __forceinline__ void named_barrier_arrive(int id) { emulator::named_barrier_arrive(id, kThreads); }
__device__ __forceinline__ void warpgroup_barrier(int id) { named_barrier<128>(id); }
__device__ __forceinline__ bool warpgroup_all(int id, bool vote) { return emulator::named_barrier_all(id, 128, vote); }

__device__ __forceinline__ void fence_async_proxy() { emulator::fence_async_proxy(); }
__device__ __forceinline__ void fence_async_proxy_of_all() { emulator::fence_async_proxy(); }

__device__ __forceinline__ void wait_for_previous_grid() { emulator::wait_for_previous_grid(); }
__device__ __forceinline__ void start_next_grid() {}
