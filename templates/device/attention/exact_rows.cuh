// The slow path behind a stale maximum (RowSoftmax::failed). A warp repeats its 16 rows with a
// running maximum, straight from device memory by mma.sync. It is right for any scores. It knows
// neither shared memory nor the pipeline of the kernel that calls it.
//
// Two kinds of rows come here. The sum of the first kind passed 2^90. In the second kind, the first
// searched scores were all -inf and the others were very low.

#include "device/schedule/tile_order.cuh"
#include "device/attention/key_pages.cuh"
#include "device/eight.cuh"
#include "device/attention/mask.cuh"
#include "device/attention/row_softmax.cuh"
#include "device/numeric.cuh"
#include "device/ptx/mma.cuh"

__device__ __forceinline__ uint32 load_pair(const uint16* at) { return *reinterpret_cast<const uint32*>(at); }

// Two 8-bit numbers as a pair of q's type.
__device__ __forceinline__ uint32 converted_pair(uint16 pair) {
    uint32 first, second;
    eight_to_elements(pair, first, second);
    return first;
}

// Keys whose scales are no factors of scores and weights.
struct NoScales {
    static constexpr bool kAreFactors = false;
};

// `row` is the lane's first row, absolute within the sequence. Returns O before normalisation, the
// reference, and the sums of whole rows.
template <int kTiles, class Scales>
__device__ __forceinline__ void exact_rows(float (&acc_o)[kTiles][4], RowSoftmax& softmax, float (&total)[2], const Tile& tile, int row,
                                           float scale_log2, const KernelParams& params, const Sequence& sequence, const Scales& scales) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int head_kv = tile.head / params.group_size;
    const uint16* gQ = static_cast<const uint16*>(params.q.data) + sequence.place_q(params, params.q, tile.head);
    const uint16* gK = static_cast<const uint16*>(params.k.data) + place_of_keys(params, params.k, sequence, head_kv);
    const uint16* gV = static_cast<const uint16*>(params.v.data) + place_of_keys(params, params.v, sequence, head_kv);
    const float sign = params.softmax_scale_log2 < 0.f ? -1.f : 1.f;
    // The warp's last row and the end of its keys are absolute.
    const int last_row = min(row - g + 15, sequence.seqlen_q - 1);
    int end = key_end(last_row, sequence);
    if constexpr (kMaySplit) end = min(end, (tile.begin + tile.blocks) * kBlockN);

    #pragma unroll
    for (int n = 0; n < kTiles; ++n) acc_o[n][0] = acc_o[n][1] = acc_o[n][2] = acc_o[n][3] = 0.f;
    #pragma unroll
    for (int r = 0; r < 2; ++r) softmax.reference[r] = -infinity(), softmax.sum[r] = 0.f;

    // Eight keys at a time, since the main loop leaves few registers free. `key` is absolute.
    const auto add_keys = [&](int key) {
        float s[1][4] = {};
        #pragma unroll 1
        for (int col = 0; col < kHeadDim; col += 8) {
            const auto load_q = [&](int r) { return load_pair(gQ + min(row + r * 8, sequence.seqlen_q - 1) * params.q.stride_seqlen + col + 2 * t); };
            const uint32 a[4] = {load_q(0), load_q(1)};
            // Places in 8-bit tensors count pairs of numbers (TensorRef::in_units).
            if constexpr (kKeyFormat == 0) {
                mma_k8(s[0], a, load_pair(gK + place_of_key(params, params.k, sequence, min(key + g, sequence.seqlen_k - 1)) + col + 2 * t));
            } else {
                mma_k8(s[0], a, converted_pair(gK[place_of_key(params, params.k, sequence, min(key + g, sequence.seqlen_k - 1)) + col / 2 + t]));
            }
        }
        #pragma unroll
        for (int i = 0; i < 4; ++i) s[0][i] *= sign;
        if constexpr (Scales::kAreFactors) {
            #pragma unroll
            for (int i = 0; i < 4; ++i) s[0][i] *= scales.of_k(min(key + 2 * t + i % 2, sequence.seqlen_k - 1));
        }
        mask_scores(s, row, key + 2 * t, sequence);
        softmax.lazy(s, scale_log2);
        if (softmax.pending) {
            #pragma unroll
            for (int n = 0; n < kTiles; ++n) {
                #pragma unroll
                for (int i = 0; i < 4; ++i) acc_o[n][i] *= softmax.factor[i / 2];
            }
        }
        if constexpr (Scales::kAreFactors) {
            #pragma unroll
            for (int i = 0; i < 4; ++i) s[0][i] *= scales.of_v(min(key + 2 * t + i % 2, sequence.seqlen_k - 1));
        }
        const uint32 p[4] = {pack2(s[0][0], s[0][1]), pack2(s[0][2], s[0][3])};
        const auto load_v = [&](int k, int col) {
            if constexpr (kKeyFormat == 0) {
                return k < sequence.seqlen_k ? uint32(gV[place_of_key(params, params.v, sequence, k) + col]) : 0;
            } else {
                const uint32 pair = k < sequence.seqlen_k ? converted_pair(gV[place_of_key(params, params.v, sequence, k) + col / 2]) : 0;
                return col % 2 ? pair >> 16 : pair & 0xffff;
            }
        };
        #pragma unroll
        for (int n = 0; n < kTiles; ++n) {
            const int k = key + 2 * t, col = n * 8 + g;
            mma_k8(acc_o[n], p, load_v(k, col) | load_v(k + 1, col) << 16);
        }
    };
    if constexpr (kHasBlockMask) {
        const KeyList list(params, sequence, tile.head, tile.first);
        #pragma unroll 1
        for (int position = list.size() - 1; position >= 0; --position) {
            const int begin = list.at(position).tile * kBlockN;
            #pragma unroll 1
            for (int key = begin; key < min(begin + kBlockN, end); key += 8) add_keys(key);
        }
    } else {
        int key = key_begin(row - g, sequence);
        // Eight keys from here on end where the split does.
        if constexpr (kMaySplit) key = max(key / 8 * 8, tile.begin * kBlockN);
        #pragma unroll 1
        for (; key < end; key += 8) add_keys(key);
    }
    #pragma unroll
    for (int r = 0; r < 2; ++r) total[r] = softmax.total(r);
}
