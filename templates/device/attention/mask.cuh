// Which keys a query row sees: the one place. Indices are absolute within the sequence. Both passes
// call it.

#include "device/attention/sequence.cuh"
#include "device/numeric.cuh"

// Keys [key_begin, key_end) are seen by `row`; none where the end is not past the beginning.
__device__ __forceinline__ int key_end(int row, const Sequence& sequence) {
    return kIsCausal ? min(sequence.seqlen_k, row + sequence.right_shift + 1) : sequence.seqlen_k;
}
__device__ __forceinline__ int key_begin(int row, const Sequence& sequence) {
    return kHasWindow ? max(0, row + sequence.left_shift) : 0;
}

// Puts -inf in place of the scores that their row does not see. An accumulator of 16 rows by 8 *
// kTiles keys, as mma.sync and wgmma leave it: a lane holds rows `row` and row + 8, of each 8 keys
// the two from `key` on.
template <int kTiles>
__device__ __forceinline__ void mask_scores(float (&acc)[kTiles][4], int row, int key, const Sequence& sequence) {
    #pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int begin = key_begin(row + r * 8, sequence), end = key_end(row + r * 8, sequence);
        #pragma unroll
        for (int n = 0; n < kTiles; ++n) {
            #pragma unroll
            for (int c = 0; c < 2; ++c) {
                if (key + n * 8 + c >= end || (kHasWindow && key + n * 8 + c < begin)) acc[n][2 * r + c] = -infinity();
            }
        }
    }
}

// Puts 0 in place of the weights that their row does not give, in the same accumulator.
template <int kTiles>
__device__ __forceinline__ void mask_weights(float (&acc)[kTiles][4], int row, int key, const Sequence& sequence) {
    #pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int begin = key_begin(row + r * 8, sequence) - key, end = key_end(row + r * 8, sequence) - key;
        #pragma unroll
        for (int n = 0; n < kTiles; ++n) {
            #pragma unroll
            for (int c = 0; c < 2; ++c) {
                if (n * 8 + c >= end || (kHasWindow && n * 8 + c < begin)) acc[n][2 * r + c] = 0.f;
            }
        }
    }
}

// The same of scores that stand transposed, keys down and queries across. A lane holds keys `key`
// and key + 8, of each 8 query rows the two from `row` on.
template <int kTiles>
__device__ __forceinline__ void mask_weights_transposed(float (&acc)[kTiles][4], int row, int key, const Sequence& sequence) {
    #pragma unroll
    for (int n = 0; n < kTiles; ++n) {
        #pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int j = key + i / 2 * 8, in_row = row + n * 8 + i % 2;
            if (j >= key_end(in_row, sequence) || (kHasWindow && j < key_begin(in_row, sequence))) acc[n][i] = 0.f;
        }
    }
}
