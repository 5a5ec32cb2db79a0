// Rotates a warp's row in fp32: y = H D x / sqrt(n). H is the Walsh-Hadamard matrix of n columns.
// n is the largest power of two that divides the row's columns, and H serves each block of n. D is
// a diagonal of signs. src/ops/quantize/rotation.rs has the formula of the signs and the same order
// of additions, so the bits are the same. It knows no tensor.

#include "device/quantise.cuh"

struct Hadamard {
    int n;          // a power of two, at least 8
    float factor;   // 1 / sqrt(n)
    uint32 signs;   // bit step * kVec + i is set where D is -1 at x[step][i] of the lane's row
    static_assert(kSteps * kVec == 16 && kVec <= 8, "a lane has 16 columns, and an access is within a block");

    // Bit c % 32 of words[c / 32] is the sign of column c.
    __device__ __forceinline__ Hadamard(const uint32 (&words)[kMostCols / 32], float factor, int cols, int lane)
        : n(cols & -cols), factor(factor), signs(0) {
        #pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            const int col = WarpRow::col(step, lane);
            signs |= (words[col / 32] >> col % 32 & ((1u << kVec) - 1)) << step * kVec;
        }
    }

    // All lanes of the warp call it. Columns past the row's end are 0 and stay 0.
    __device__ __forceinline__ void apply(WarpRow& row) const {
        #pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            #pragma unroll
            for (int i = 0; i < kVec; ++i) {
                const uint32 sign = signs >> (step * kVec + i) << 31;
                row.x[step][i] = __uint_as_float(__float_as_uint(row.x[step][i]) ^ sign);
            }
        }
        // Distances below kVec: both columns are the lane's, in one step.
        #pragma unroll
        for (int distance = 1; distance < kVec; distance *= 2) {
            #pragma unroll
            for (int step = 0; step < kSteps; ++step) {
                #pragma unroll
                for (int i = 0; i < kVec; ++i) {
                    if ((i & distance) == 0) butterfly(row.x[step][i], row.x[step][i + distance]);
                }
            }
        }
        // Up to 16 * kVec: the other column is another lane's. Each of the two computes its own.
        #pragma unroll
        for (int lanes = 1; lanes < 32; lanes *= 2) {
            if (lanes * kVec >= n) continue;
            const bool is_upper = threadIdx.x & lanes;
            #pragma unroll
            for (int step = 0; step < kSteps; ++step) {
                #pragma unroll
                for (int i = 0; i < kVec; ++i) {
                    const float own = row.x[step][i], other = __shfl_xor_sync(0xffffffff, own, lanes);
                    row.x[step][i] = is_upper ? other - own : own + other;
                }
            }
        }
        // From 32 * kVec on: both columns are the lane's, in two steps.
        #pragma unroll
        for (int steps = 1; steps < kSteps; steps *= 2) {
            if (steps * 32 * kVec >= n) continue;
            #pragma unroll
            for (int step = 0; step < kSteps; ++step) {
                if (step & steps) continue;
                #pragma unroll
                for (int i = 0; i < kVec; ++i) butterfly(row.x[step][i], row.x[(step + steps) % kSteps][i]);
            }
        }
        #pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            #pragma unroll
            for (int i = 0; i < kVec; ++i) row.x[step][i] *= factor;
        }
    }

    static __device__ __forceinline__ void butterfly(float& low, float& high) {
        const float sum = low + high;
        high = low - high;
        low = sum;
    }
};
