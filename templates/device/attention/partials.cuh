// Partial states: each split of the keys leaves the normalised fp32 O of a row and the LSE of its
// keys. The decode and sm90 forward kernels that split keys write them, and the combine kernels
// read them. This file knows their place in the workspace and no arithmetic.
//
// O is (splits, batch, heads_q, seqlen_q, kPartialCols), and LSE is (splits, batch, heads_q,
// seqlen_q). A split that shows a row no key writes LSE = -inf and leaves O unwritten.
//
// The states of short sequences, which a decode kernel takes out of a mixed batch, have rows for
// packed rows alone: O is (splits, batch, heads_kv, kMostRows, kPartialCols), and LSE is the same
// without columns.
//
// Where only some tiles of a head are split, the states have the rows of these tiles alone
// (partial_rows.cuh).
//
// With kIsBatchInvariant a segment or a group takes the place of a split (fixed_order.cuh). Its O
// is not normalised, and a reference and a sum take the place of the LSE. The state of a segment or
// group of which a row sees no key may be unwritten.

#include "device/params.cuh"

constexpr int kPartialCols = (kHeadDimV + 3) / 4 * 4;  // rows are read 16 bytes at a time

// References and sums of segments, in the place of the LSE.
__device__ __forceinline__ float2* segment_states(const KernelParams& params) { return reinterpret_cast<float2*>(params.partial_lse); }

__device__ __forceinline__ int64 partial_row(const KernelParams& params, int split, int batch, int head, int position) {
    return ((int64(split) * params.batch_size + batch) * params.num_heads_q + head) * params.seqlen_q + position;
}

// The same for a packed row of a short sequence (device/attention/packed_rows.cuh).
template <int kMostRows>
__device__ __forceinline__ int64 short_partial_row(const KernelParams& params, int split, int batch, int head_kv, int row) {
    return ((int64(split) * params.batch_size + batch) * params.num_heads_kv + head_kv) * kMostRows + row;
}
