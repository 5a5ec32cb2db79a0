// Partial states: each split of the keys leaves the normalised fp32 O of a row and the LSE of its
// keys. Split decode kernels write them, and the combine kernel reads them. This file knows their
// place in the workspace and no arithmetic.
//
// O is (splits, batch, heads_q, seqlen_q, kPartialCols), and LSE is (splits, batch, heads_q,
// seqlen_q). A split that shows a row no key writes LSE = -inf and leaves O unwritten.

#include "device/params.cuh"

constexpr int kPartialCols = (kHeadDimV + 3) / 4 * 4;  // rows are read 16 bytes at a time

__device__ __forceinline__ int64 partial_row(const KernelParams& params, int split, int batch, int head, int position) {
    return ((int64(split) * params.batch_size + batch) * params.num_heads_q + head) * params.seqlen_q + position;
}
