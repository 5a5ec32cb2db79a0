// Online softmax in base 2 over a warpgroup's scores, for the sm90 forward kernel. It works in
// registers, and knows neither masks nor the pipeline.
//
// A lane holds two rows (r = 0: g, r = 1: g + 8). `reference` is subtracted from a row's scaled
// scores. Sums stay per lane until the end. When a step moves a reference, `pending` asks the
// caller to multiply O by `factor` before it adds the step's weights. Two rules keep such steps
// rare:
//
// lazy   The reference is an earlier running maximum. It moves when some row of the warp outgrows
//        it by 2^8 (the idea is FlashAttention-4's). Weights up to 2^8 lose nothing in fp32 sums
//        nor in a 16-bit P.
// stale  Blocks that need no mask are not searched for a maximum. When a row's sum has passed 2^40,
//        the sum becomes its reference. P is bf16, with fp32's exponents, so weights are as
//        accurate at any scale. A failure shows in the row's total, and exact_rows.cuh repeats the
//        warp's rows. A sum past 2^90 stays infinite to the end. A row whose first searched scores
//        were all -inf has an arbitrary reference, and so perhaps a sum near 0. Weights in fp16 are
//        bounded: where the sum of a lane's weights in a block has passed 2^15, the block's largest
//        sum becomes the reference before the weights are rounded (`stale_fp16`).

#include "device/attention/row_weights.cuh"

struct RowSoftmax {
    float reference[2];  // in log2 units; -inf for a row that has seen no key
    float sum[2];        // of 2^(score * scale_log2 - reference), over this lane's columns
    float factor[2];     // the factor of O if `pending`
    bool pending;        // the same in all lanes of the warp

    static constexpr float kRenewedSum = 0x1p40f, kLargestSum = 0x1p90f;  // of a whole row
    // Bounds a lane's weights of a block, times scales of up to 16 (sm90/forward/scales.cuh).
    static constexpr float kLargestInFp16 = kKeyFormat != 0 && kKeysPerScale != 0 ? 0x1p11f : 0x1p15f;

    // The number subtracted from the row's scores. A row that has seen no key takes 0: infinity
    // minus infinity would be NaN.
    __device__ __forceinline__ float lowered_by(int r) const { return reference[r] == -infinity() ? 0.f : reference[r]; }
    // Makes references finite. Called before the first block that is not searched.
    __device__ __forceinline__ void settle() { reference[0] = lowered_by(0), reference[1] = lowered_by(1); }

    // Whether a row's sum is out of bounds. A lane holds a quarter of the row's columns.
    __device__ __forceinline__ bool is_spoiled(int r) const { return sum[r] > kLargestSum / 4; }

    // Moves the reference of row r and scales its sum.
    __device__ __forceinline__ void move_reference(int r, float to) {
        factor[r] = exp2_approx(reference[r] - (to == -infinity() ? 0.f : to));
        reference[r] = to;
        sum[r] *= factor[r];
    }

    // The first block of a tile: O is empty, so nothing is rescaled.
    template <int kTiles, class Scale>
    __device__ __forceinline__ void first(float (&s)[kTiles][4], const Scale& scale_log2) {
        #pragma unroll
        for (int r = 0; r < 2; ++r) reference[r] = row_maximum(s, r) * of_row(scale_log2, r), sum[r] = 0.f;
        weigh(s, sum, scale_log2, lowered_by(0), lowered_by(1));
    }

    // A later block that is searched for its maximum.
    template <int kTiles, class Scale>
    __device__ __forceinline__ void lazy(float (&s)[kTiles][4], const Scale& scale_log2) {
        // Where few blocks are searched, integers save less than their code costs. With dropout
        // they spill.
        constexpr bool kByIntegers = !kStaleMax && !kHasDropout;
        float found[2];
        pending = find_outgrown<kByIntegers>(s, found, [&](int r, float score) { return score * of_row(scale_log2, r) > reference[r] + 8.f; });
        if (pending) {
            #pragma unroll
            for (int r = 0; r < 2; ++r) {
                // Under a window or a block mask, searched blocks may follow blocks that are not
                // searched.
                const bool was_spoiled = kStaleMax && (kHasWindow || kHasBlockMask) && is_spoiled(r);
                move_reference(r, fmaxf(reference[r], found[r] * of_row(scale_log2, r)));
                if (was_spoiled) sum[r] = infinity();
            }
        }
        weigh(s, sum, scale_log2, lowered_by(0), lowered_by(1));
    }

    // Moves references whose sums have grown large.
    __device__ __forceinline__ void renew() {
        pending = __any_sync(0xffffffff, fmaxf(sum[0], sum[1]) > kRenewedSum);
        if (pending) {
            #pragma unroll
            for (int r = 0; r < 2; ++r) {
                const bool was_spoiled = is_spoiled(r);
                // The step stays below 2^127, so that an infinite sum leaves the reference of the
                // other lanes finite.
                move_reference(r, reference[r] + fminf(127.f, fmaxf(0.f, log2_approx(quad_max(sum[r])))));
                if (was_spoiled) sum[r] = infinity();
            }
        }
    }

    // A later block that is not searched.
    template <int kTiles>
    __device__ __forceinline__ void stale(float (&s)[kTiles][4], float scale_log2) {
        renew();
        weigh(s, sum, scale_log2, reference[0], reference[1]);
    }

    // The same of a block whose weights become fp16.
    template <int kTiles, class Scale>
    __device__ __forceinline__ void stale_fp16(float (&s)[kTiles][4], const Scale& scale_log2) {
        float added[2] = {};
        weigh(s, added, scale_log2, reference[0], reference[1]);
        bound(s, added);
    }
    // Adds a block's sums. Where a weight may be larger than fp16 allows, the row's reference
    // moves, and its weights are multiplied.
    template <int kTiles>
    __device__ __forceinline__ void bound(float (&s)[kTiles][4], float (&added)[2]) {
        pending = __any_sync(0xffffffff, fmaxf(added[0], added[1]) > kLargestInFp16);
        if (pending) {
            #pragma unroll
            for (int r = 0; r < 2; ++r) {
                const float most = quad_max(added[r]);
                const bool was_spoiled = is_spoiled(r) || most > kLargestSum;
                move_reference(r, reference[r] + fminf(127.f, fmaxf(0.f, log2_approx(most))));
                #pragma unroll
                for (int n = 0; n < kTiles; ++n) s[n][2 * r] *= factor[r], s[n][2 * r + 1] *= factor[r];
                added[r] *= factor[r];
                if (was_spoiled) sum[r] = added[r] = infinity();
            }
        }
        sum[0] += added[0], sum[1] += added[1];
    }

    // Whether a stale reference failed the row. A reference taken from the row itself leaves a
    // weight or a renewed sum of about 1 or more. NaN comes from the inputs alone, and stays.
    static __device__ __forceinline__ bool failed(float total, bool sees_keys) {
        return total > kLargestSum || (total < 0.5f && sees_keys);
    }

    // The sum over the whole row. All lanes of a quad get the same value.
    __device__ __forceinline__ float total(int r) const { return quad_sum(sum[r]); }
    // The natural log of the sum of exp(score * scale), or -inf for a row without keys.
    __device__ __forceinline__ float lse(int r, float total) const { return total == 0.f ? -infinity() : (lowered_by(r) + log2_approx(total)) * kLn2; }
};
