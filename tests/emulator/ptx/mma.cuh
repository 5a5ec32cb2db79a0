// Stands in for device/ptx/mma.cuh. The engine multiplies once all lanes have come, in fp32
// and in the order of wgmma.

#include "device/types.cuh"

constexpr emulator::Element kMmaElement = kIsBf16 ? emulator::Element::kBf16 : emulator::Element::kFp16;

__device__ __forceinline__ void mma_k16(float (&c)[4], const uint32 (&a)[4], uint32 b0, uint32 b1) {
    const uint32 b[2] = {b0, b1};
    emulator::multiply(c, a, b, 4, 2, kMmaElement);
}
__device__ __forceinline__ void mma_k16_fp16(float (&c)[4], const uint32 (&a)[4], uint32 b0, uint32 b1) {
    const uint32 b[2] = {b0, b1};
    emulator::multiply(c, a, b, 4, 2, emulator::Element::kFp16);
}
__device__ __forceinline__ void mma_k8(float (&c)[4], const uint32 (&a)[4], uint32 b0) {
    emulator::multiply(c, a, &b0, 2, 1, kMmaElement);
}
__device__ __forceinline__ void mma_tf32(float (&c)[4], const uint32 (&a)[4], const uint32 (&b)[2]) {
    emulator::multiply(c, a, b, 4, 2, emulator::Element::kTf32);
}
