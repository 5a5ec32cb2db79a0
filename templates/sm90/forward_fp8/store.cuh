// The store of a tile's O by TMA, for a consumer of the sm90 forward kernel for e4m3. O goes from
// registers to a slot of shared memory and from there to device memory, while the consumer goes on
// with the next tile. In place of shuffles and stores of 16 bytes the consumer has stmatrix.

#include "device/layout/tensor_map.cuh"
#include "device/layout/write_boxes.cuh"
#include "device/ptx/sync.cuh"
#include "sm90/forward/tile_rows.cuh"
#include "sm90/forward_fp8/multiply.cuh"

// `slot`: the consumer's, in shared memory. `barrier`: the warpgroup's. All four warps take part.
__device__ __forceinline__ void store_by_tma(const Output& o, uint32 slot, int barrier, int thread, const KernelParams& params,
                                             const TensorMap& map_out, const Tile& tile, const Share& share, const Sequence& sequence) {
    if (thread == 0) bulk_wait_read();
    warpgroup_barrier(barrier);  // the O of an earlier tile has left the slot
    write_boxes(slot, thread / 32 * 16, o, thread % 32);
    // The rows may hold sums that the accumulator has moved there (promote.cuh).
    fence_async_proxy_of_all();
    warpgroup_barrier(barrier);  // all four warps have written O, and TMA sees it
    if (thread == 0) {
        const MapRows rows = map_rows_q(params, sequence, params.map_rows_o);
        #pragma unroll
        for (int box = 0; box < kBoxesO; ++box) {
            tma_store(map_out, slot + box * 64 * kBoxRowBytes, box * kBoxCols, share.row, tile.head, rows);
        }
        tma_store_commit();
    }
}
