// Online softmax in base 2 over transposed accumulators: rows of Q are the columns of mma
// (products/keys_four.cuh). It is softmax.cuh's OnlineSoftmax, whose rows lie in lanes otherwise.
//
// A lane holds two rows of each 8 (r = 0: 2t, r = 1: 2t + 1), two keys of each accumulator, at
// 2r + h. The lanes of the same t share rows.
//
// Weights are 2^kWeightLog2 at a row's reference, and so are its sums, so that products with small
// scales stay in fp16's range.

#include "device/numeric.cuh"

template <int kMTiles>
struct ColumnSoftmax {
    float row_max[kMTiles][2];  // of the raw scores
    float row_sum[kMTiles][2];  // of weights, over this lane's keys

    static constexpr float kWeightLog2 = 6.f;

    __device__ __forceinline__ ColumnSoftmax() {
        #pragma unroll
        for (int i = 0; i < kMTiles * 2; ++i) row_max[i / 2][i % 2] = -infinity(), row_sum[i / 2][i % 2] = 0.f;
    }

    static __device__ __forceinline__ float reference(float maximum) { return maximum == -infinity() ? 0.f : maximum; }

    // Turns scores into weights in place. The reference stays until some row of the warp outgrows
    // it by kLazyLog2 powers of two, as in OnlineSoftmax. Each lane asks for its own keys, so that
    // most blocks exchange no maximum.
    template <int kLazyLog2, int kNTiles, int kOTiles>
    __device__ __forceinline__ void step(float (&acc_s)[kMTiles][kNTiles][4], float (&acc_o)[kMTiles][kOTiles][4], float scale_log2) {
        float found[kMTiles][2];
        bool moved = false;
        #pragma unroll
        for (int m = 0; m < kMTiles; ++m) {
            #pragma unroll
            for (int r = 0; r < 2; ++r) {
                found[m][r] = fmaxf(acc_s[m][0][2 * r], acc_s[m][0][2 * r + 1]);
                #pragma unroll
                for (int n = 1; n < kNTiles; ++n) found[m][r] = fmaxf(found[m][r], fmaxf(acc_s[m][n][2 * r], acc_s[m][n][2 * r + 1]));
                moved |= (found[m][r] - row_max[m][r]) * scale_log2 > float(kLazyLog2);
            }
        }
        if (__any_sync(0xffffffff, moved)) {
            #pragma unroll
            for (int m = 0; m < kMTiles; ++m) {
                #pragma unroll
                for (int r = 0; r < 2; ++r) {
                    const float maximum = fmaxf(row_max[m][r], over_lanes(found[m][r], [](float a, float b) { return fmaxf(a, b); }));
                    const float factor = exp2_approx((row_max[m][r] - reference(maximum)) * scale_log2);
                    row_max[m][r] = maximum;
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
                const float subtract = reference_log2(m, r, scale_log2);
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

    // The sum over the whole row. All lanes of the row get the same value.
    __device__ __forceinline__ float total(int m, int r) const { return over_lanes(row_sum[m][r], [](float a, float b) { return a + b; }); }

    // The number subtracted from the row's scaled scores, in log2 units.
    __device__ __forceinline__ float reference_log2(int m, int r, float scale_log2) const {
        return fmaf(reference(row_max[m][r]), scale_log2, -kWeightLog2);
    }

private:
    template <class Join>
    static __device__ __forceinline__ float over_lanes(float x, const Join& join) {
        #pragma unroll
        for (int step = 4; step < 32; step *= 2) x = join(x, __shfl_xor_sync(0xffffffff, x, step));
        return x;
    }
};
