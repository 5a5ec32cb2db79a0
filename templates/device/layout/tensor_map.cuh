// Copies of boxes between tensors and shared memory by TMA: the map coordinates of a sequence's
// rows. src/kernel/launch_maps.rs makes the maps. This file knows no pipeline and no mask.
//
// A box is 64 columns of some rows in the 128-byte swizzle (layout/swizzle.cuh). Elements outside
// the tensor arrive as zeros, count as copied, and are never written.
//
// Maps have rank 4 (dim, seqlen, head, batch). Varlen tensors (kIsVarlen) have maps of rank 5 (dim,
// row, back, end, head), so that an element outside the sequence is also outside the tensor. `row`
// has kMapRows coordinates. Row i of a sequence is i + kMapRows - length, which is inside for i <
// length alone. `end` counts rows of the tensor, up to the row behind the sequence's last. kMapRows
// steps of `back` go back by kMapRows rows, modulo 2^64. The three coordinates together give row i
// of the sequence.

#include "device/attention/sequence.cuh"
#include "device/layout/swizzle.cuh"
#include "device/ptx/tma.cuh"

constexpr int kMapRows = 1 << 30;  // the same number as in src/kernel/launch_maps.rs

// The coordinates that all rows of one sequence share.
struct MapRows {
    int batch;
    int shift, end;  // with kIsVarlen
};
// `rows_between` is the distance, in rows, between the starts of neighbouring sequences of a padded
// tensor.
__device__ __forceinline__ MapRows map_rows_q(const KernelParams& params, const Sequence& sequence, int rows_between) {
    if (!kIsVarlen) return {sequence.batch, 0, 0};
    const int start = params.cu_seqlens_q ? int(sequence.offset_q) : sequence.batch * rows_between;
    return {0, kMapRows - sequence.seqlen_q, start + sequence.seqlen_q};
}
__device__ __forceinline__ MapRows map_rows_k(const KernelParams& params, const Sequence& sequence, int rows_between) {
    if (!kIsVarlen) return {sequence.batch, 0, 0};
    int start = params.cu_seqlens_k ? int(sequence.offset_k) : sequence.batch * rows_between;
    if constexpr (kHasKeyStarts) start = sequence.entry_k * rows_between + int(sequence.offset_k);
    return {0, kMapRows - sequence.seqlen_k, start + sequence.seqlen_k};
}

// Loads one box to shared memory. `barrier` counts its bytes. `row` is absolute within the
// sequence.
__device__ __forceinline__ void tma_load(uint32 to, const TensorMap& map, uint32 barrier,
                                         int col, int row, int head, const MapRows& rows) {
    if constexpr (kIsVarlen) {
        tma_load_5d(to, map, barrier, col, row + rows.shift, kMapRows, rows.end, head);
    } else {
        tma_load_4d(to, map, barrier, col, row, head, rows.batch);
    }
}
// Loads one box to the same place in both CTAs of a cluster. Each CTA's `barrier` counts the bytes
// that this CTA receives.
__device__ __forceinline__ void tma_load_both(uint32 to, const TensorMap& map, uint32 barrier,
                                              int col, int row, int head, const MapRows& rows) {
    if constexpr (kIsVarlen) {
        tma_load_both_5d(to, map, barrier, col, row + rows.shift, kMapRows, rows.end, head);
    } else {
        tma_load_both_4d(to, map, barrier, col, row, head, rows.batch);
    }
}
// Stores one box to device memory. One thread calls it, and commits and waits for the group.
__device__ __forceinline__ void tma_store(const TensorMap& map, uint32 from, int col, int row, int head, const MapRows& rows) {
    if constexpr (kIsVarlen) {
        tma_store_5d(map, from, col, row + rows.shift, kMapRows, rows.end, head);
    } else {
        tma_store_4d(map, from, col, row, head, rows.batch);
    }
}
