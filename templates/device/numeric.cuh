// The elements of tensors, 16-bit pairs, base-2 exponentials and the two infinities. Knows only kIsBf16 and kIsFp32.

constexpr float kLog2E = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;
constexpr float kLog2ERest = 1.925963033500011e-8f, kLn2Rest = -1.904654299957768e-9f;  // what rounding took from the two

using Element = Either<kIsFp32, float, uint16>::Type;  // of q, k, v, out, their gradients and bias
constexpr int kElementBytes = sizeof(Element);

__device__ __forceinline__ float infinity() { return __int_as_float(0x7f800000); }

// Two fp32 to a packed 16-bit pair, `low` in the low half, rounded to nearest even.
__device__ __forceinline__ uint32 pack2(float low, float high) {
    uint32 pair;
    if constexpr (kIsBf16) {
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    } else {
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    }
    return pair;
}

__device__ __forceinline__ float unpack(uint16 value) {
    if constexpr (kIsBf16) {
        return __uint_as_float(uint32(value) << 16);
    } else {
        float wide;
        asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(value));
        return wide;
    }
}

__device__ __forceinline__ float unpack(float value) { return value; }

// Flips the signs of a pair, or of an fp32 element, in shared memory.
__device__ __forceinline__ void negate_pair(uint32 address) {
    uint32 pair;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(pair) : "r"(address) : "memory");
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(pair ^ (kIsFp32 ? 0x80000000u : 0x80008000u)) : "memory");
}

// 2^x by the special function unit: 2 ulp, -inf to 0, NaN to NaN.
__device__ __forceinline__ float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// By the special function unit, up to 4 ulp; where tensors are fp32 to 1 ulp, since a row's LSE is in all its weights.
__device__ __forceinline__ float log2_approx(float x) {
    if constexpr (kIsFp32) return log2f(x);
    float y;
    asm("lg2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// The natural logarithm of sum * 2^reference. Of fp32 tensors it is rounded once: what is lost of an LSE is lost of all of its row's weights.
__device__ __forceinline__ float natural_log(float sum, float reference) {
    if constexpr (kIsFp32) return fmaf(reference, kLn2, fmaf(reference, kLn2Rest, logf(sum)));
    return (reference + log2_approx(sum)) * kLn2;
}

// A row's LSE as the weights of the backward pass take it, in units of log2: from the workspace, which has it in those or, of fp32 tensors, in
// natural ones. Then it comes in two parts, since a rounding at its magnitude would be in all of the row's weights alike.
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
