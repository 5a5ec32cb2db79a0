// Boxes of tensors by the copy engine: which coordinates of a map the rows of a sequence have.
//
// src/kernel/launch_maps.rs makes the maps. A box is 64 columns of some rows in the layout of
// layout/swizzle.cuh. What lies outside the tensor arrives as zeros and counts as copied, and is
// never written.
//
// Maps are rank 4 (dim, seqlen, head, batch) or, of varlen tensors (kIsVarlen), rank 5 (dim, row,
// back, end, head), so that what lies outside the sequence lies outside the tensor, too. `row` has
// kMapRows coordinates: row i of a sequence is i + kMapRows - length, which is inside for i <
// length alone. `end` counts rows of the tensor, up to the row behind the sequence's last. kMapRows
// steps of `back` go back by kMapRows rows, modulo 2^64. So the three meet at the row that is
// meant.

#include "device/attention/sequence.cuh"
#include "device/layout/swizzle.cuh"
#include "device/ptx/tma.cuh"

constexpr int kMapRows = 1 << 30;  // as src/kernel/launch_maps.rs has it

// Where a map has the rows of a sequence.
struct MapRows {
    int batch;
    int shift, end;  // kIsVarlen
};
// `rows_between` is the distance in rows between the starts of neighbouring sequences in a padded
// tensor.
__device__ __forceinline__ MapRows map_rows_q(const KernelParams& params, const Sequence& sequence, int rows_between) {
    if (!kIsVarlen) return {sequence.batch, 0, 0};
    const int start = params.cu_seqlens_q ? int(sequence.offset_q) : sequence.batch * rows_between;
    return {0, kMapRows - sequence.seqlen_q, start + sequence.seqlen_q};
}
__device__ __forceinline__ MapRows map_rows_k(const KernelParams& params, const Sequence& sequence, int rows_between) {
    if (!kIsVarlen) return {sequence.batch, 0, 0};
    const int start = params.cu_seqlens_k ? int(sequence.offset_k) : sequence.batch * rows_between;
    return {0, kMapRows - sequence.seqlen_k, start + sequence.seqlen_k};
}

// One box to shared memory; `barrier` counts its bytes.
__device__ __forceinline__ void tma_load(uint32 to, const TensorMap& map, uint32 barrier,
                                         int col, int row, int head, const MapRows& rows) {
    if constexpr (kIsVarlen) {
        tma_load_5d(to, map, barrier, col, row + rows.shift, kMapRows, rows.end, head);
    } else {
        tma_load_4d(to, map, barrier, col, row, head, rows.batch);
    }
}
// One box to the same place in both CTAs of a cluster; each one's `barrier` counts the bytes that
// it gets.
__device__ __forceinline__ void tma_load_both(uint32 to, const TensorMap& map, uint32 barrier,
                                              int col, int row, int head, const MapRows& rows) {
    if constexpr (kIsVarlen) {
        tma_load_both_5d(to, map, barrier, col, row + rows.shift, kMapRows, rows.end, head);
    } else {
        tma_load_both_4d(to, map, barrier, col, row, head, rows.batch);
    }
}
// One box to device memory, by one thread.
__device__ __forceinline__ void tma_store(const TensorMap& map, uint32 from, int col, int row, int head, const MapRows& rows) {
    if constexpr (kIsVarlen) {
        tma_store_5d(map, from, col, row + rows.shift, kMapRows, rows.end, head);
    } else {
        tma_store_4d(map, from, col, row, head, rows.batch);
    }
}
