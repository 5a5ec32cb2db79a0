// The steps between Q K^T and the softmax: softcap, ALiBi, bias, and a mask of bytes or bits. Both
// passes and all families call it. It works on accumulators in registers, and knows neither tiles
// in shared memory nor schedules.
//
// Scores come as raw products and leave in log2 units: log2(e) * (softcap(scale * q k) + alibi +
// bias), or -inf where the mask hides the key. A softmax behind it therefore has a scale of 1. A
// kernel compiles only the steps that it uses. `row` and `key` are absolute within the sequence in
// every function.

#include "device/attention/sequence.cuh"
#include "device/numeric.cuh"
#include "device/ptx/compiler.cuh"

constexpr bool kModifiesScores = kHasSoftcap || kHasAlibi || kHasBias || kHasMask;
// Whether the backward pass keeps the softcap's slopes of the products. A slope found again from a
// weight lacks what rounding took from its score and its row's LSE. A small cap magnifies that
// error.
constexpr bool kKeepsSlopes = kIsFp32 && kHasSoftcap;

// tanh with a relative error of about 2^-20, so that a wide softcap costs no accuracy. For fp32
// tensors it is within 2 ulp, as a score of 20 needs it. The formula 1 - 2 / (e^2x + 1) uses ex2
// and rcp, which give infinity and 0 where they must. The formula cancels near 0, so the series of
// tanh replaces it there.
__device__ __forceinline__ float tanh_exact(float x) {
    if constexpr (kIsFp32) return tanhf(x);
    const float square = x * x, series = x * fmaf(square, fmaf(square, 2.f / 15.f, -1.f / 3.f), 1.f);
    return fabsf(x) < 0.125f ? series : 1.f - __fdividef(2.f, exp2_approx(x * (2.f * kLog2E)) + 1.f);
}

struct ScoreModifier {
    const KernelParams& params;
    const Sequence& sequence;
    // `bias`, `mask` and `dbias` point at row 0 and key 0 of this batch entry and query head.
    const Element* bias;
    const uint8* mask;
    float* dbias;
    float slope_log2;         // the slope of ALiBi, times log2(e)
    float softcap_inverse;    // 1 / softcap_log2

    __device__ __forceinline__ ScoreModifier(const KernelParams& params, const Sequence& sequence, int head) : params(params), sequence(sequence) {
        if constexpr (kHasBias) bias = static_cast<const Element*>(params.bias.data) + place(params.bias, head);
        if constexpr (kHasBias) dbias = static_cast<float*>(params.dbias.data) + place(params.dbias, head);
        if constexpr (kHasMask) mask = static_cast<const uint8*>(params.mask.data) + place(params.mask, head);
        if constexpr (kHasSoftcap) softcap_inverse = 1.f / params.softcap_log2;
        if constexpr (kHasAlibi) slope_log2 = params.alibi_slopes[sequence.batch * params.alibi_stride_batch + head] * kLog2E;
    }

    __device__ __forceinline__ bool is_inside(int row, int key) const { return row < sequence.seqlen_q && key < sequence.seqlen_k; }

    // A raw product through the softcap, in log2 units.
    __device__ __forceinline__ float capped(float product) const {
        return kHasSoftcap ? params.softcap_log2 * tanh_exact(product * params.softcap_factor) : product * params.softmax_scale_log2;
    }
    // The penalty that ALiBi subtracts, in log2 units.
    __device__ __forceinline__ float alibi(int row, int key) const {
        return kHasAlibi ? slope_log2 * fabsf(float(row + sequence.seqlen_k - sequence.seqlen_q - key)) : 0.f;
    }

    // Modifies an accumulator. A lane holds rows `row` and row + 8, and two of every 8 keys, the
    // first two at `key`. With `is_full` the mask is not read.
    template <int kTiles>
    __device__ __forceinline__ void modify(float (&acc)[kTiles][4], int row, int key, bool is_full = false) const { modify_all<false>(acc, row, key, is_full); }
    // Modifies transposed scores. A lane holds keys `key` and key + 8, and two of every 8 queries,
    // the first two at `row`.
    template <int kTiles>
    __device__ __forceinline__ void modify_transposed(float (&acc)[kTiles][4], int row, int key, bool is_full = false) const { modify_all<true>(acc, row, key, is_full); }

    // ---- backward

    // The derivative of the softcap at a raw product: 1 - tanh^2. A score's gradient is multiplied
    // by it.
    __device__ __forceinline__ float softcap_slope(float product) const {
        const float tanh = tanh_exact(product * params.softcap_factor);
        return fmaf(-tanh, tanh, 1.f);
    }
    // The same derivative, found again from the weight 2^(x - lse).
    __device__ __forceinline__ float softcap_slope(float weight, float lse_log2, int row, int key) const {
        if (!kHasSoftcap) return 1.f;
        if (!(weight > 0.f)) return 0.f;
        float x = log2_approx(weight) + lse_log2;
        if constexpr (kHasAlibi) x += alibi(row, key);
        if constexpr (kHasBias) x -= bias_at(row, key);
        const float tanh = x * softcap_inverse;
        return fmaxf(0.f, 1.f - tanh * tanh);
    }

    // Adds a gradient of the score after the softcap, in natural units, to the bias's gradient.
    // `gradient` is 0 where the row does not see the key.
    __device__ __forceinline__ void add_to_dbias(float gradient, int row, int key) const {
        if (gradient != 0.f && is_inside(row, key)) atomicAdd(dbias + row * params.dbias.stride_seqlen_q + key * params.dbias.stride_seqlen_k, gradient);
    }

private:
    // Modifies the two lines of a lane's scores. The lines are 8 rows apart (transposed: 8 keys). A
    // lane holds two neighbours of every 8 elements of a line.
    template <bool kTransposed, int kTiles>
    __device__ __forceinline__ void modify_all(float (&acc)[kTiles][4], int row, int key, bool is_full) const {
        #pragma unroll
        for (int line = 0; line < 2; ++line) {
            const int first_row = row + (kTransposed ? 0 : line * 8), first_key = key + (kTransposed ? line * 8 : 0);
            // Elements of the line from the lane's first one to the sequence's end. Nothing past
            // the end may be read. first_row and first_key are absolute.
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

    // A walk along a line of a view, 8 elements a step. The stride is opaque: the compiler would
    // otherwise keep its multiples over the surrounding loop, and spill.
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

    // A walk along a line of the mask's bits. A byte holds the bits of eight keys, the first key in
    // the lowest bit. Along keys, the lane takes all its bits of a step from one byte.
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
    // The walk along either kind of mask. `at` returns 0 where the mask hides the key.
    template <bool kTransposed>
    using MaskWalk = typename Either<kMaskIsBits, BitWalk<kTransposed>, Walk<uint8>>::Type;

    // The bias in log2 units, or 0 outside the sequence.
    __device__ __forceinline__ float bias_at(int row, int key) const {
        return is_inside(row, key) ? unpack(bias[row * params.bias.stride_seqlen_q + key * params.bias.stride_seqlen_k]) * kLog2E : 0.f;
    }

    __device__ __forceinline__ int64 place(const ScoresView& view, int head) const { return sequence.batch * view.stride_batch + head * view.stride_head; }
};
