// Stands in for device/ptx/cp_async.cuh. A copy's bytes arrive at the wait that covers the
// copy. From the call to that wait the target holds NaN.

#include "device/types.cuh"

template <int kBytes>
__device__ __forceinline__ void cp_async(uint32 target, const void* source, bool valid) {
    static_assert(kBytes == 4 || kBytes == 8 || kBytes == 16, "the sizes of cp.async");
    emulator::cp_async(target, source, kBytes, valid);
}
__device__ __forceinline__ void cp_async_arrive(uint32 barrier) { emulator::cp_async_arrive(barrier); }
__device__ __forceinline__ void cp_async_commit() { emulator::cp_async_commit(); }
template <int kPending>
__device__ __forceinline__ void cp_async_wait() { emulator::cp_async_wait(kPending); }
