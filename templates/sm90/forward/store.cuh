// What becomes of O at the end of a tile in the sm90 forward kernel: the factors of its rows, and
// one of four stores. With kTmaStore O goes from a consumer warpgroup's registers to shared memory
// (shared.cuh) and from there to device memory by TMA: to a Q slot, or with a single Q slot to a
// buffer for a part of its columns at a time. The other stores are store_partial
// (store_partial.cuh) and store_rows (device/layout/store_rows.cuh).

#include "device/attention/row_softmax.cuh"
#include "device/attention/sink.cuh"
#include "device/layout/store_rows.cuh"
#include "device/layout/write_boxes.cuh"
#include "device/ptx/sync.cuh"
#include "sm90/forward/multiply.cuh"
#include "sm90/forward/store_partial.cuh"
#include "sm90/forward/tile_rows.cuh"

// The end of one of the lane's two rows, whose weights have the sum `total`. The combine kernel
// adds the sink and the dropout scale, once for all splits of a row.
__device__ __forceinline__ RowEnd end_of_row(int r, const float& total, const RowSoftmax& softmax, const bool& is_partial, const int& head, const KernelParams& params) {
    if (is_partial) return RowEnd{total == 0.f ? 0.f : 1.f / total, softmax.lse(r, total)};
    if constexpr (kHasSinks || kIsBatchInvariant) return end_row(total, softmax.lowered_by(r), head, params);
    const float keep_scale = kHasDropout ? params.dropout_keep_scale : 1.f;
    return RowEnd{total == 0.f ? 0.f : keep_scale / total, softmax.lse(r, total)};
}

// Writes the lane's elements of two rows of O to device memory.
__device__ __forceinline__ void store_rows_of_tile(const Output& o, const int& row, const KernelParams& params, const Tile& tile, const Sequence& sequence, const int& lane) {
    uint16* to = static_cast<uint16*>(params.out.data) + sequence.place_q(params, params.out, tile.head) + row * params.out.stride_seqlen;
    store_rows(to, params.out.stride_seqlen, o, sequence.seqlen_q - row, lane);
}

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

// The same through the consumer's buffer at `boxes`, kBoxesO boxes at a time. A part waits until
// TMA has read the part before from the buffer. The first part waits for the last tile's last one.
__device__ __forceinline__ void store_in_parts(const Output& o, uint32 boxes, int barrier, int thread,
                                               const KernelParams& params, const TensorMap& map_out, const Tile& tile,
                                               const Share& share, const Sequence& sequence) {
    const MapRows rows = map_rows_q(params, sequence, params.map_rows_o);
    #pragma unroll
    for (int first = 0; first < kBoxesV; first += kBoxesO) {
        if (thread == 0) bulk_wait_read();
        warpgroup_barrier(barrier);  // the buffer is free
        write_boxes(boxes, thread / 32 * 16, o, thread % 32, first * 8, min(kOTiles, (first + kBoxesO) * 8));
        fence_async_proxy();
        warpgroup_barrier(barrier);  // all four warps have written the part, and TMA sees it
        if (thread == 0) {
            #pragma unroll
            for (int box = first; box < min(kBoxesV, first + kBoxesO); ++box) {
                tma_store(map_out, boxes + (box - first) * 64 * kBoxRowBytes, box * kBoxCols, share.row, tile.head, rows);
            }
            tma_store_commit();
        }
    }
}
