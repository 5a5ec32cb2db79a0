// The scales of 8-bit k and v: how a warp gets those of a block of keys. scale_row.cuh says where
// they lie. A scale of k multiplies scores, and one of v weights.

#include "device/attention/scale_row.cuh"
#include "device/attention/scores.cuh"
#include "device/eight.cuh"

// The scales of a block of kKeys keys, as one warp takes its blocks. Scales are read one block
// ahead, and with pages the table two blocks ahead, so that no product waits for them. A negative
// block is none.
template <int kKeys>
class BlockScales {
    static constexpr int kShares = kKeysPerScale == 1 ? (kKeys + 31) / 32 : 1;
    static_assert(kKeysPerScale != 128 || 128 % kKeys == 0, "a block of keys has one scale");

    const KernelParams& params;
    const Sequence& sequence;
    const ScaleRow k_row, v_row;
    uint32 entries[kShares] = {};  // of the keys of the block after next, in the table
    float next_k[kShares], next_v[kShares];

    // Lane l has the keys l, l + 32, ... of a block.
    __device__ __forceinline__ int key_of(int block, int share) const { return block * kKeys + share * 32 + lane % kKeys; }
    __device__ __forceinline__ bool exists(int block, int key) const { return block >= 0 && key < sequence.seqlen_k; }

    __device__ __forceinline__ void fetch_pages(int block) {
        if constexpr (kPageSize > 0 && kKeysPerScale == 1) {
            const int* const table = params.block_table + sequence.batch * params.block_table_stride;
            #pragma unroll
            for (int i = 0; i < kShares; ++i) {
                const int key = key_of(block, i);
                entries[i] = exists(block, key) ? __ldg(table + uint32(key) / kPageKeys) : 0;
            }
        }
    }
    __device__ __forceinline__ void fetch(int block) {
        #pragma unroll
        for (int i = 0; i < kShares; ++i) {
            const int key = kKeysPerScale == 1 ? key_of(block, i) : block * kKeys;
            const bool is_there = exists(block, key);
            // An entry becomes a page here: right behind its load a warp would wait for the table
            // in every block. The minimum is unsigned, so a negative entry becomes the last page.
            const uint32 page = kPageSize > 0 && kKeysPerScale == 1 ? min(entries[i], uint32(params.num_pages - 1)) : 0;
            next_k[i] = is_there ? k_row.of(key, page) : 0.f;
            next_v[i] = is_there ? v_row.of(key, page) : 0.f;
        }
    }

protected:
    const int lane;
    float k[kShares], v[kShares];  // of the acquired block

    __device__ __forceinline__ BlockScales(const KernelParams& params, const Sequence& sequence, int head_kv, int lane, int first, int second)
        : params(params), sequence(sequence), k_row(params, scales_of_k(params), sequence, head_kv),
          v_row(params, scales_of_v(params), sequence, head_kv), lane(lane) {
        if constexpr (kKeysPerScale == 0) {
            k[0] = k_row.of(0, 0), v[0] = v_row.of(0, 0);
        } else {
            fetch_pages(first);
            fetch(first);
            fetch_pages(second);
        }
    }

    // The scale of a key of the block, out of `k` or `v`. All lanes of the warp call it.
    static __device__ __forceinline__ float scale_of(const float (&scales)[kShares], int key) {
        if constexpr (kKeysPerScale != 1) return scales[0];
        float scale = __shfl_sync(0xffffffff, scales[0], key % 32);
        #pragma unroll
        for (int i = 1; i < kShares; ++i) {
            const float other = __shfl_sync(0xffffffff, scales[i], key % 32);
            if (key / 32 == i) scale = other;
        }
        return scale;
    }

public:
    // On to the next block, given the two after it.
    __device__ __forceinline__ void acquire(int second, int third) {
        if constexpr (kKeysPerScale != 0) {
            #pragma unroll
            for (int i = 0; i < kShares; ++i) k[i] = next_k[i], v[i] = next_v[i];
            fetch(second);
            fetch_pages(third);
        }
    }
};

