// The whole tiles that a tile meets, by the rule of mask.cuh. Kernels never load the tiles outside
// the range, and never mask the full ones inside it. This file knows no block mask
// (block_list.cuh). Rows and keys are absolute within the sequence.

#include "device/attention/mask.cuh"

struct BlockRange {
    int begin;       // first block with a visible pair
    // Blocks [full_begin, full_end) are visible as a whole. The range may be empty, and either end
    // may then lie outside of [begin, end).
    int full_begin;
    int full_end;
    int end;         // one past the last block with a visible pair
};

// The key blocks that query rows [row, row + rows) meet.
template <int kBlockN>
__device__ __forceinline__ BlockRange key_blocks(int row, int rows, const Sequence& sequence) {
    const int last_row = min(row + rows, sequence.seqlen_q) - 1;
    // Neither end decreases as the row grows.
    const int seen_by_last = max(0, key_end(last_row, sequence));
    const int seen_by_all = max(0, key_end(row, sequence));
    const int end = (seen_by_last + kBlockN - 1) / kBlockN;
    if (!kHasWindow) return {0, 0, seen_by_all / kBlockN, end};
    const int begin = min(end, key_begin(row, sequence) / kBlockN);
    const int full_begin = (key_begin(last_row, sequence) + kBlockN - 1) / kBlockN;
    return {begin, full_begin, seen_by_all / kBlockN, end};
}

// The query blocks that keys [key, key + keys) meet. Rows past seqlen_q are loaded as zeros, so
// they need no mask if K is finite.
template <int kBlockM>
__device__ __forceinline__ BlockRange query_blocks(int key, int keys, const Sequence& sequence) {
    int end = (sequence.seqlen_q + kBlockM - 1) / kBlockM;
    if (!kIsCausal && !kHasWindow) return {0, 0, end, end};
    int begin = 0, full_begin = 0;
    if (kIsCausal) {
        // Row i sees key j if i >= j - right_shift, both absolute.
        begin = min(end, max(0, key - sequence.right_shift) / kBlockM);
        full_begin = min(end, (max(0, key + keys - 1 - sequence.right_shift) + kBlockM - 1) / kBlockM);
    }
    if (!kHasWindow) return {begin, full_begin, end, end};
    // Row i sees key j if also i <= j - left_shift, both absolute.
    end = max(begin, min(end, (max(0, key + keys - sequence.left_shift) + kBlockM - 1) / kBlockM));
    return {begin, full_begin, min(end, max(0, key + 1 - sequence.left_shift) / kBlockM), end};
}
