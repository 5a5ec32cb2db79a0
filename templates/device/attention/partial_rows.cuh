// The rows of partial states (device/attention/partials.cuh) where only some tiles of a head may be
// split. Only kernels for many rows read this file: it knows the mask, on which the text of the
// other combine kernels does not depend.

#include "device/attention/partials.cuh"

// The rows of a head that have states: all or, where only some tiles are split, as many as
// params.workspace_rows says (split_rows_of_head in schedule/tile_order.cuh).
struct RowsOfStates {
    int first, count;
    __device__ __forceinline__ explicit RowsOfStates(const KernelParams& params) {
        count = params.workspace_rows > 0 ? params.workspace_rows : params.seqlen_q;
        first = kIsCausal ? params.seqlen_q - count : 0;
    }
    __device__ __forceinline__ int64 all(const KernelParams& params) const { return int64(params.batch_size) * params.num_heads_q * count; }
    __device__ __forceinline__ int64 row(const KernelParams& params, int split, int batch, int head, int position) const {
        return ((int64(split) * params.batch_size + batch) * params.num_heads_q + head) * count + position - first;
    }
};
