// Partial states: what each split of the keys leaves of a row, its normalised fp32 O and the LSE of
// its keys, and where they lie in the workspace: O (splits, batch, heads_q, seqlen_q,
// kPartialCols), LSE (splits, batch, heads_q, seqlen_q).
//
// A split that shows a row no key leaves the LSE alone, -inf: its O is not written.

#include "device/params.cuh"

constexpr int kPartialCols = (kHeadDimV + 3) / 4 * 4;  // so that rows are read 16 bytes at a time

__device__ __forceinline__ int64 partial_row(const KernelParams& params, int split, int batch, int head, int position) {
    return ((int64(split) * params.batch_size + batch) * params.num_heads_q + head) * params.seqlen_q + position;
}
