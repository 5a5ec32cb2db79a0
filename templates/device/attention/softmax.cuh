// Online softmax in base 2 over mma accumulators: the running maximum, the running sum, and the
// rescaling of O. The sm80 and decode kernels use it. It knows neither masks nor tiles in shared
// memory.
//
// A warp holds kMTiles x 16 rows, and a lane two rows of each tile (r = 0: g, r = 1: g + 8). Sums
// stay per lane until the end. A row that has seen no key has the maximum -inf. Its reference is 0
// then, since -inf - -inf would be NaN.

#include "device/numeric.cuh"

template <int kMTiles>
struct OnlineSoftmax {
    static constexpr float kWeightLog2 = 0.f;  // a weight at the reference
    float row_max[kMTiles][2];  // of the raw scores
    float row_sum[kMTiles][2];  // of 2^((score - reference) * scale_log2), over this lane's columns

    __device__ __forceinline__ OnlineSoftmax() {
        #pragma unroll
        for (int i = 0; i < kMTiles * 2; ++i) row_max[i / 2][i % 2] = -infinity(), row_sum[i / 2][i % 2] = 0.f;
    }

    static __device__ __forceinline__ float reference(float maximum) { return maximum == -infinity() ? 0.f : maximum; }

    // Turns scores into weights in place. When the reference moves, it rescales O and the sums.
    // With kLazyLog2 > 0 the reference stays until some row of the warp outgrows it by kLazyLog2
    // powers of two. Weights up to 2^kLazyLog2 lose nothing in fp32 sums nor in a 16-bit P, and
    // most rescalings of O vanish (the idea is FlashAttention-4's).
    template <int kLazyLog2, int kNTiles, int kOTiles>
    __device__ __forceinline__ void step(float (&acc_s)[kMTiles][kNTiles][4], float (&acc_o)[kMTiles][kOTiles][4], float scale_log2) {
        float new_max[kMTiles][2];
        bool moved = kLazyLog2 == 0;
        #pragma unroll
        for (int m = 0; m < kMTiles; ++m) {
            #pragma unroll
            for (int r = 0; r < 2; ++r) {
                float maximum = fmaxf(acc_s[m][0][2 * r], acc_s[m][0][2 * r + 1]);
                #pragma unroll
                for (int n = 1; n < kNTiles; ++n) maximum = fmaxf(maximum, fmaxf(acc_s[m][n][2 * r], acc_s[m][n][2 * r + 1]));
                new_max[m][r] = fmaxf(row_max[m][r], quad_max(maximum));
                moved |= (new_max[m][r] - row_max[m][r]) * scale_log2 > float(kLazyLog2);
            }
        }
        if (kLazyLog2 == 0 || __any_sync(0xffffffff, moved)) {
            #pragma unroll
            for (int m = 0; m < kMTiles; ++m) {
                #pragma unroll
                for (int r = 0; r < 2; ++r) {
                    const float factor = exp2_approx((row_max[m][r] - reference(new_max[m][r])) * scale_log2);
                    row_max[m][r] = new_max[m][r];
                    row_sum[m][r] *= factor;
                    #pragma unroll
                    for (int o = 0; o < kOTiles; ++o) acc_o[m][o][2 * r] *= factor, acc_o[m][o][2 * r + 1] *= factor;
                }
            }
        }
        #pragma unroll
        for (int m = 0; m < kMTiles; ++m) {
            #pragma unroll
            for (int r = 0; r < 2; ++r) {
                const float subtract = reference(row_max[m][r]) * scale_log2;
                #pragma unroll
                for (int n = 0; n < kNTiles; ++n) {
                    #pragma unroll
                    for (int c = 2 * r; c < 2 * r + 2; ++c) {
                        acc_s[m][n][c] = exp2_approx(fmaf(acc_s[m][n][c], scale_log2, -subtract));
                        row_sum[m][r] += acc_s[m][n][c];
                    }
                }
            }
        }
    }

    // The sum over the whole row. All lanes of a quad get the same value.
    __device__ __forceinline__ float total(int m, int r) const { return quad_sum(row_sum[m][r]); }

    // The number subtracted from the row's scaled scores, in log2 units.
    __device__ __forceinline__ float reference_log2(int m, int r, float scale_log2) const { return reference(row_max[m][r]) * scale_log2; }
};
