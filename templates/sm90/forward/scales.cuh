// What a consumer of the sm90 forward kernel does with the scales of 8-bit keys, which the producer
// puts into shared memory (load_eight.cuh, convert_in_place.cuh).
//
// A scale of K that all keys of a sequence or of a block share is a factor of the softmax, unless
// scores are modified before it; a scale of V of a sequence is a factor of O. Scales of K of single
// keys multiply scores. Those of V of keys and blocks multiply weights after the softmax has summed
// them, unless the producer multiplies V by those of keys (kFoldsScalesOfV).

#include "device/attention/key_scales.cuh"
#include "device/numeric.cuh"
#include "sm90/forward/multiply.cuh"

// Blocks without a mask are weighed with the scales of single keys as factors of the exponents.
constexpr bool kWeighsByKey = kKeysPerScale == 1 && kStaleMax;

// Weights become fp16. With scales of V in them they are divided by a power of two near the largest
// scale so far, `unit`, and O is multiplied by it at the end.

struct KeyFactors {
    // The scales of the slot's block, or of the tile with kHasTileScales. With kFoldsScalesOfV
    // `v` is the unit of the block's scales.
    float k = 1.f, v = 1.f;
    float unit = 0.f;  // with kHasSlotScales; 0 before the first scale above 0

    // Takes the scales of a tile's first block, and of the tile, into its scores and the softmax's
    // factors.
    __device__ __forceinline__ void begin_tile(Scores& s, float (&scale_log2)[2], uint32 of_tile, uint32 of_slot, const int& lane, const float (&of_q)[2], const KernelParams& params) {
        *this = KeyFactors();
        read(kHasTileScales ? of_tile : of_slot);
        scale_scores(s, of_slot, lane, of_q);
        scale_rows(scale_log2, of_q, params);
    }

    // The softmax's factor of scores of Q and K as they are in device memory, where that is one.
    __device__ __forceinline__ float scale_log2(const KernelParams& params) const {
        return fabsf(params.softmax_scale_log2) * (kHasTileScales ? k : 1.f);
    }
    // The softmax's factors of the scores of the lane's two rows, which lack `of_q` (convert_q).
    __device__ __forceinline__ void scale_rows(float (&to)[2], const float (&of_q)[2], const KernelParams& params) const {
        const float of_k = kKeysPerScale == 1 ? 1.f : fabsf(params.softmax_scale_log2) * k;
        #pragma unroll
        for (int r = 0; r < 2; ++r) to[r] = kModifiesScores ? 1.f : of_k * of_q[r];
    }
    // The factor of O.
    __device__ __forceinline__ float of_output() const { return kHasTileScales ? v : unit; }

    // Reads the scales that all keys of a tile or of a block share.
    __device__ __forceinline__ void read(uint32 scales) {
        if constexpr (kKeysPerScale != 1) k = load_float(scales), v = load_float(scales + 4);
        if constexpr (kFoldsScalesOfV) v = load_float(scales + kSlotUnit);
    }
    // Multiplies scores by what is no factor of the softmax: the scales of keys, and where scores
    // are modified first, the scale of all keys and what the rows lack.
    __device__ __forceinline__ void scale_scores(Scores& s, uint32 scales, int lane, const float (&of_q)[2]) const {
        if constexpr (kKeysPerScale == 1) multiply_columns(s, scales + lane % 4 * kScaleRow * 4, 1.f);
        if constexpr (kModifiesScores) multiply_rows(s, k * of_q[0], k * of_q[1]);
    }

    // RowSoftmax::stale_fp16 where each key has a scale, for scores that are not scaled. They lack
    // `of_q` in some row of the warp if `is_lacking`.
    __device__ __forceinline__ void weigh_stale(Scores& s, uint32 scales, int lane, const float (&of_q)[2], bool is_lacking, RowSoftmax& softmax) const {
        if (is_lacking) multiply_rows(s, of_q[0], of_q[1]);
        float added[2] = {};
        each_pair(scales + lane % 4 * kScaleRow * 4, [&](int n, float even, float odd) {
            #pragma unroll
            for (int i = 0; i < 4; ++i) {
                s[n][i] = exp2_approx(fmaf(s[n][i], i % 2 ? odd : even, -softmax.reference[i / 2]));
                added[i / 2] += s[n][i];
            }
        });
        softmax.bound(s, added);
    }

    // weigh (multiply.cuh) over keys of 8 bits.
    template <bool kIsMasked>
    __device__ __forceinline__ void weigh(Scores& s, RowSoftmax& softmax, const float (&scale_log2)[2], uint32 scales, const int& lane, const float (&of_q)[2], const bool& is_lacking) const {
        if constexpr (!kStaleMax || kIsMasked) softmax.lazy(s, scale_log2);
        else if constexpr (kWeighsByKey) weigh_stale(s, scales, lane, of_q, is_lacking, softmax);
        else softmax.stale_fp16(s, scale_log2);
    }

