// The rule of which keys a query row sees, under the causal mask, the window and the sequence's
// length. Both passes and all families take the rule from here. It knows accumulators in registers
// but no tile in memory. `row` and `key` are absolute within the sequence in every function.

#include "device/attention/sequence.cuh"
#include "device/numeric.cuh"

// A row sees keys [key_begin, key_end). The range is empty if the end is not past the beginning.
__device__ __forceinline__ int key_end(int row, const Sequence& sequence) {
    return kIsCausal ? min(sequence.seqlen_k, row + sequence.right_shift + 1) : sequence.seqlen_k;
}
__device__ __forceinline__ int key_begin(int row, const Sequence& sequence) {
    return kHasWindow ? max(0, row + sequence.left_shift) : 0;
}

// Replaces scores that their row does not see by -inf. The accumulator has 16 rows and 8 * kTiles
// keys, as mma.sync and wgmma leave it. A lane holds rows `row` and row + 8, and two of every 8
// keys, the first two at `key`.
template <int kTiles>
__device__ __forceinline__ void mask_scores(float (&acc)[kTiles][4], int row, int key, const Sequence& sequence) {
    #pragma unroll
    for (int r = 0; r < 2; ++r) {
        // Both ends are absolute keys.
        const int begin = key_begin(row + r * 8, sequence), end = key_end(row + r * 8, sequence);
        #pragma unroll
        for (int n = 0; n < kTiles; ++n) {
            #pragma unroll
            for (int c = 0; c < 2; ++c) {
                // key + n * 8 + c is the absolute key of this score.
                if (key + n * 8 + c >= end || (kHasWindow && key + n * 8 + c < begin)) acc[n][2 * r + c] = -infinity();
            }
        }
    }
}

// Replaces weights of keys that their row does not see by 0, in an accumulator of the same layout.
template <int kTiles>
__device__ __forceinline__ void mask_weights(float (&acc)[kTiles][4], int row, int key, const Sequence& sequence) {
    #pragma unroll
    for (int r = 0; r < 2; ++r) {
        // Both ends are relative to the lane's absolute `key`, as n * 8 + c is below.
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

// As mask_weights, for transposed scores with keys down and query rows across. A lane holds keys
// `key` and key + 8, and two of every 8 query rows, the first two at `row`.
template <int kTiles>
__device__ __forceinline__ void mask_weights_transposed(float (&acc)[kTiles][4], int row, int key, const Sequence& sequence) {
    #pragma unroll
    for (int n = 0; n < kTiles; ++n) {
        #pragma unroll
        for (int i = 0; i < 4; ++i) {
            // Key j and row in_row are absolute.
            const int j = key + i / 2 * 8, in_row = row + n * 8 + i % 2;
            if (j >= key_end(in_row, sequence) || (kHasWindow && j < key_begin(in_row, sequence))) acc[n][i] = 0.f;
        }
    }
}
