// Scores that stand transposed, keys down and queries across, and weights from them. The kernel
// lists the wgmma shapes beforehand.

#include "device/layout/operand.cuh"
#include "device/ptx/math.cuh"
#include "device/ptx/shared.cuh"

// S^T = K Q^T or k16 steps of dP^T = V dO^T: keys by the block's queries, dims innermost.
__device__ __forceinline__ void multiply_scores(float (&acc)[kMTiles][4], uint32 keys_low, uint32 queries_low, int steps) {
    wgmma_scores_first(acc, descriptor(keys_low), descriptor(queries_low));
    #pragma unroll
    for (int step = 1; step < steps; ++step) {
        wgmma_scores(acc, descriptor(keys_low + column_step<kBytesBoxN / kBoxRowBytes>(step)), descriptor(queries_low + column_step<kBlockM>(step)));
    }
}

// P^T = 2^(S^T * scale - LSE). The LSE of a block lies with the slot of its Q; a lane holds of each
// 8 queries the two from lane % 4 * 2 on. The address is written out at each load: kept over the
// loop, its parts would take registers.
template <int kTiles>
__device__ __forceinline__ void weigh_transposed(float (&acc_s)[kTiles][4], uint32 lse_of_slots, uint32 slot, float scale_log2, int lane) {
    #pragma unroll
    for (int n = 0; n < kTiles; ++n) {
        float lse[2];
        load_floats(lse, lse_of_slots + slot * kBytesStats + (n * 8 + lane % 4 * 2) * 4);
        #pragma unroll
        for (int i = 0; i < 4; ++i) acc_s[n][i] = exp2_approx(fmaf(acc_s[n][i], scale_log2, -lse[i % 2]));
    }
}
