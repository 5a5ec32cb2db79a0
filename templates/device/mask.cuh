// Which keys a query row sees: the one place. Indices are absolute. Both passes call it.

// Keys [0, key_end) are seen by `row`; none where it is <= 0.
__device__ __forceinline__ int key_end(int row, const KernelParams& params) {
    return kIsCausal ? min(params.seqlen_k, row + params.causal_shift + 1) : params.seqlen_k;
}

// Puts -inf in place of the scores that their row does not see. An accumulator of 16 rows by 8 * kTiles keys, as mma.sync
// and wgmma leave it: a lane holds rows `row` and row + 8, of each 8 keys the two from `key` on.
template <int kTiles>
__device__ __forceinline__ void mask_scores(float (&acc)[kTiles][4], int row, int key, const KernelParams& params) {
    #pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int end = key_end(row + r * 8, params);
        #pragma unroll
        for (int n = 0; n < kTiles; ++n) {
            if (key + n * 8 >= end) acc[n][2 * r] = -infinity();
            if (key + n * 8 + 1 >= end) acc[n][2 * r + 1] = -infinity();
        }
    }
}

// Puts 0 in place of the weights that their row does not give, scores standing transposed: keys down, queries across. A lane
// holds keys `key` and key + 8, of each 8 query rows the two from `row` on.
template <int kTiles>
__device__ __forceinline__ void mask_weights_transposed(float (&acc)[kTiles][4], int row, int key, const KernelParams& params) {
    #pragma unroll
    for (int n = 0; n < kTiles; ++n) {
        #pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (key + i / 2 * 8 >= key_end(row + n * 8 + i % 2, params)) acc[n][i] = 0.f;
        }
    }
}
