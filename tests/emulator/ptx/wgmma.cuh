// Stands in for device/ptx/wgmma.cuh. A product's accumulators hold NaN from the call to the wait
// that covers it. If the operands in shared memory change in between, the sums are NaN. A product
// without a fence after the last wait fails. Register counts are not modelled.

#include "device/types.cuh"

__device__ __forceinline__ void wgmma_fence() { emulator::wgmma_fence(); }
__device__ __forceinline__ void wgmma_commit() { emulator::wgmma_commit(); }
template <int kPending>
__device__ __forceinline__ void wgmma_wait() { emulator::wgmma_wait(kPending); }

template <int kTiles>
__device__ __forceinline__ void pin(float (&)[kTiles][4]) {}
template <int kSteps>
__device__ __forceinline__ void pin(uint32 (&)[kSteps][4]) {}

template <int kRegisters>
__device__ __forceinline__ void more_registers() {}
template <int kRegisters>
__device__ __forceinline__ void fewer_registers() {}
