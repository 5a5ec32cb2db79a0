// A thread of a consumer warpgroup of the sm90 backward kernels, and how the warpgroup releases
// slots of shared memory.

#include "device/schedule/ring.cuh"

struct Consumer {
    const int index;  // of the warpgroup among the consumers
    const int thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
    const bool arrives = thread == 0;  // one thread speaks for the warpgroup

    __device__ __forceinline__ explicit Consumer(int index) : index(index) {}
    // After the wait for a product that read the slot: all four warps' reads are done with it.
    __device__ __forceinline__ void release(uint32 empty) const {
        if (arrives) barrier_arrive(empty);
    }
    // A slot with statistics, which each warp has read by itself.
    __device__ __forceinline__ void release_by_warp(uint32 empty) const {
        __syncwarp();  // every lane has read
        if (lane == 0) barrier_arrive(empty);
    }
};
