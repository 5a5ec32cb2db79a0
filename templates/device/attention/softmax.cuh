// Online softmax in base 2 over mma accumulators: the running maximum, the running sum, and the
// rescaling of O. The sm80 and decode kernels use it. It knows neither masks nor tiles in shared
// memory.
//
// A lane has two rows of each of a warp's kMTiles tiles (r), and columns of them. Sums stay per
// lane until the end. A row that has seen no key has the maximum -inf. Its reference is 0 then,
// since -inf - -inf would be NaN.

#include "device/numeric.cuh"

// Rows in quads of lanes, as mma has them. A tile has 16. A lane has g (r = 0) and g + 8 (r = 1).
struct RowsOfQuads {
    static constexpr float kWeightLog2 = 0.f;    // a weight at the reference
    static constexpr bool kExchangesLate = false;

    static __device__ __forceinline__ float max(float x) { return quad_max(x); }
    static __device__ __forceinline__ float sum(float x) { return quad_sum(x); }
};

// Rows that are columns of mma, in transposed products (products/transposed.cuh). A tile has 8. A
// lane has 2t (r = 0) and 2t + 1 (r = 1), and the lanes of the same t share rows. Each lane asks
// for its own keys whether the reference moves, so most blocks exchange no maximum. Weights at the
// reference are 2^kLog2. Beside int4 they are larger than 1, so that products with small scales
// stay in fp16's range.
template <int kLog2>
struct RowsOfColumns {
    static constexpr float kWeightLog2 = kLog2;
    static constexpr bool kExchangesLate = true;

    static __device__ __forceinline__ float max(float x) { return join(x, [](float a, float b) { return fmaxf(a, b); }); }
    static __device__ __forceinline__ float sum(float x) { return join(x, [](float a, float b) { return a + b; }); }

private:
    template <class Two>
    static __device__ __forceinline__ float join(float x, const Two& two) {
        #pragma unroll
        for (int step = 4; step < 32; step *= 2) x = two(x, __shfl_xor_sync(0xffffffff, x, step));
        return x;
    }
};

template <int kMTiles, class Rows = RowsOfQuads>
struct OnlineSoftmax {
    static constexpr float kWeightLog2 = Rows::kWeightLog2;
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
        static_assert(kLazyLog2 > 0 || !Rows::kExchangesLate, "lanes ask by themselves whether a row outgrows its reference");
        float new_max[kMTiles][2];
        bool moved = kLazyLog2 == 0;
        #pragma unroll
        for (int m = 0; m < kMTiles; ++m) {
            #pragma unroll
            for (int r = 0; r < 2; ++r) {
                float maximum = fmaxf(acc_s[m][0][2 * r], acc_s[m][0][2 * r + 1]);
                #pragma unroll
                for (int n = 1; n < kNTiles; ++n) maximum = fmaxf(maximum, fmaxf(acc_s[m][n][2 * r], acc_s[m][n][2 * r + 1]));
                new_max[m][r] = Rows::kExchangesLate ? maximum : fmaxf(row_max[m][r], Rows::max(maximum));
                moved |= (new_max[m][r] - row_max[m][r]) * scale_log2 > float(kLazyLog2);
            }
        }
        if (kLazyLog2 == 0 || __any_sync(0xffffffff, moved)) {
            #pragma unroll
            for (int m = 0; m < kMTiles; ++m) {
                #pragma unroll
                for (int r = 0; r < 2; ++r) {
                    if (Rows::kExchangesLate) new_max[m][r] = fmaxf(row_max[m][r], Rows::max(new_max[m][r]));
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
    __device__ __forceinline__ float total(int m, int r) const { return Rows::sum(row_sum[m][r]); }

    // The number subtracted from the row's scaled scores, in log2 units.
    __device__ __forceinline__ float reference_log2(int m, int r, float scale_log2) const {
        return reference(row_max[m][r]) * scale_log2 - kWeightLog2;
    }
};
