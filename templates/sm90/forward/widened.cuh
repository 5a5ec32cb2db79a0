// What the sm90 forward kernel does with the scales of a K and V that a kernel before it has
// widened (sm90_widen_kv.cu.tera).
//
// A scale of K that all keys of a sequence share is a factor of the softmax, unless scores are
// modified before it; a scale of V is a factor of O. The producer puts both beside the tile's slot.
// Where keys or blocks have scales, V was multiplied by them. Those of K are factors of the
// exponents, or of scores that are searched for a maximum. The producer copies a block's factors
// beside K's slot (widened_load.cuh). TileFactor and BlockFactors have the two ways under the same
// names.

#include "device/attention/exact_rows.cuh"
#include "sm90/forward/key_factors.cuh"
#include "sm90/forward/multiply.cuh"
#include "sm90/forward/widened_load.cuh"

// One scale of K for all keys of a tile. Keys of 16 bits, and those that were int4, have no scale.
struct TileFactor {
    float k;

    __device__ __forceinline__ void read(uint32, int) {}
    // Takes a tile's scale to the scores of the tile's first block, or to the softmax's factor.
    __device__ __forceinline__ void begin_tile(Scores& s, float& scale_log2, uint32 of_tile, const KernelParams& params) {
        if constexpr (!kHasTileFactors) return;
        k = load_float(of_tile);
        if constexpr (kModifiesScores) multiply(s);
        else scale_log2 = fabsf(params.softmax_scale_log2) * k;
    }
    // Multiplies scores of a later block by the scale, where that is no factor of the softmax.
    template <bool kIsMasked>
    __device__ __forceinline__ void scale_scores(Scores& s) const {
        if constexpr (kHasTileFactors && kModifiesScores) multiply(s);
    }
    // weigh of multiply.cuh.
    template <bool kIsMasked, class Scale>
    __device__ __forceinline__ void weigh(Scores& s, RowSoftmax& softmax, const Scale& scale_log2) const {
        ::weigh<kIsMasked>(s, softmax, scale_log2);
    }

private:
    __device__ __forceinline__ void multiply(Scores& s) const {
        #pragma unroll
        for (int n = 0; n < kSTiles; ++n) s[n][0] *= k, s[n][1] *= k, s[n][2] *= k, s[n][3] *= k;
    }
};

// The factors of the keys whose scores a lane holds.
struct BlockFactors {
    uint4 of[kSTiles / 2];

    // From beside K's slot. They are read before a product ends, so that nothing waits for them.
    __device__ __forceinline__ void read(uint32 slot, int lane) {
        #pragma unroll
        for (int i = 0; i < kSTiles / 2; ++i) of[i] = load_chunk(slot + i * 64 + lane % 4 * 16);
    }
    // Multiplies the scores of a tile's first block by the factors.
    __device__ __forceinline__ void begin_tile(Scores& s, float&, uint32, const KernelParams&) const { multiply(s); }
    // The same for a later block, where `weigh` does not.
    template <bool kIsMasked>
    __device__ __forceinline__ void scale_scores(Scores& s) const {
        if constexpr (!kStaleMax || kIsMasked) multiply(s);
    }
    // weigh (multiply.cuh), where scores of blocks without a mask are not multiplied by factors.
    template <bool kIsMasked, class Scale>
    __device__ __forceinline__ void weigh(Scores& s, RowSoftmax& softmax, const Scale& scale_log2) const {
        if constexpr (kStaleMax && !kIsMasked) weigh_stale(s, softmax);
        else softmax.lazy(s, scale_log2);
    }

private:
    __device__ __forceinline__ void multiply(Scores& s) const {
        each_pair([&](int n, float even, float odd) { s[n][0] *= even, s[n][1] *= odd, s[n][2] *= even, s[n][3] *= odd; });
    }
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

using WidenedFactors = Either<kHasKeyFactors, BlockFactors, TileFactor>::Type;

// The factors in device memory, for rows that are computed again (exact_rows.cuh).
struct FactorsOfKeys {
    static constexpr bool kAreFactors = true;
    const float* const row;
    __device__ __forceinline__ float of_k(int key) const { return row[place_of_factor(key)]; }
    __device__ __forceinline__ float of_v(int) const { return 1.f; }
};
// The scales of a head's keys for those rows.
__device__ __forceinline__ auto scales_of_rows(const KernelParams& params, const Sequence& sequence, int head_kv) {
    if constexpr (kHasKeyFactors) return FactorsOfKeys{factors_of_keys(params, sequence, head_kv)};
    else return NoScales();
}
