// Four fp32 values as e4m3 in one word, as an operand of a product of 8 bits takes them (PTX ISA,
// "cvt"). ptx/eight.cuh has conversions of pairs. This file knows no tensor.

#include "device/types.cuh"

// Packs four fp32 values, the first in the lowest byte, rounded to nearest even. Values past 448
// become 448.
__device__ __forceinline__ uint32 pack4_e4m3(float a, float b, float c, float d) {
    uint32 word;
    asm("{\n.reg .b16 low, high;\n"
        "cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
        "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
        "mov.b32 %0, {low, high};\n}\n" : "=r"(word) : "f"(a), "f"(b), "f"(c), "f"(d));
    return word;
}
