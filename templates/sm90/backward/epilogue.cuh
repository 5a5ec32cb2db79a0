// The end of dK and dV: from a consumer's registers to device memory, for the kernels that hold
// them as they are, not transposed.

#include "device/layout/store_rows.cuh"

template <int kTiles>
__device__ __forceinline__ void scale_gradient(float (&acc)[kTiles][4], float factor) {
    #pragma unroll
    for (int n = 0; n < kTiles; ++n) {
        #pragma unroll
        for (int i = 0; i < 4; ++i) acc[n][i] *= factor;
    }
}

// The factors that weights and dS leave out come in here: dropout_keep_scale, and dK's scale of the
// scores. `key` is the lane's first, counted in the sequence. `col_k` and `col_v` are the
// accumulators' first columns.
template <int kTilesK, int kTilesV>
__device__ __forceinline__ void store_gradients(const KernelParams& params, float (&acc_dk)[kTilesK][4], float (&acc_dv)[kTilesV][4],
                                                const Sequence& sequence, int head, int key, int col_k, int col_v, int lane) {
    const float dv_scale = kHasDropout ? params.dropout_keep_scale : 1.f, dk_scale = params.softmax_scale * dv_scale;
    scale_gradient(acc_dv, dv_scale);
    scale_gradient(acc_dk, dk_scale);
    uint16* dv = static_cast<uint16*>(params.dv.data) + sequence.place_k(params, params.dv, head) + key * params.dv.stride_seqlen + col_v;
    uint16* dk = static_cast<uint16*>(params.dk.data) + sequence.place_k(params, params.dk, head) + key * params.dk.stride_seqlen + col_k;
    store_rows(dv, params.dv.stride_seqlen, acc_dv, sequence.seqlen_k - key, lane, kHeadDimV - col_v);
    store_rows(dk, params.dk.stride_seqlen, acc_dk, sequence.seqlen_k - key, lane, kHeadDim - col_k);
}