    // Multiplies weights by the scales of V, unless V is. If fp16's range needs a larger unit,
    // `softmax` is left pending, which lowers O before its next product.
    __device__ __forceinline__ void scale_weights(Scores& p, uint32 scales, int lane, RowSoftmax& softmax) {
        if constexpr (!kHasSlotScales) return;
        if constexpr (kFoldsScalesOfV) {
            if (v != unit) set_unit(v, softmax);
            return;
        }
        raise_unit(largest(scales), softmax);
        // The reciprocal of a power of two.
        const float inverse = unit > 0.f ? __uint_as_float(0x7f000000 - __float_as_uint(unit)) : 1.f;
        if constexpr (kKeysPerScale == 1) {
            multiply_columns(p, scales + (kScalesOfSlot + lane % 4 * kScaleRow) * 4, inverse);
        } else {
            multiply_rows(p, v * inverse, v * inverse);
        }
    }

private:
    // Calls with_pair(n, even, odd) with the scales of the lane's two keys of each eight.
    template <class WithPair>
    static __device__ __forceinline__ void each_pair(uint32 row, const WithPair& with_pair) {
        #pragma unroll
        for (int n = 0; n < kSTiles; n += 2) {
            const uint4 of = load_chunk(row + n * 8);
            with_pair(n, __uint_as_float(of.x), __uint_as_float(of.y));
            with_pair(n + 1, __uint_as_float(of.z), __uint_as_float(of.w));
        }
    }
    static __device__ __forceinline__ void multiply_rows(Scores& s, float first, float second) {
        #pragma unroll
        for (int n = 0; n < kSTiles; ++n) s[n][0] *= first, s[n][1] *= first, s[n][2] *= second, s[n][3] *= second;
    }
    static __device__ __forceinline__ void multiply_columns(Scores& s, uint32 row, float factor) {
        each_pair(row, [&](int n, float even, float odd) {
            even *= factor, odd *= factor;
            s[n][0] *= even, s[n][1] *= odd, s[n][2] *= even, s[n][3] *= odd;
        });
    }

    // The largest scale of V of the block.
    __device__ __forceinline__ float largest(uint32 scales) const {
        if constexpr (kKeysPerScale != 1) return v;
        const uint4 of = load_chunk(scales + 2 * kScalesOfSlot * 4);
        return __uint_as_float(max(max(of.x, of.y), max(of.z, of.w)));
    }
    // Raises the unit where a scale of the block is more than 16 times as large. So weights times
    // scales are at most 16 times as large as weights.
    __device__ __forceinline__ void raise_unit(float most, RowSoftmax& softmax) {
        if (most <= 16.f * unit) return;
        // A normal number, also for a subnormal scale, and so is its reciprocal: the first unit is
        // 0.
        const float raised = __uint_as_float(min(max(__float_as_uint(most) & 0x7f800000, 0x00800000u), 0x7e800000u));
        set_unit(raised, softmax);
    }
    __device__ __forceinline__ void set_unit(float raised, RowSoftmax& softmax) {
        const float ratio = unit / raised;
        #pragma unroll
        for (int r = 0; r < 2; ++r) softmax.factor[r] = softmax.pending ? softmax.factor[r] * ratio : ratio;
        softmax.pending = true;
        unit = raised;
    }
};

// The scales of a head's keys in device memory, for rows that are computed again (exact_rows.cuh).
struct ScalesOfKeys {
    static constexpr bool kAreFactors = kHasSlotScales;
    const KernelParams& params;
    const Sequence& sequence;
    const ScaleRow k_row, v_row;

    __device__ __forceinline__ ScalesOfKeys(const KernelParams& params, const Sequence& sequence, int head_kv)
        : params(params), sequence(sequence), k_row(params, scales_of_k(params), sequence, head_kv),
          v_row(params, scales_of_v(params), sequence, head_kv) {}
    __device__ __forceinline__ float of_k(int key) const { return k_row.of(key, page_of(key)); }
    __device__ __forceinline__ float of_v(int key) const { return v_row.of(key, page_of(key)); }

private:
    __device__ __forceinline__ uint32 page_of(int key) const {
        if constexpr (kPageSize == 0) return 0;
        const int entry = params.block_table[sequence.batch * params.block_table_stride + uint32(key) / kPageKeys];
        return min(uint32(entry), uint32(params.num_pages - 1));
    }
};
