// Accumulators and operands of a consumer warpgroup in the sm90 forward kernel for e4m3, and what
// is done to them around the products.

#include "device/attention/narrow_softmax.cuh"
#include "device/layout/operand.cuh"
#include "device/ptx/e4m3.cuh"
#include "device/ptx/sync.cuh"
#include "device/ptx/wgmma.cuh"
#include "sm90/forward_fp8/shared.cuh"

constexpr int kSTiles = kBlockN / 8;
constexpr int kOTiles = kHeadDimV / 8;
constexpr int kQKSteps = (kHeadDim + 31) / 32;
constexpr int kPVSteps = kBlockN / 32;

// Accumulators in wgmma's layout. A lane holds two rows and, of each 8 columns, two columns.
using Scores = float[kSTiles][4];    // S of one block, then its weights P
using Output = float[kOTiles][4];    // O, not normalised
using Weights = uint32[kPVSteps][4];  // P as the A operand of k32 steps, in 8 bits

// The offset of k32 step `step` along the bytes of boxes with kRows rows, in units of descriptors.
template <int kRows>
__device__ __forceinline__ constexpr uint32 byte_step(int step) {
    return step / 4 * (kRows * kBoxRowBytes / 16) + step % 4 * 2;
}

// Issues O = P V (`accumulate` 0, a tile's first product) or O += P V as one wgmma group.
__device__ __forceinline__ void multiply_pv(Output& o, const Weights& p, uint32 vt_tile, int accumulate) {
    const uint32 low = descriptor_low(vt_tile, 0);
    uint64 vt[kPVSteps];
    #pragma unroll
    for (int step = 0; step < kPVSteps; ++step) {
        vt[step] = kReadsImages ? image_descriptor(low, step) : descriptor(low + byte_step<kVtRows>(step));
    }
    wgmma_pv(o, p, vt, accumulate);
    wgmma_commit();
}

// Rounds the weights to e4m3, keys in the order of transpose.cuh. S is free afterwards.
__device__ __forceinline__ void pack_weights(Weights& p, const Scores& s) {
    #pragma unroll
    for (int step = 0; step < kPVSteps; ++step) {
        #pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int n = 4 * step + i / 2 * 2, c = i % 2 * 2;
            p[step][i] = pack4_e4m3(s[n][c], s[n][c + 1], s[n + 1][c], s[n + 1][c + 1]);
        }
    }
}

// Multiplies O's rows by their factors.
__device__ __forceinline__ void rescale(Output& o, const float (&factor)[2]) {
    #pragma unroll
    for (int n = 0; n < kOTiles; ++n) {
        #pragma unroll
        for (int i = 0; i < 4; ++i) o[n][i] *= factor[i / 2];
    }
}

// Flips the signs of one warpgroup's Q in shared memory. All threads of the warpgroup take part;
// `barrier` is the warpgroup's.
__device__ __forceinline__ void negate_q(uint32 q_tile, int thread, int barrier) {
    for (int at = thread * 4; at < kBytesQ; at += 128 * 4) store_word(q_tile + at, load_word_in_order(q_tile + at) ^ 0x80808080u);
    fence_async_proxy();
    warpgroup_barrier(barrier);  // the negated Q is there for the wgmma of all four warps
}

// Multiplies scores or weights by one factor.
__device__ __forceinline__ void multiply_scores(Scores& s, float factor) {
    #pragma unroll
    for (int n = 0; n < kSTiles; ++n) s[n][0] *= factor, s[n][1] *= factor, s[n][2] *= factor, s[n][3] *= factor;
}
