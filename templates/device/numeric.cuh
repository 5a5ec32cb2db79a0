// The element type of the tensors, conversions to fp32, logarithms, infinity, and reductions over a
// quad. The softmax and the layouts build on this file. It knows kIsBf16 and kIsFp32 but nothing
// else of the problem.

#include "device/ptx/math.cuh"
#include "device/ptx/shared.cuh"

constexpr float kLog2E = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;
// The parts that rounding to fp32 drops from log2(e) and ln(2).
constexpr float kLog2ERest = 1.925963033500011e-8f, kLn2Rest = -1.904654299957768e-9f;

// The element type of q, k, v, out, their gradients and bias.
using Element = Either<kIsFp32, float, uint16>::Type;
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

// Flips the signs of one packed pair of 16-bit elements, or of one fp32 element, in shared memory.
__device__ __forceinline__ void negate_pair(uint32 address) {
    const uint32 pair = load_word_in_order(address);
    store_word(address, pair ^ (kIsFp32 ? 0x80000000u : 0x80008000u));
}

// The binary logarithm: within 4 ulp for 16-bit tensors, within 1 ulp for fp32 tensors. An error of
// a row's LSE scales all weights of the row.
__device__ __forceinline__ float log2_approx(float x) {
    if constexpr (kIsFp32) return log2f(x);
    return log2_of_sfu(x);
}

// The natural logarithm of sum * 2^reference. For fp32 tensors the result is rounded once, since an
// error of a row's LSE scales all weights of the row.
__device__ __forceinline__ float natural_log(float sum, float reference) {
    if constexpr (kIsFp32) return fmaf(reference, kLn2, fmaf(reference, kLn2Rest, logf(sum)));
    return (reference + log2_approx(sum)) * kLn2;
}

// The LSE of a row in log2 units, as the backward pass computes weights from it. For 16-bit tensors
// the workspace holds the LSE in log2 units. For fp32 tensors it holds the natural LSE, and the
// product with log2(e) is kept in two parts, `high` and `low`. A single rounded number would put
// the same rounding error into all weights of the row.
struct Log2Lse {
    float high, low = 0.f;
    __device__ __forceinline__ explicit Log2Lse(float stored) : high(kIsFp32 ? stored * kLog2E : stored) {
        if constexpr (kIsFp32) low = high == infinity() ? 0.f : fmaf(stored, kLog2E, -high) + stored * kLog2ERest;
    }
    static __device__ __forceinline__ float stored(float natural) { return kIsFp32 ? natural : natural * kLog2E; }
};

// The maximum and the sum over the four lanes of a quad, which share the rows of an mma
// accumulator.
__device__ __forceinline__ float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, 1));
    return fmaxf(x, __shfl_xor_sync(0xffffffff, x, 2));
}
__device__ __forceinline__ float quad_sum(float x) {
    x += __shfl_xor_sync(0xffffffff, x, 1);
    return x + __shfl_xor_sync(0xffffffff, x, 2);
}