// What a warp does with the scales, in accumulators of mma, or of transposed products
// (products/transposed.cuh).
//
// The scale of k that all keys of a sequence share is a factor of the softmax, unless scores are
// modified before it. Other scales of k multiply scores, and those of v multiply weights after the
// softmax has summed them. O is multiplied at the end by what all weights lack.
template <bool kIsTransposed>
class AccumulatorScales : public BlockScales<kBlockN> {
    // A power of two that scales of v are divided by before they multiply weights, since these are
    // fp16 and v may be small throughout. 0 before the first block.
    float unit = kKeysPerScale == 0 ? 1.f : 0.f;

public:
    // The first two blocks of the warp.
    __device__ __forceinline__ AccumulatorScales(const KernelParams& params, const Sequence& sequence, int head_kv, int lane, int first, int second)
        : BlockScales(params, sequence, head_kv, lane, first, second) {}

    // The factor of scores that the softmax applies.
    __device__ __forceinline__ float of_softmax() const { return kKeysPerScale == 0 && !kModifiesScores ? k[0] : 1.f; }

    template <int kM, int kN>
    __device__ __forceinline__ void scale_scores(float (&s)[kM][kN][4]) const {
        if constexpr (kKeysPerScale != 0 || kModifiesScores) scale_keys(s, k, 1.f);
    }

    // Weights times v's scales. It lowers O where a block has far larger ones.
    template <int kM, int kN, int kO>
    __device__ __forceinline__ void scale_weights(float (&p)[kM][kN][4], float (&o)[kM][kO][4]) {
        if constexpr (kKeysPerScale != 0) {
            keep_range(o);
            scale_keys(p, v, inverse(unit));
        }
    }

    // O times what its weights lack.
    template <int kM, int kO>
    __device__ __forceinline__ void scale_output(float (&o)[kM][kO][4]) const {
        multiply(o, kKeysPerScale == 0 ? v[0] : unit);
    }

private:
    template <int kM, int kN, class Values>
    __device__ __forceinline__ void scale_keys(float (&s)[kM][kN][4], const Values& scales, float factor) const {
        if constexpr (kIsTransposed) {
            #pragma unroll
            for (int n = 0; n < kN; ++n) {
                #pragma unroll
                for (int h = 0; h < 2; ++h) {
                    const float scale = scale_of(scales, n * 16 + h * 8 + lane / 4) * factor;
                    #pragma unroll
                    for (int m = 0; m < kM; ++m) s[m][n][h] *= scale, s[m][n][2 + h] *= scale;
                }
            }
        } else {
            #pragma unroll
            for (int n = 0; n < kN; ++n) {
                const int key = n * 8 + lane % 4 * 2;
                const float even = scale_of(scales, key) * factor, odd = scale_of(scales, key + 1) * factor;
                #pragma unroll
                for (int m = 0; m < kM; ++m) s[m][n][0] *= even, s[m][n][1] *= odd, s[m][n][2] *= even, s[m][n][3] *= odd;
            }
        }
    }

    template <int kM, int kO>
    static __device__ __forceinline__ void multiply(float (&o)[kM][kO][4], float factor) {
        #pragma unroll
        for (int m = 0; m < kM; ++m) {
            #pragma unroll
            for (int n = 0; n < kO; ++n) {
                #pragma unroll
                for (int i = 0; i < 4; ++i) o[m][n][i] *= factor;
            }
        }
    }

    // Raises the unit where a scale of the block is more than 16 times as large. Weights are at
    // most 2^kLazyLog2 <= 2^8, so their products stay below 2^13.
    template <int kM, int kO>
    __device__ __forceinline__ void keep_range(float (&o)[kM][kO][4]) {
        uint32 largest = __float_as_uint(v[0]);
        #pragma unroll
        for (int i = 1; i < int(sizeof(v) / sizeof(v[0])); ++i) largest = max(largest, __float_as_uint(v[i]));
        // Bits of positive numbers are ordered as the numbers are.
        if constexpr (kKeysPerScale == 1) largest = largest_of_warp(largest);
        if (__uint_as_float(largest) <= 16.f * unit) return;
        // A normal number whose inverse is normal, also for a subnormal scale: the first unit is 0.
        const float raised = __uint_as_float(min(max(largest & 0x7f800000, 0x00800000u), 0x7e800000u));
        multiply(o, unit * inverse(raised));
        unit = raised;
    }

    // 1 over a power of two, without a division. Before the first scale above 0 the unit is 0, and
    // so are all scales of the block.
    static __device__ __forceinline__ float inverse(float power) { return __uint_as_float(0x7f000000 - __float_as_uint(power)); }
};
