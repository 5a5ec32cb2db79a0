// Stands in for device/ptx/elect.cuh. The PTX ISA leaves open which lane is chosen: the last one.

#include "device/types.cuh"

__device__ __forceinline__ bool elect_one() {
    __syncwarp();  // whether all lanes take part
    return threadIdx.x % 32 == 31;
}
