// Online softmax in base 2 over a warpgroup's scores, for weights that are rounded to e4m3. It
// works in registers, and knows neither masks nor the pipeline. row_softmax.cuh does the same for
// 16-bit weights.
//
// A lane holds two rows (r = 0: g, r = 1: g + 8). `reference` is subtracted from a row's scaled
// scores. It lies kWeightLog2 below a maximum of the row, so that the largest weights use the range
// of e4m3: a weight is exact to 4 bits from 2^-6 on and a multiple of 2^-9 below. Sums are of
// unrounded weights, and stay per lane until the end.
//
// The reference moves when some row of the warp outgrows its maximum by 2^kLagLog2. `pending` then
// asks the caller to multiply O by `factor` before it adds the step's weights.

#include "device/attention/row_weights.cuh"
#include "device/ptx/e4m3.cuh"

struct NarrowSoftmax {
    float reference[2];  // in log2 units; -inf for a row that has seen no key
    float sum[2];        // of 2^(score * scale_log2 - reference), over this lane's columns
    float factor[2];     // the factor of O if `pending`
    bool pending;        // the same in all lanes of the warp

    // A weight at the row's maximum is 224, which e4m3 has, and 448 with the lag, e4m3's largest
    // number.
    static constexpr float kWeightLog2 = 7.807354922f, kLagLog2 = 1.f;

    // The number subtracted from the row's scores. A row that has seen no key takes 0: infinity
    // minus infinity would be NaN.
    __device__ __forceinline__ float lowered_by(int r) const { return reference[r] == -infinity() ? 0.f : reference[r]; }

    // Moves the reference of row r and scales its sum.
    __device__ __forceinline__ void move_reference(int r, float to) {
        factor[r] = exp2_approx(reference[r] - (to == -infinity() ? 0.f : to));
        reference[r] = to;
        sum[r] *= factor[r];
    }

    // The first block of a tile: O is empty, so nothing is rescaled.
    template <int kTiles>
    __device__ __forceinline__ void first(float (&s)[kTiles][4], float scale_log2) {
        #pragma unroll
        for (int r = 0; r < 2; ++r) reference[r] = row_maximum(s, r) * scale_log2 - kWeightLog2, sum[r] = 0.f;
        weigh(s, sum, scale_log2, lowered_by(0), lowered_by(1));
    }

    // A later block.
    template <int kTiles>
    __device__ __forceinline__ void next(float (&s)[kTiles][4], float scale_log2) {
        constexpr bool kByIntegers = kHeadDimV <= 192;  // past that registers are short
        const auto outgrows = [&](int r, float score) { return score * scale_log2 > reference[r] + (kWeightLog2 + kLagLog2); };
        float found[2];
        pending = find_outgrown<kByIntegers>(s, found, outgrows);
        if (pending) {
            #pragma unroll
            for (int r = 0; r < 2; ++r) move_reference(r, fmaxf(reference[r], found[r] * scale_log2 - kWeightLog2));
        }
        weigh(s, sum, scale_log2, lowered_by(0), lowered_by(1));
    }

    // The sum over the whole row. All lanes of a quad get the same value.
    __device__ __forceinline__ float total(int r) const { return quad_sum(sum[r]); }
    // The natural log of the sum of exp(score * scale), or -inf for a row without keys.
    __device__ __forceinline__ float lse(int r, float total) const { return total == 0.f ? -infinity() : (lowered_by(r) + log2_approx(total)) * kLn2; }
};
