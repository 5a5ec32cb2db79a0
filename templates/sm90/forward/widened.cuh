// What the sm90 forward kernel does with the scales of a K and V that a kernel before it has
// widened (sm90_widen_kv.cu.tera).
//
// A scale of K that all keys of a sequence share is a factor of the softmax, unless scores are
// modified before it; a scale of V is a factor of O. The producer puts both beside the tile's slot.
// Where keys or blocks have scales, V was multiplied by them. Those of K are factors of the
// exponents, or of scores that are searched for a maximum. The producer copies a block's factors
// beside K's slot.

#include "device/attention/scale_row.cuh"
#include "sm90/forward/key_factors.cuh"
#include "sm90/forward/multiply.cuh"

// Puts the scales that all keys of a tile share beside the tile's slot. The copy of the tile's
// first K publishes them.
__device__ __forceinline__ void put_tile_scales(uint32 to, const KernelParams& params, const Sequence& sequence, int head_kv) {
    const auto of = [&](const TensorView& view) { return __float_as_uint(ScaleRow(params, view, sequence, head_kv).of(0, 0)); };
    const uint32 k = of(scales_of_k(params)), v = of(scales_of_v(params));
    store_word(to, k), store_word(to + 4, v);
}
__device__ __forceinline__ void multiply_scores(Scores& s, float factor) {
    #pragma unroll
    for (int n = 0; n < kSTiles; ++n) s[n][0] *= factor, s[n][1] *= factor, s[n][2] *= factor, s[n][3] *= factor;
}

// The row of factors of a sequence and head.
__device__ __forceinline__ const float* factors_of_keys(const KernelParams& params, const Sequence& sequence, int head_kv) {
    return ScaleRow(params, scales_of_k(params), sequence, head_kv).data;
}

// The factors of the keys whose scores a lane holds.
struct BlockFactors {
    uint4 of[kSTiles / 2];

    // From beside K's slot. They are read before a product ends, so that nothing waits for them.
    __device__ __forceinline__ void read(uint32 slot, int lane) {
        #pragma unroll
        for (int i = 0; i < kSTiles / 2; ++i) of[i] = load_chunk(slot + i * 64 + lane % 4 * 16);
    }
    __device__ __forceinline__ void multiply(Scores& s) const {
        each_pair([&](int n, float even, float odd) { s[n][0] *= even, s[n][1] *= odd, s[n][2] *= even, s[n][3] *= odd; });
    }
    // weigh (multiply.cuh), where scores of blocks without a mask are not multiplied by factors.
    template <bool kIsMasked, class Scale>
    __device__ __forceinline__ void weigh(Scores& s, RowSoftmax& softmax, const Scale& scale_log2) const {
        if constexpr (kStaleMax && !kIsMasked) weigh_stale(s, softmax);
        else softmax.lazy(s, scale_log2);
    }

private:
    // RowSoftmax::stale for such scores.
    __device__ __forceinline__ void weigh_stale(Scores& s, RowSoftmax& softmax) const {
        softmax.renew();
        each_pair([&](int n, float even, float odd) {
            #pragma unroll
            for (int i = 0; i < 4; ++i) {
                s[n][i] = exp2_approx(fmaf(s[n][i], i % 2 ? odd : even, -softmax.reference[i / 2]));
                softmax.sum[i / 2] += s[n][i];
            }
        });
    }
    // Calls with_pair(n, even, odd) with the factors of the lane's two keys of each eight.
    template <class WithPair>
    __device__ __forceinline__ void each_pair(const WithPair& with_pair) const {
        #pragma unroll
        for (int i = 0; i < kSTiles / 2; ++i) {
            with_pair(2 * i, __uint_as_float(of[i].x), __uint_as_float(of[i].y));
            with_pair(2 * i + 1, __uint_as_float(of[i].z), __uint_as_float(of[i].w));
        }
    }
};

// The factors in device memory, for rows that are computed again (exact_rows.cuh).
struct FactorsOfKeys {
    static constexpr bool kAreFactors = true;
    const float* const row;
    __device__ __forceinline__ float of_k(int key) const { return row[place_of_factor(key)]; }
    __device__ __forceinline__ float of_v(int) const { return 1.f; }
};
