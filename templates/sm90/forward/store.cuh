// One of the three stores of O in the sm90 forward kernel. With kTmaStore O goes from a consumer
// warpgroup's registers to a Q slot (shared.cuh) and from there to device memory by TMA. The other
// two are store_partial (store_partial.cuh) and store_rows (device/layout/store_rows.cuh). The
// kernel normalises the rows before it stores them.

#include "device/layout/write_boxes.cuh"
#include "device/ptx/sync.cuh"
#include "sm90/forward/multiply.cuh"
#include "sm90/forward/store_partial.cuh"
#include "sm90/forward/tile_rows.cuh"

// Writes O to the Q slot at the shared-memory address `boxes` and starts its copy to device memory.
// The copy still runs while the next tile is computed. Before the call all four warps have
// multiplied with the slot's Q, and an earlier O has left it. `barrier` is the number of the
// warpgroup's named barrier.
__device__ __forceinline__ void store_by_tma(const Output& o, uint32 boxes, int barrier, int thread,
                                             const KernelParams& params, const TensorMap& map_out, const Tile& tile,
                                             const Share& share, const Sequence& sequence) {
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
