// Scores that stand transposed, keys down and queries across, and weights from them. The kernel
// lists the wgmma shapes beforehand.

#include "device/layout/operand.cuh"
#include "device/ptx/math.cuh"
#include "device/ptx/shared.cuh"

// S^T = K Q^T or dP^T = V dO^T: keys by the block's queries, dims innermost. The first kSteps k16
// steps, which overwrite.
template <int kSteps, int kTiles>
__device__ __forceinline__ void multiply_scores(float (&acc)[kTiles][4], uint32 keys_low, uint32 queries_low) {
    const ColumnSteps<kBytesBoxN / kBoxRowBytes, kSteps> keys(keys_low);
    const ColumnSteps<kBlockM, kSteps> queries(queries_low);
    wgmma_scores_first(acc, keys.of, queries.of);
}
// Steps kBegin to kEnd, which add.
template <int kBegin, int kEnd, int kTiles>
__device__ __forceinline__ void add_scores(float (&acc)[kTiles][4], uint32 keys_low, uint32 queries_low) {
    if constexpr (kBegin < kEnd) {
        const ColumnSteps<kBytesBoxN / kBoxRowBytes, kEnd - kBegin, kBegin> keys(keys_low);
        const ColumnSteps<kBlockM, kEnd - kBegin, kBegin> queries(queries_low);
        wgmma_scores(acc, keys.of, queries.of);
    }
}
// The first kSteps steps; `beside` is called after the first one.
template <int kSteps, int kTiles, class Beside>
__device__ __forceinline__ void multiply_scores(float (&acc)[kTiles][4], uint32 keys_low, uint32 queries_low, const Beside& beside) {
    multiply_scores<1>(acc, keys_low, queries_low);
    beside();
    add_scores<1, kSteps>(acc, keys_low, queries_low);
}

// The LSE of a block's queries, which lies with the slot of its Q. A lane uses two of each 8
// queries, from lane % 4 * 2 on. If kHeld, a lane loads them beside the first step of S^T: later,
// the loads would wait behind those of all operands of S^T and dP^T. Otherwise a lane loads each at
// its use. The address is written out there: kept over the loop, its parts would take registers.
template <bool kHeld>
struct BlockLse {
    float lse[kHeld ? kMTiles : 1][2];

    __device__ __forceinline__ void load_tile(float (&to)[2], uint32 lse_of_slots, uint32 slot, int n, int lane) const {
        load_floats(to, lse_of_slots + slot * kBytesStats + (n * 8 + lane % 4 * 2) * 4);
    }
    __device__ __forceinline__ void load(uint32 lse_of_slots, uint32 slot, int lane) {
        if constexpr (kHeld) {
            #pragma unroll
            for (int n = 0; n < kMTiles; ++n) load_tile(lse[n], lse_of_slots, slot, n, lane);
        }
    }
    // P^T = 2^(S^T * scale - LSE)
    template <int kTiles>
    __device__ __forceinline__ void weigh(float (&acc_s)[kTiles][4], uint32 lse_of_slots, uint32 slot, float scale_log2, int lane) {
        #pragma unroll
        for (int n = 0; n < kTiles; ++n) {
            if constexpr (!kHeld) load_tile(lse[0], lse_of_slots, slot, n, lane);
            #pragma unroll
            for (int i = 0; i < 4; ++i) acc_s[n][i] = exp2_approx(fmaf(acc_s[n][i], scale_log2, -lse[kHeld ? n : 0][i % 2]));
        }
    }
};
