// The scores of one key block in a team of the decode kernel, between its products.
//
// A warp's scores are kMTiles x kNTiles accumulators of mma: in each 16 x 8 a lane has columns
// lane % 4 * 2 and the next, of rows lane / 4 and lane / 4 + 8. Transposed ones have keys in place
// of rows, and rows in place of columns.

#include "decode/query.cuh"
#include "device/attention/softmax.cuh"

using Softmax = OnlineSoftmax<kMTiles, Either<kTransposes, RowsOfColumns<kKeyFormat == kInt4 ? 6 : 0>, RowsOfQuads>::Type>;

// Bias, softcap and the like, then the mask where the block is not visible as a whole. `row` is the
// lane's first packed row, counted in the sequence.
__device__ __forceinline__ void modify_and_mask(Scores& s, int row, int block, const BlockRange& seen, const QueryTile& tile,
                                                const KernelParams& params, int lane) {
    const int key = block * kBlockN + (kTransposes ? lane / 4 : lane % 4 * 2);  // the lane's first, counted in the sequence
    if constexpr (kModifiesScores) {
        #pragma unroll
        for (int m = 0; m < kMTiles; ++m) modify_packed(s[m], row + m * kTileRows, tile.head_kv, key, params, tile.sequence);
    }
    if (block < seen.full_begin || block >= seen.full_end) {
        #pragma unroll
        for (int m = 0; m < kMTiles; ++m) mask_packed(s[m], row + m * kTileRows, key, params, tile.sequence);
    }
}
