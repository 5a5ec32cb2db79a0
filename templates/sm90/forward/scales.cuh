// What a consumer of the sm90 forward kernel does with the scales of 8-bit keys, which the producer
// puts into shared memory (load_eight.cuh).
//
// A scale of K that all keys of a sequence or of a block share is a factor of the softmax, unless
// scores are modified before it; a scale of V of a sequence is a factor of O. Scales of K of single
// keys multiply scores. Those of V of keys and blocks multiply weights after the softmax has summed
// them.

#include "device/numeric.cuh"
#include "sm90/forward/multiply.cuh"

// Weights are 16 bits. Those of bf16 have fp32's range. Those of fp16 are divided by a power of two
// near the largest scale of V so far, `unit`, and O is multiplied by it at the end.
constexpr bool kHasUnit = kHasSlotScales && !kIsBf16;

struct KeyFactors {
    float k = 1.f, v = 1.f;  // of the slot's block, or of the tile with kHasTileScales
    float unit = 0.f;        // with kHasUnit; 0 before the first scale above 0

    // The softmax's factor of scores.
    __device__ __forceinline__ float scale_log2(const KernelParams& params) const {
        return kModifiesScores ? 1.f : fabsf(params.softmax_scale_log2) * k;
    }
    // The factor of O.
    __device__ __forceinline__ float of_output() const { return kHasTileScales ? v : kHasUnit ? unit : 1.f; }

    // Reads the scales that all keys of a tile or of a block share.
    __device__ __forceinline__ void read(uint32 scales) {
        if constexpr (kKeysPerScale != 1) k = load_float(scales), v = load_float(scales + 4);
    }
    // Multiplies scores by the scales of K where these are no factor of the softmax.
    __device__ __forceinline__ void scale_scores(Scores& s, uint32 scales, int lane_key) const {
        if constexpr (kKeysPerScale == 1) {
            multiply_columns(s, scales + lane_key * 4);
        } else if constexpr (kModifiesScores) {
            multiply(s, k);
        }
    }

    // Multiplies weights by the scales of V. If fp16's range needs a larger unit, `softmax` is left
    // pending, which lowers O before its next product.
    __device__ __forceinline__ void scale_weights(Scores& p, uint32 scales, int lane_key, RowSoftmax& softmax) {
        if constexpr (!kHasSlotScales) return;
        const uint32 of_keys = scales + (kScalesOfSlot + lane_key) * 4;
        if constexpr (kHasUnit) raise_unit(largest(of_keys), softmax);
        const float inverse = kHasUnit && unit > 0.f ? 1.f / unit : 1.f;
        if constexpr (kKeysPerScale == 1) {
            multiply_columns(p, of_keys, inverse);
        } else {
            multiply(p, v * inverse);
        }
    }

private:
    static __device__ __forceinline__ void multiply(Scores& s, float factor) {
        #pragma unroll
        for (int n = 0; n < kSTiles; ++n) s[n][0] *= factor, s[n][1] *= factor, s[n][2] *= factor, s[n][3] *= factor;
    }
    static __device__ __forceinline__ void multiply_columns(Scores& s, uint32 scales, float factor = 1.f) {
        #pragma unroll
        for (int n = 0; n < kSTiles; ++n) {
            float of[2];
            load_floats(of, scales + n * 32);
            if constexpr (kHasUnit) of[0] *= factor, of[1] *= factor;
            s[n][0] *= of[0], s[n][1] *= of[1], s[n][2] *= of[0], s[n][3] *= of[1];
        }
    }

    // The largest scale of V of the block. The lanes of a quad hold all keys.
    __device__ __forceinline__ float largest(uint32 of_keys) const {
        if constexpr (kKeysPerScale != 1) return v;
        float most = 0.f;
        #pragma unroll
        for (int n = 0; n < kSTiles; ++n) {
            float of[2];
            load_floats(of, of_keys + n * 32);
            most = fmaxf(most, fmaxf(of[0], of[1]));
        }
        return quad_max(most);
    }
    // Raises the unit where a scale of the block is more than 16 times as large. Weights are at
    // most 2^8, so their products stay below 2^13.
    __device__ __forceinline__ void raise_unit(float most, RowSoftmax& softmax) {
        if (most <= 16.f * unit) return;
        // A normal number, also for a subnormal scale: the first unit is 0.
        const float raised = __uint_as_float(max(__float_as_uint(most) & 0x7f800000, 0x00800000u));
        const float ratio = unit / raised;
        #pragma unroll
        for (int r = 0; r < 2; ++r) softmax.factor[r] = softmax.pending ? softmax.factor[r] * ratio : ratio;
        softmax.pending = true;
        unit = raised;
    }
};
