// Two of the three stores of O in the sm90 forward kernel. With kTmaStore O goes from a consumer
// warpgroup's registers to a Q slot (shared.cuh) and from there to device memory by TMA. The O of a
// split goes to the workspace as a partial state. The third store is store_rows
// (device/layout/store_rows.cuh). The kernel normalises the rows before it stores them.

#include "device/attention/partials.cuh"
#include "device/layout/write_boxes.cuh"
#include "device/ptx/sync.cuh"
#include "sm90/forward/multiply.cuh"
#include "sm90/forward/tile_rows.cuh"

// Writes O to the Q slot at the shared-memory address `boxes` and starts its copy to device memory.
// The copy still runs while the next tile is computed. `barrier` is the number of the warpgroup's
// named barrier.
__device__ __forceinline__ void store_by_tma(const Output& o, uint32 boxes, int barrier, int thread,
                                             const KernelParams& params, const TensorMap& map_out, const Tile& tile,
                                             const Share& share, const Sequence& sequence) {
    warpgroup_barrier(barrier);  // all four warps have multiplied with Q; an earlier O has left the slot
    write_boxes(boxes, thread / 32 * 16, o, thread % 32);
    fence_async_proxy();
    warpgroup_barrier(barrier);  // all four warps have written O, and TMA sees it
    if (thread == 0) {
        const MapRows rows = map_rows_q(params, sequence, params.map_rows_o);
        #pragma unroll
        for (int box = 0; box < kBoxesV; ++box) {
            tma_store(map_out, boxes + box * 64 * kBoxRowBytes, box * kBoxCols, share.row, tile.head, rows);
        }
        tma_store_commit();
    }
}

// Writes a lane's elements of two rows of a split's O and LSE to the workspace. `row` is the index
// of the first row in its sequence; the second is row + 8. The O of a row that sees no key of the
// split is not written.
__device__ __forceinline__ void store_partial(const Output& o, const float (&lse)[2], int row, const KernelParams& params,
                                              const Tile& tile, const Sequence& sequence, int lane) {
    #pragma unroll
    for (int r = 0; r < 2; ++r) {
        if (row + r * 8 >= sequence.seqlen_q) continue;
        const int64 at = partial_row(params, tile.split, tile.batch, tile.head, row + r * 8);
        if (lane % 4 == 0) params.partial_lse[at] = lse[r];
        if (lse[r] == -infinity()) continue;
        float* const to = params.partial_o + at * kPartialCols + lane % 4 * 2;
        // The lanes of a quad write the 32 bytes of a sector.
        #pragma unroll
        for (int n = 0; n < kOTiles; ++n) *reinterpret_cast<float2*>(to + n * 8) = make_float2(o[n][2 * r], o[n][2 * r + 1]);
    }
}
