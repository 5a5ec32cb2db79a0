// Stores kVec neighbouring elements of a row to device memory, rounded, in one access of their
// width. Kernels whose lanes hold whole vectors of a row call it. It knows no tile and no bounds:
// the caller checks them.

#include "device/ptx/math.cuh"

template <int kVec>
__device__ __forceinline__ void store_elements(uint16* to, const float (&values)[kVec]) {
    if constexpr (kVec == 8) {
        *reinterpret_cast<uint4*>(to) = make_uint4(pack2(values[0], values[1]), pack2(values[2], values[3]), pack2(values[4], values[5]), pack2(values[6], values[7]));
    } else if constexpr (kVec == 4) {
        *reinterpret_cast<uint2*>(to) = make_uint2(pack2(values[0], values[1]), pack2(values[2], values[3]));
    } else if constexpr (kVec == 2) {
        *reinterpret_cast<uint32*>(to) = pack2(values[0], values[1]);
    } else {
        *to = uint16(pack2(values[0], 0.f));
    }
}

template <int kVec>
__device__ __forceinline__ void store_elements(float* to, const float (&values)[kVec]) {
    if constexpr (kVec == 4) {
        *reinterpret_cast<float4*>(to) = make_float4(values[0], values[1], values[2], values[3]);
    } else if constexpr (kVec == 2) {
        *reinterpret_cast<float2*>(to) = make_float2(values[0], values[1]);
    } else {
        *to = values[0];
    }
}
