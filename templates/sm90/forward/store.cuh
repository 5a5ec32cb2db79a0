// The way of O from a consumer's registers through its Q slot to device memory, in the sm90 forward
// kernel with kTmaStore. Rows are normalised before; the log-sum-exp is written after.

#include "device/layout/write_boxes.cuh"
#include "device/ptx/sync.cuh"
#include "sm90/forward/multiply.cuh"
#include "sm90/forward/tile_rows.cuh"

// Writes O to the Q slot at `boxes` and starts its copy by TMA, which runs on under the next tile.
// `barrier` is the warpgroup's.
__device__ __forceinline__ void store_by_tma(const Output& o, uint32 boxes, int barrier, int thread,
                                             const KernelParams& params, const TensorMap& map_out, const Tile& tile,
                                             const Share& share, const Sequence& sequence) {
    warpgroup_barrier(barrier);  // all four warps' products have read Q, and an earlier O has left this slot
    write_boxes(boxes, thread / 32 * 16, o, thread % 32);
    fence_async_proxy();
    warpgroup_barrier(barrier);  // all of O is in the slot, for the copy engine too
    if (thread == 0) {
        const MapRows rows = map_rows_q(params, sequence, params.map_rows_o);
        #pragma unroll
        for (int box = 0; box < kBoxesV; ++box) {
            tma_store(map_out, boxes + box * 64 * kBoxRowBytes, box * kBoxCols, share.row, tile.head, rows);
        }
        tma_store_commit();
    }
}
