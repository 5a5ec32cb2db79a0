// Accumulators and operands of a consumer warpgroup in the sm90 forward kernel, and what is done to
// them around the products.

#include "device/attention/row_softmax.cuh"
#include "device/layout/operand.cuh"
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

// Issues O = P V (`accumulate` 0, a tile's first product) or O += P V as one wgmma group.
__device__ __forceinline__ void multiply_pv(Output& o, const Weights& p, uint32 v_tile, int accumulate) {
    const uint32 v_low = descriptor_low(v_tile, kBlockN * kBoxRowBytes);
    #pragma unroll
    for (int step = 0; step < kBlockN / 16; ++step) {
        wgmma_pv(o, p[step], descriptor(v_low + row_step(step)), step == 0 ? accumulate : 1);
    }
    wgmma_commit();
}

// Rounds the weights to 16 bits. S is free afterwards.
__device__ __forceinline__ void pack_weights(Weights& p, const Scores& s) {
    #pragma unroll
    for (int step = 0; step < kBlockN / 16; ++step) {
        #pragma unroll
        for (int i = 0; i < 4; ++i) p[step][i] = pack2(s[2 * step + i / 2][i % 2 * 2], s[2 * step + i / 2][i % 2 * 2 + 1]);
    }
}

// Scales O to the references that `softmax` has moved to.
__device__ __forceinline__ void rescale(Output& o, const RowSoftmax& softmax) {
    #pragma unroll
    for (int n = 0; n < kOTiles; ++n) {
        #pragma unroll
        for (int i = 0; i < 4; ++i) o[n][i] *= softmax.factor[i / 2];
    }
}

// Flips the signs of one warpgroup's Q in shared memory. All threads of the warpgroup take part;
// `barrier` is the warpgroup's.
__device__ __forceinline__ void negate_q(uint32 q_tile, int thread, int barrier) {
    for (int at = thread * 4; at < kBytesQ; at += 128 * 4) negate_pair(q_tile + at);
    fence_async_proxy();
    warpgroup_barrier(barrier);  // the negated Q is there for the wgmma of all four warps
}
