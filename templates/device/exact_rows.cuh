// The cold path behind a stale maximum: a warp does its 16 rows again with a running maximum, straight from device
// memory by mma.sync. It is right for any scores and slow; rows come here whose sum passed 2^90, or whose first searched
// scores were all -inf and the others very low (RowSoftmax::failed).

__device__ __forceinline__ uint32 load_pair(const uint16* at) { return *reinterpret_cast<const uint32*>(at); }

// `row` is the lane's first row. Returns O unnormalised, the reference and the sums of whole rows.
template <int kTiles>
__device__ __forceinline__ void exact_rows(float (&acc_o)[kTiles][4], RowSoftmax& softmax, float (&total)[2], const Tile& tile, int row,
                                           float scale_log2, const KernelParams& params) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int head_kv = tile.head / params.group_size;
    const uint16* gQ = static_cast<const uint16*>(params.q.data) + tile.batch * params.q.stride_batch + tile.head * params.q.stride_head;
    const uint16* gK = static_cast<const uint16*>(params.k.data) + tile.batch * params.k.stride_batch + head_kv * params.k.stride_head;
    const uint16* gV = static_cast<const uint16*>(params.v.data) + tile.batch * params.v.stride_batch + head_kv * params.v.stride_head;
    const float sign = params.softmax_scale_log2 < 0.f ? -1.f : 1.f;
    const int last_row = min(row - g + 15, params.seqlen_q - 1), end = key_end(last_row, params);

    #pragma unroll
    for (int n = 0; n < kTiles; ++n) acc_o[n][0] = acc_o[n][1] = acc_o[n][2] = acc_o[n][3] = 0.f;
    #pragma unroll
    for (int r = 0; r < 2; ++r) softmax.reference[r] = -infinity(), softmax.sum[r] = 0.f;

    // Eight keys at a time: of the registers a main loop leaves, few are free.
    #pragma unroll 1
    for (int key = 0; key < end; key += 8) {
        float s[1][4] = {};
        #pragma unroll 1
        for (int col = 0; col < kHeadDim; col += 8) {
            const auto load_q = [&](int r) { return load_pair(gQ + min(row + r * 8, params.seqlen_q - 1) * params.q.stride_seqlen + col + 2 * t); };
            const uint32 a[4] = {load_q(0), load_q(1)};
            mma_k8(s[0], a, load_pair(gK + min(key + g, params.seqlen_k - 1) * params.k.stride_seqlen + col + 2 * t));
        }
        #pragma unroll
        for (int i = 0; i < 4; ++i) s[0][i] *= sign;
        mask_scores(s, row, key + 2 * t, params);
        softmax.lazy(s, scale_log2);
        if (softmax.pending) {
            #pragma unroll
            for (int n = 0; n < kTiles; ++n) {
                #pragma unroll
                for (int i = 0; i < 4; ++i) acc_o[n][i] *= softmax.factor[i / 2];
            }
        }
        const uint32 p[4] = {pack2(s[0][0], s[0][1]), pack2(s[0][2], s[0][3])};
        const auto load_v = [&](int k, int col) { return k < params.seqlen_k ? uint32(gV[k * params.v.stride_seqlen + col]) : 0; };
        #pragma unroll
        for (int n = 0; n < kTiles; ++n) {
            const int k = key + 2 * t, col = n * 8 + g;
            mma_k8(acc_o[n], p, load_v(k, col) | load_v(k + 1, col) << 16);
        }
    }
    #pragma unroll
    for (int r = 0; r < 2; ++r) total[r] = softmax.total(r);
}
