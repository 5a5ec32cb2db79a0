// Accumulators and operands of a consumer warpgroup in the sm90 forward kernel, and what is done to
// them around the products.

#include "device/attention/row_softmax.cuh"
#include "device/layout/operand.cuh"
#include "device/ptx/eight.cuh"
#include "device/ptx/sync.cuh"
#include "device/ptx/wgmma.cuh"
#include "sm90/forward/shared.cuh"

constexpr int kSTiles = kBlockN / 8;
constexpr int kOTiles = (kHeadDimV + 7) / 8;
constexpr int kKSteps = (kHeadDim + 15) / 16;

// Accumulators in wgmma's layout. A lane holds two rows and, of each 8 columns, two columns.
using Scores = float[kSTiles][4];         // S of one block, then its weights P
using Output = float[kOTiles][4];         // O, not normalised
using Weights = uint32[kBlockN / 16][4];  // P as the A operand of k16 steps, in 16 bits

// Issues S = Q K^T as one wgmma group. The operands are the lower words of descriptors.
__device__ __forceinline__ void multiply_qk(Scores& s, uint32 q_low, uint32 k_low) {
    const ColumnSteps<64, kKSteps> q(q_low);
    const ColumnSteps<kBlockN, kKSteps> k(k_low);
    wgmma_qk(s, q.of, k.of);
    wgmma_commit();
}

// Issues O = P V (`accumulate` 0, a tile's first product) or O += P V as one wgmma group.
__device__ __forceinline__ void multiply_pv(Output& o, const Weights& p, uint32 v_tile, int accumulate) {
    const uint32 v_low = descriptor_low(v_tile, kBlockN * kBoxRowBytes);
    const RowSteps<kBlockN / 16> v(v_low);
    wgmma_pv(o, p, v.of, accumulate);
    wgmma_commit();
}

// Makes weights of the scores of a block behind a tile's first. Blocks without a mask are not
// searched for a maximum with kStaleMax.
template <bool kIsMasked, class Scale>
__device__ __forceinline__ void weigh(Scores& s, RowSoftmax& softmax, const Scale& scale_log2) {
    if constexpr (kStaleMax && !kIsMasked) softmax.stale(s, scale_log2);
    else softmax.lazy(s, scale_log2);
}

// Rounds the weights to the 16 bits of V's tile. S is free afterwards.
__device__ __forceinline__ void pack_weights(Weights& p, const Scores& s) {
    #pragma unroll
    for (int step = 0; step < kBlockN / 16; ++step) {
        #pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float low = s[2 * step + i / 2][i % 2 * 2], high = s[2 * step + i / 2][i % 2 * 2 + 1];
            p[step][i] = kConverts ? floats_to_fp16_pair(low, high) : pack2(low, high);
        }
    }
}

__device__ __forceinline__ void clear_output(Output& o) {
    #pragma unroll
    for (int n = 0; n < kOTiles; ++n) o[n][0] = o[n][1] = o[n][2] = o[n][3] = 0.f;
}

// Scales O to the references that `softmax` has moved to.
__device__ __forceinline__ void rescale(Output& o, const RowSoftmax& softmax) {
    #pragma unroll
    for (int n = 0; n < kOTiles; ++n) {
        #pragma unroll
        for (int i = 0; i < 4; ++i) o[n][i] *= softmax.factor[i / 2];
    }
}

// Scales one of the lane's two rows of O.
__device__ __forceinline__ void scale_row(Output& o, int r, float factor) {
    #pragma unroll
    for (int n = 0; n < kOTiles; ++n) o[n][2 * r] *= factor, o[n][2 * r + 1] *= factor;
}

// Flips the signs of one warpgroup's Q in shared memory. All threads of the warpgroup take part;
// `barrier` is the warpgroup's.
__device__ __forceinline__ void negate_q(uint32 q_tile, int thread, int barrier) {
    for (int at = thread * 4; at < kBytesQ; at += 128 * 4) negate_pair(q_tile + at);
    fence_async_proxy();
    warpgroup_barrier(barrier);  // the negated Q is there for the wgmma of all four warps
}

// Turns one warpgroup's Q from bf16 to fp16 in shared memory, all threads together. A row is
// multiplied by a power of two that puts its largest element at 2^14, unless that is in fp16's
// range already, and by -1 with `is_negated`. `factors` become what the scores of the lane's two
// rows lack. Returns whether one is not 1 in some row of the warp.
__device__ __forceinline__ bool convert_q(uint32 q_tile, bool is_negated, float (&factors)[2], int thread, int barrier) {
    // Two threads have a row, each half of the chunks of a box, so that eight lanes read different
    // banks.
    const int row = thread / 2, lane = thread % 32;
    const auto place = [&](int box, int i) { return q_tile + (box * 64 + row) * kBoxRowBytes + swizzled(thread % 2 * 4 + i, row % 8); };
    uint32 largest = 0;  // bits of positive numbers are ordered as the numbers are
    const auto of_pair = [&](uint32 pair) { largest = max(largest, max(pair & 0x7fff, pair >> 16 & 0x7fff)); };
    #pragma unroll 1
    for (int box = 0; box < kBoxesQK; ++box) {
        #pragma unroll
        for (int i = 0; i < 4; ++i) {
            const uint4 chunk = load_chunk(place(box, i));
            of_pair(chunk.x), of_pair(chunk.y), of_pair(chunk.z), of_pair(chunk.w);
        }
    }
    largest = max(largest, __shfl_xor_sync(0xffffffff, largest, 1));
    // The exponent of the power by which the row is multiplied, in fp32's field: 2^0 for zeros and
    // from 2^-3 to below 2^15, where the rounding of small elements is below 2^-22 of the largest.
    // An infinity stays one. The power is at most 2^64, so that its inverse times a scale stays a
    // factor of scores that is not 0: it would turn masked scores, which are -inf, to NaN.
    const bool is_in_range = largest == 0 || (largest >> 7) - 124 < 18;
    const uint32 exponent = is_in_range ? 127 : min(191u, 268u - (largest >> 7));
    const float power = __uint_as_float(exponent << 23 | (is_negated ? 0x80000000u : 0));
    const auto converted = [&](uint32 pair) {
        return floats_to_fp16_pair(__uint_as_float(pair << 16) * power, __uint_as_float(pair & 0xffff0000) * power);
    };
    #pragma unroll 1
    for (int box = 0; box < kBoxesQK; ++box) {
        #pragma unroll
        for (int i = 0; i < 4; ++i) {
            const uint4 chunk = load_chunk(place(box, i));
            store_four_ints(place(box, i), converted(chunk.x), converted(chunk.y), converted(chunk.z), converted(chunk.w));
        }
    }
    const float lacking = __uint_as_float((254u - exponent) << 23);
    #pragma unroll
    for (int r = 0; r < 2; ++r) factors[r] = __shfl_sync(0xffffffff, lacking, lane / 4 * 2 + r * 16);
    fence_async_proxy();
    warpgroup_barrier(barrier);  // Q is there for the wgmma of all four warps
    return __any_sync(0xffffffff, !is_in_range);
}
