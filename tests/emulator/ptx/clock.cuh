// Stands in for device/ptx/clock.cuh: the emulated SM is the CTA's number, and both clocks
// count the host's nanoseconds.

#include "device/types.cuh"

__device__ __forceinline__ uint32 sm_index() { return emulator::sm_index(); }
__device__ __forceinline__ void read_clocks(uint64& cycles, uint64& ns) { emulator::read_clocks(cycles, ns); }
