// One lane of a warp for what a single thread does (PTX ISA, "elect.sync").

#include "device/types.cuh"

// Whether this lane is the one that the hardware chooses. All lanes of the warp call it together.
// Behind a branch on the call the compiler knows that one lane runs, so copies take their addresses
// from uniform registers. Behind a branch on a lane's number each copy gets a loop over the lanes
// that may run, with a move to a uniform register for each operand.
//
// The branch is to enclose all that the lane does. Two kernels that stored the result and combined
// it with other conditions failed on a GPU (docs/tuning/sm90-forward.md). NVRTC 13.0 predicated the
// moves there and not the copy, which may be the cause.
__device__ __forceinline__ bool elect_one() {
    uint32 is_elected;
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "elect.sync _|p, 0xffffffff;\n"
        "selp.u32 %0, 1, 0, p;\n"
        "}\n" : "=r"(is_elected));
    return is_elected != 0;
}
