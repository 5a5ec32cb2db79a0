// Which keys a query row sees: the one place. Indices are absolute. Both passes call it.

// Keys [0, key_end) are seen by `row`; none where it is <= 0.
__device__ __forceinline__ int key_end(int row, const KernelParams& params) {
    return kIsCausal ? min(params.seqlen_k, row + params.causal_shift + 1) : params.seqlen_k;
}
