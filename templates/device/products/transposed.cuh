// Transposed products of fp16: keys or V's columns are the 16 rows of mma, and 8 rows of Q are its
// columns. So few rows of Q leave no half of mma idle, and a lane has half as many scores. The
// decode kernel uses them over int4 (keys_four.cuh) and over 8 bits (keys_eight_transposed.cuh).
//
// A lane holds rows 2t and 2t + 1 (r = 0, 1) of each 8, and keys g and g + 8 (h = 0, 1) of each 16.
// An accumulator has them at 2r + h.

#include "device/products/fp16_query.cuh"
#include "device/products/gemm_sm80.cuh"

// The addresses of lane_cols_first and lane_rows_first (gemm_sm80.cuh), moved by rows and chunks.
// They serve tiles whose columns `moved` does not reach.
template <class Tile>
__device__ __forceinline__ uint32 lane_cols_at(uint32 tile, int lane, int row, int chunk) {
    return Tile::place(tile, lane % 8 + lane / 16 * 8 + row, lane / 8 % 2 + chunk);
}
template <class Tile>
__device__ __forceinline__ uint32 lane_rows_at(uint32 tile, int lane, int chunk) {
    return Tile::place(tile, lane % 16, lane / 16 + chunk);
}

// The order of a transposed accumulator.
__device__ __forceinline__ void mma_transposed(float (&c)[4], const uint32 (&a)[4], uint32 b0, uint32 b1) {
    float sum[4] = {c[0], c[2], c[1], c[3]};
    mma_k16_fp16(sum, a, b0, b1);
    c[0] = sum[0], c[2] = sum[1], c[1] = sum[2], c[3] = sum[3];
}

// The powers of two of a lane's rows of Q, by which it multiplies scores.
template <class Tile, int kM>
struct ColumnFactors {
    float of[kM][2];

    __device__ __forceinline__ ColumnFactors(uint32 tile, int lane) {
        if constexpr (!kConvertsQuery) return;
        #pragma unroll
        for (int i = 0; i < kM * 2; ++i) of[i / 2][i % 2] = load_row_factor<Tile>(tile, i / 2 * 8 + lane % 4 * 2 + i % 2);
    }
};

// Weights of 16 keys, 8 rows in a tile, as a B operand.
__device__ __forceinline__ void pack_columns(uint32 (&b)[2], const float (&weights)[4]) {
    #pragma unroll
    for (int h = 0; h < 2; ++h) b[h] = transpose_matrix(floats_to_fp16_pair(weights[h], weights[2 + h]));
}
