// What scores go through between Q K^T and the softmax: softcap, ALiBi, a bias, a mask of bytes or
// bits. Both passes and families call it.
//
// They come as raw products and leave in units of log2: log2(e) * (softcap(scale * q k) + alibi +
// bias), or -inf where the mask hides the key. So a softmax after it has a scale of 1. What a
// kernel does not use is not in it.

#include "device/attention/sequence.cuh"
#include "device/numeric.cuh"
#include "device/ptx/compiler.cuh"

constexpr bool kModifiesScores = kHasSoftcap || kHasAlibi || kHasBias || kHasMask;
// Whether the backward pass keeps the softcap's slopes of the products: found again from a weight
// they lack what rounding takes from its score and its row's LSE, which a small cap makes much of.
constexpr bool kKeepsSlopes = kIsFp32 && kHasSoftcap;

// tanh to some 2^-20 of itself, so that a wide softcap costs no accuracy: 1 - 2 / (e^2x + 1) by ex2
// and rcp, which are infinite and 0 where they have to be, and near 0, where that cancels, its
// series. Of fp32 tensors to 2 ulp, as a score of 20 needs it.
__device__ __forceinline__ float tanh_exact(float x) {
    if constexpr (kIsFp32) return tanhf(x);
    const float square = x * x, series = x * fmaf(square, fmaf(square, 2.f / 15.f, -1.f / 3.f), 1.f);
    return fabsf(x) < 0.125f ? series : 1.f - __fdividef(2.f, exp2_approx(x * (2.f * kLog2E)) + 1.f);
}

struct ScoreModifier {
    const KernelParams& params;
    const Sequence& sequence;
    const Element* bias;      // of this batch entry and head
    const uint8* mask;
    float* dbias;
    float slope_log2;         // ALiBi's, times log2(e)
    float softcap_inverse;    // 1 / softcap_log2

    __device__ __forceinline__ ScoreModifier(const KernelParams& params, const Sequence& sequence, int head) : params(params), sequence(sequence) {
        if constexpr (kHasBias) bias = static_cast<const Element*>(params.bias.data) + place(params.bias, head);
        if constexpr (kHasBias) dbias = static_cast<float*>(params.dbias.data) + place(params.dbias, head);
        if constexpr (kHasMask) mask = static_cast<const uint8*>(params.mask.data) + place(params.mask, head);
        if constexpr (kHasSoftcap) softcap_inverse = 1.f / params.softcap_log2;
        if constexpr (kHasAlibi) slope_log2 = params.alibi_slopes[sequence.batch * params.alibi_stride_batch + head] * kLog2E;
    }

    __device__ __forceinline__ bool is_inside(int row, int key) const { return row < sequence.seqlen_q && key < sequence.seqlen_k; }

    // A raw product in log2 units, through the softcap.
    __device__ __forceinline__ float capped(float product) const {
        return kHasSoftcap ? params.softcap_log2 * tanh_exact(product * params.softcap_factor) : product * params.softmax_scale_log2;
    }
    // What ALiBi takes from it.
    __device__ __forceinline__ float alibi(int row, int key) const {
        return kHasAlibi ? slope_log2 * fabsf(float(row + sequence.seqlen_k - sequence.seqlen_q - key)) : 0.f;
    }

    // Of an accumulator whose lane holds rows `row` and row + 8, of each 8 keys the two from `key`
    // on. Where `is_full` the mask is not looked at.
    template <int kTiles>
    __device__ __forceinline__ void modify(float (&acc)[kTiles][4], int row, int key, bool is_full = false) const { modify_all<false>(acc, row, key, is_full); }
    // Of scores that stand transposed: a lane holds keys `key` and key + 8, of each 8 queries the
    // two from `row` on.
    template <int kTiles>
    __device__ __forceinline__ void modify_transposed(float (&acc)[kTiles][4], int row, int key, bool is_full = false) const { modify_all<true>(acc, row, key, is_full); }

    // ---- backward

    // What a score's gradient is multiplied with on its way through the softcap: 1 - tanh^2, of its
    // raw product.
    __device__ __forceinline__ float softcap_slope(float product) const {
        const float tanh = tanh_exact(product * params.softcap_factor);
        return fmaf(-tanh, tanh, 1.f);
    }
    // The same, found again from the weight 2^(x - lse).
    __device__ __forceinline__ float softcap_slope(float weight, float lse_log2, int row, int key) const {
        if (!kHasSoftcap) return 1.f;
        if (!(weight > 0.f)) return 0.f;
        float x = log2_approx(weight) + lse_log2;
        if constexpr (kHasAlibi) x += alibi(row, key);
        if constexpr (kHasBias) x -= bias_at(row, key);
        const float tanh = x * softcap_inverse;
        return fmaxf(0.f, 1.f - tanh * tanh);
    }

