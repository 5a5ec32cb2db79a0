// The store of a split's O to the workspace, as a partial state that the combine kernel reads
// (device/attention/partials.cuh). The sm90 forward kernels use it.

#include "device/attention/partial_rows.cuh"
#include "device/attention/sequence.cuh"
#include "device/numeric.cuh"
#include "device/schedule/tile_order.cuh"

// Writes a lane's elements of two rows of a split's O and LSE to the workspace. `row` is the index
// of the first row in its sequence; the second is row + 8. The O of a row that sees no key of the
// split is not written.
template <int kTiles>
__device__ __forceinline__ void store_partial(const float (&o)[kTiles][4], const float (&lse)[2], int row, const KernelParams& params,
                                              const Tile& tile, const Sequence& sequence, int lane) {
    #pragma unroll
    for (int r = 0; r < 2; ++r) {
        if (row + r * 8 >= sequence.seqlen_q) continue;
        const int64 at = RowsOfStates(params).row(params, tile.split, tile.batch, tile.head, row + r * 8);
        if (lane % 4 == 0) params.partial_lse[at] = lse[r];
        if (lse[r] == -infinity()) continue;
        float* const to = params.partial_o + at * kPartialCols + lane % 4 * 2;
        // The lanes of a quad write the 32 bytes of a sector.
        #pragma unroll
        for (int n = 0; n < kTiles; ++n) *reinterpret_cast<float2*>(to + n * 8) = make_float2(o[n][2 * r], o[n][2 * r + 1]);
    }
}
