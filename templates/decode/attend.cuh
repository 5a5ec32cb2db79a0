// The products and the softmax of one key block in a team of the decode kernel.
//
// A warp's scores are kMTiles x kNTiles accumulators of mma: in each 16 x 8 a lane has columns
// lane % 4 * 2 and the next, of rows lane / 4 and lane / 4 + 8.

#include "decode/query.cuh"
#include "device/attention/softmax.cuh"

using Scores = float[kMTiles][kNTiles][4];
using Output = float[kMTiles][kOTiles][4];

// S = Q K^T.
__device__ __forceinline__ void multiply_qk(Scores& s, const QueryOperand& q, uint32 tile_k, int lane) {
    if constexpr (kQInRegs) {
        gemm_regs<TileK>(s, q.fragments, tile_k, lane);
    } else {
        gemm<TileQ, TileK>(s, q.tile, tile_k, lane);
    }
}

// Bias, softcap and the like, then the mask where the block is not visible as a whole. `row` is the
// lane's first packed row, counted in the sequence.
__device__ __forceinline__ void modify_and_mask(Scores& s, int row, int block, const BlockRange& seen, const QueryTile& tile,
                                                const KernelParams& params, int lane) {
    const int key = block * kBlockN + lane % 4 * 2;  // the lane's first, counted in the sequence
    if constexpr (kModifiesScores) {
        #pragma unroll
        for (int m = 0; m < kMTiles; ++m) modify_packed(s[m], row + m * 16, tile.head_kv, key, params, tile.sequence);
    }
    if (block < seen.full_begin || block >= seen.full_end) {
        #pragma unroll
        for (int m = 0; m < kMTiles; ++m) mask_packed(s[m], row + m * 16, key, params, tile.sequence);
    }
}

// O += P V, in the warp's columns of V.
__device__ __forceinline__ void multiply_pv(Output& o, const Scores& p, uint32 tile_v, const ThreadPlace& place) {
    #pragma unroll
    for (int k = 0; k < kBlockN / 16; ++k) {
        uint32 operand[kMTiles][4];
        #pragma unroll
        for (int m = 0; m < kMTiles; ++m) pack_a(operand[m], p[m][2 * k], p[m][2 * k + 1]);
        gemm_step_trans<TileV>(o, operand, TileV::part(tile_v, k * 16, place.warp_v * kWarpCols), place.lane);
    }
}