    // Adds a gradient of the score after the softcap, in natural units, to the bias's. `gradient`
    // is 0 where the row does not see the key.
    __device__ __forceinline__ void add_to_dbias(float gradient, int row, int key) const {
        if (gradient != 0.f && is_inside(row, key)) atomicAdd(dbias + row * params.dbias.stride_seqlen_q + key * params.dbias.stride_seqlen_k, gradient);
    }

private:
    // A lane's scores stand in two lines, 8 rows (transposed: 8 keys) apart, and of each line it
    // holds two neighbours of every 8.
    template <bool kTransposed, int kTiles>
    __device__ __forceinline__ void modify_all(float (&acc)[kTiles][4], int row, int key, bool is_full) const {
        #pragma unroll
        for (int line = 0; line < 2; ++line) {
            const int first_row = row + (kTransposed ? 0 : line * 8), first_key = key + (kTransposed ? line * 8 : 0);
            // How many of the line lie within the sequence; nothing may be read past it.
            const int left = kTransposed ? (first_key < sequence.seqlen_k ? sequence.seqlen_q - row : 0)
                                         : (first_row < sequence.seqlen_q ? sequence.seqlen_k - key : 0);
            int masked_left = left;
            if constexpr (kHasBlockMask) masked_left = is_full ? 0 : left;
            Walk<Element> bias_walk(bias, params.bias, first_row, first_key, kTransposed);
            MaskWalk<kTransposed> mask_walk(mask, params.mask, first_row, first_key, kTransposed);
            #pragma unroll
            for (int n = 0; n < kTiles; ++n) {
                #pragma unroll
                for (int c = 0; c < 2; ++c) {
                    float& x = acc[n][2 * line + c];
                    x = capped(x) - alibi(first_row + (kTransposed ? n * 8 + c : 0), first_key + (kTransposed ? 0 : n * 8 + c));
                    if constexpr (kHasBias) x = fmaf(n * 8 + c < left ? unpack(bias_walk.at(c)) : 0.f, kLog2E, x);
                    if constexpr (kHasMask) x = n * 8 + c < masked_left && mask_walk.at(c) == 0 ? -infinity() : x;
                }
                if constexpr (kHasBias) bias_walk.advance();
                if constexpr (kHasMask) mask_walk.advance();
            }
        }
    }

    // Along a line of a view, 8 elements at a time. The stride is opaque: its multiples would be
    // kept over the loop around, and spill.
    template <class T>
    struct Walk {
        const T* from;
        int64 stride;

        __device__ __forceinline__ Walk(const T* start, const ScoresView& view, int row, int key, bool along_rows)
            : from(start + row * view.stride_seqlen_q + key * view.stride_seqlen_k), stride(along_rows ? view.stride_seqlen_q : view.stride_seqlen_k) {
            make_opaque(stride);
        }
        __device__ __forceinline__ T at(int c) const { return from[c * stride]; }
        __device__ __forceinline__ void advance() { from += 8 * stride; }
    };

    // The mask's bits along a line. A byte has those of eight keys, the first one's the lowest:
    // where the line goes along keys, all that it holds of them.
    template <bool kTransposed>
    struct BitWalk {
        const uint8* from;
        int64 stride;
        int bit;  // of the line's first element

        __device__ __forceinline__ BitWalk(const uint8* start, const ScoresView& view, int row, int key, bool)
            : from(start + row * view.stride_seqlen_q + key / 8), stride(kTransposed ? view.stride_seqlen_q : 0), bit(key % 8) {
            make_opaque(stride);
        }
        __device__ __forceinline__ uint32 at(int c) const { return kTransposed ? from[c * stride] >> bit & 1 : *from >> (bit + c) & 1; }
        __device__ __forceinline__ void advance() { from += kTransposed ? 8 * stride : 1; }
    };
    // Along the mask: what `at` gives is 0 where it hides the key.
    template <bool kTransposed>
    using MaskWalk = typename Either<kMaskIsBits, BitWalk<kTransposed>, Walk<uint8>>::Type;

    // In log2 units.
    __device__ __forceinline__ float bias_at(int row, int key) const {
        return is_inside(row, key) ? unpack(bias[row * params.bias.stride_seqlen_q + key * params.bias.stride_seqlen_k]) * kLog2E : 0.f;
    }

    __device__ __forceinline__ int64 place(const ScoresView& view, int head) const { return sequence.batch * view.stride_batch + head * view.stride_head; }
};
