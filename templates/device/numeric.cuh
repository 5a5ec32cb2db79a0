// The elements of tensors, logarithms and the infinity. Of the problem it knows kIsBf16 and kIsFp32
// alone.

#include "device/ptx/math.cuh"
#include "device/ptx/shared.cuh"

constexpr float kLog2E = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;
constexpr float kLog2ERest = 1.925963033500011e-8f, kLn2Rest = -1.904654299957768e-9f;  // the parts of the two that rounding dropped

using Element = Either<kIsFp32, float, uint16>::Type;  // of q, k, v, out, their gradients and bias
constexpr int kElementBytes = sizeof(Element);

__device__ __forceinline__ float infinity() { return __int_as_float(0x7f800000); }

__device__ __forceinline__ float unpack(uint16 value) {
    if constexpr (kIsBf16) {
        return __uint_as_float(uint32(value) << 16);
    } else {
        return fp16_to_float(value);
    }
}

__device__ __forceinline__ float unpack(float value) { return value; }

// Flips the signs of a pair, or of an fp32 element, in shared memory.
__device__ __forceinline__ void negate_pair(uint32 address) {
    const uint32 pair = load_word_in_order(address);
    store_word(address, pair ^ (kIsFp32 ? 0x80000000u : 0x80008000u));
}

// The binary logarithm, up to 4 ulp; of fp32 tensors to 1 ulp, since a row's LSE is in all of the
// row's weights.
__device__ __forceinline__ float log2_approx(float x) {
    if constexpr (kIsFp32) return log2f(x);
    return log2_of_sfu(x);
}

// The natural logarithm of sum * 2^reference. Of fp32 tensors it is rounded once: an error of an
// LSE is an error of all of the row's weights.
__device__ __forceinline__ float natural_log(float sum, float reference) {
    if constexpr (kIsFp32) return fmaf(reference, kLn2, fmaf(reference, kLn2Rest, logf(sum)));
    return (reference + log2_approx(sum)) * kLn2;
}

// A row's LSE in units of log2, as the weights of the backward pass take it. The workspace holds it
// in those units or, of fp32 tensors, in natural ones. It then comes in two parts, since all of the
// row's weights would share one rounding.
struct Log2Lse {
    float high, low = 0.f;
    __device__ __forceinline__ explicit Log2Lse(float stored) : high(kIsFp32 ? stored * kLog2E : stored) {
        if constexpr (kIsFp32) low = high == infinity() ? 0.f : fmaf(stored, kLog2E, -high) + stored * kLog2ERest;
    }
    static __device__ __forceinline__ float stored(float natural) { return kIsFp32 ? natural : natural * kLog2E; }
};

// Sums and maxima over the four lanes that share the rows of an mma accumulator.
__device__ __forceinline__ float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, 1));
    return fmaxf(x, __shfl_xor_sync(0xffffffff, x, 2));
}
__device__ __forceinline__ float quad_sum(float x) {
    x += __shfl_xor_sync(0xffffffff, x, 1);
    return x + __shfl_xor_sync(0xffffffff, x, 2);
}
