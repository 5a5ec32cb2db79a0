// Which whole tiles a tile meets, from mask.cuh's rule: skipped tiles are never loaded, full ones never masked.

struct BlockRange {
    int begin;       // first block that holds a visible pair
    int full_begin;  // blocks [full_begin, full_end) are visible as a whole
    int full_end;
    int end;         // one past the last block that holds a visible pair
};

// Key blocks that query rows [row, row + rows) meet.
template <int kBlockN>
__device__ __forceinline__ BlockRange key_blocks(int row, int rows, const KernelParams& params) {
    const int last_row = min(row + rows, params.seqlen_q) - 1;
    const int seen_by_last = max(0, key_end(last_row, params));   // key_end does not decrease with the row
    const int seen_by_all = max(0, key_end(row, params));
    return {0, 0, seen_by_all / kBlockN, (seen_by_last + kBlockN - 1) / kBlockN};
}

// Query blocks that keys [key, key + keys) meet. Rows past seqlen_q need no mask where K is finite: they are loaded as zeros.
template <int kBlockM>
__device__ __forceinline__ BlockRange query_blocks(int key, int keys, const KernelParams& params) {
    const int end = (params.seqlen_q + kBlockM - 1) / kBlockM;
    if (!kIsCausal) return {0, 0, end, end};
    // Row i sees key j iff i >= j - causal_shift.
    const int first_row = max(0, key - params.causal_shift);
    const int first_full_row = max(0, key + keys - 1 - params.causal_shift);
    const int begin = min(end, first_row / kBlockM);
    return {begin, min(end, (first_full_row + kBlockM - 1) / kBlockM), end, end};
}
