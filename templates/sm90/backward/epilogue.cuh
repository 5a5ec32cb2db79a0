// The end of dK and dV: from a consumer's registers to device memory, for the kernels that hold
// them as they are, not transposed.

#include "device/layout/partial_gradients.cuh"
#include "device/layout/store_rows.cuh"

template <int kTiles>
__device__ __forceinline__ void scale_gradient(float (&acc)[kTiles][4], float factor) {
    #pragma unroll
    for (int n = 0; n < kTiles; ++n) {
        #pragma unroll
        for (int i = 0; i < 4; ++i) acc[n][i] *= factor;
    }
}

// As store_rows, but 4 bytes a store and without exchanges. It is slower and takes fewer registers.
// A kernel that may split uses it if the launch makes one split.
template <int kTiles>
__device__ __forceinline__ void store_pairs(uint16* out, int64 stride, const float (&acc)[kTiles][4], int rows_left, int lane, int cols_left) {
    #pragma unroll
    for (int r = 0; r < 2; ++r) {
        if (r * 8 >= rows_left) break;
        #pragma unroll
        for (int n = 0; n < kTiles; ++n) {
            if (n * 8 < cols_left) *reinterpret_cast<uint32*>(out + r * 8 * stride + n * 8 + lane % 4 * 2) = pack2(acc[n][2 * r], acc[n][2 * r + 1]);
        }
    }
}

// The factors that weights and dS leave out come in here: dropout_keep_scale, and dK's scale of the
// scores. A split's partial gradients get them in backward_convert. `key` is the lane's first,
// counted in the sequence. `col_k` and `col_v` are the accumulators' first columns.
template <int kTilesK, int kTilesV>
__device__ __forceinline__ void store_gradients(const KernelParams& params, float (&acc_dk)[kTilesK][4], float (&acc_dv)[kTilesV][4],
                                                const Sequence& sequence, const Tile& tile, int key, int col_k, int col_v, int lane) {
    const int head = tile.head;
    if (kMaySplit && params.num_splits > 1 && (!kSplitsLast || tile.split >= 0)) {
        // A warp's 16 keys are one row of tiles.
        const PartialGradients partial(params, sequence, tile, key - lane / 4);
        partial.store_dk(acc_dk, col_k / 8, lane);
        partial.store_dv(acc_dv, col_v / 8, lane);
        return;
    }
    const float dv_scale = kHasDropout ? params.dropout_keep_scale : 1.f, dk_scale = params.softmax_scale * dv_scale;
    scale_gradient(acc_dv, dv_scale);
    scale_gradient(acc_dk, dk_scale);
    uint16* dv = static_cast<uint16*>(params.dv.data) + sequence.place_k(params, params.dv, head) + key * params.dv.stride_seqlen + col_v;
    uint16* dk = static_cast<uint16*>(params.dk.data) + sequence.place_k(params, params.dk, head) + key * params.dk.stride_seqlen + col_k;
    if constexpr (kMaySplit && !kSplitsLast) {
        store_pairs(dv, params.dv.stride_seqlen, acc_dv, sequence.seqlen_k - key, lane, kHeadDimV - col_v);
        store_pairs(dk, params.dk.stride_seqlen, acc_dk, sequence.seqlen_k - key, lane, kHeadDim - col_k);
        return;
    }
    store_rows(dv, params.dv.stride_seqlen, acc_dv, sequence.seqlen_k - key, lane, kHeadDimV - col_v);
    store_rows(dk, params.dk.stride_seqlen, acc_dk, sequence.seqlen_k - key, lane, kHeadDim - col_k);
}

// dK or dV alone, for a consumer that holds one of them.
template <int kTiles>
__device__ __forceinline__ void store_gradient(const KernelParams& params, const TensorView& to, float factor, float (&acc)[kTiles][4],
                                               const Sequence& sequence, const Tile& tile, int key, int col, int cols, int lane) {
    scale_gradient(acc, factor);
    uint16* at = static_cast<uint16*>(to.data) + sequence.place_k(params, to, tile.head) + key * to.stride_seqlen + col;
    if constexpr (kMaySplit && !kSplitsLast) {
        store_pairs(at, to.stride_seqlen, acc, sequence.seqlen_k - key, lane, cols - col);
    } else {
        store_rows(at, to.stride_seqlen, acc, sequence.seqlen_k - key, lane, cols - col);
    }
}
template <int kTiles>
__device__ __forceinline__ void store_dv(const KernelParams& params, float (&acc)[kTiles][4], const Sequence& sequence, const Tile& tile, int key, int col, int lane) {
    if (kMaySplit && params.num_splits > 1 && (!kSplitsLast || tile.split >= 0)) {
        PartialGradients(params, sequence, tile, key - lane / 4).store_dv(acc, col / 8, lane);
    } else {
        store_gradient(params, params.dv, kHasDropout ? params.dropout_keep_scale : 1.f, acc, sequence, tile, key, col, kHeadDimV, lane);
    }
}
template <int kTiles>
__device__ __forceinline__ void store_dk(const KernelParams& params, float (&acc)[kTiles][4], const Sequence& sequence, const Tile& tile, int key, int col, int lane) {
    if (kMaySplit && params.num_splits > 1 && (!kSplitsLast || tile.split >= 0)) {
        PartialGradients(params, sequence, tile, key - lane / 4).store_dk(acc, col / 8, lane);
    } else {
        const float factor = params.softmax_scale * (kHasDropout ? params.dropout_keep_scale : 1.f);
        store_gradient(params, params.dk, factor, acc, sequence, tile, key, col, kHeadDim, lane);
    }
}
