// Products of sm90_backward_middle over all steps of an inner dimension. Scores stand queries down
// and keys across, the gradients transposed, columns down. The kernel lists the wgmma shapes
// beforehand.

#include "device/layout/operand.cuh"

// S = Q K^T or dP = dO V^T: the block's queries by a consumer's keys, dims innermost.
template <int kSteps>
__device__ __forceinline__ void multiply_scores(float (&acc)[kNTiles][4], uint32 queries_low, uint32 keys_low) {
    const ColumnSteps<kBlockM, kSteps> queries(queries_low);
    const ColumnSteps<kBlockN, kSteps> keys(keys_low);
    wgmma_scores(acc, queries.of, keys.of);
}
// Boxes of dV^T += dO^T P or dK^T += Q^T dS: a box's columns by a consumer's keys, queries
// outermost in both.
template <int kBoxes>
__device__ __forceinline__ void multiply_gradient(float (&acc)[kBoxes][kNTiles][4], uint32 columns_low, uint32 keys_low) {
    #pragma unroll
    for (int step = 0; step < kBlockM / 16; ++step) {
        const uint32 rows = row_step(step);
        #pragma unroll
        for (int box = 0; box < kBoxes; ++box) {
            wgmma_gradient(acc[box], descriptor(columns_low + box * (kBytesBoxM / 16) + rows), descriptor(keys_low + rows));
        }
    }
}
