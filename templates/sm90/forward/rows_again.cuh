// The slow path of a batch-invariant tile behind SegmentRows::step_or_miss: a warp repeats its 16
// rows straight from device memory by mma.sync, with the bits of a walk that searches all blocks
// (device/attention/fixed_order.cuh). It knows neither shared memory nor the pipeline of the kernel
// that calls it.

#include "device/attention/fixed_order.cuh"
#include "device/attention/key_pages.cuh"
#include "device/attention/mask.cuh"
#include "device/attention/scores.cuh"
#include "device/ptx/mma.cuh"
#include "sm90/forward/multiply.cuh"
#include "sm90/forward/tile_rows.cuh"

class RowsAgain {
    const KernelParams& params;
    const Sequence& sequence;
    const Tile& tile;
    const Share& share;
    const int row;  // the lane's first, absolute within the sequence
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const uint16 *q, *k, *v;

public:
    __device__ __forceinline__ RowsAgain(const KernelParams& params, const Sequence& sequence, const Tile& tile, const Share& share, int row)
        : params(params), sequence(sequence), tile(tile), share(share), row(row) {
        const int head_kv = tile.head / params.group_size;
        q = static_cast<const uint16*>(params.q.data) + sequence.place_q(params, params.q, tile.head);
        k = static_cast<const uint16*>(params.k.data) + place_of_keys(params, params.k, sequence, head_kv);
        v = static_cast<const uint16*>(params.v.data) + place_of_keys(params, params.v, sequence, head_kv);
    }

    // The blocks of the tile in order. The last segment stays in `o` and `rows`, and `merge` has
    // the others. `s` may hold scores of the next tile, which are kept, and `p` is free.
    template <class Merge>
    __device__ __forceinline__ void walk(Output& o, Scores& s, Weights& p, SegmentRows& rows, Merge& merge, float scale_log2) const {
        float4 kept[kSTiles];
        #pragma unroll
        for (int n = 0; n < kSTiles; ++n) in_memory(kept)[n] = make_float4(s[n][0], s[n][1], s[n][2], s[n][3]);
        const ScoreModifier modifier(params, sequence, tile.head);
        const KeyList list(params, sequence, tile.head, tile.first);
        int first_of_segment = 0;
        #pragma unroll 1
        for (int position = share.end - 1; position >= share.begin; --position) {
            ListedTile listed = {};
            if constexpr (kHasBlockMask) listed = list.at(position);
            const int block = kHasBlockMask ? listed.tile : position, key = block * kBlockN + 2 * t;
            const bool is_first = position == share.end - 1;
            if (is_first || begins_segment(MayBegin{}, block, first_of_segment)) {
                if (is_first) merge.begin_tile();
                else merge.add(o, rows, first_of_segment, ends_group(first_of_segment, block));
                rows.reset();
                #pragma unroll
                for (int i = 0; i < 4 * kOTiles; ++i) o[i / 4][i % 4] = 0.f;
                first_of_segment = first_block_of_segment(block);
            }
            multiply_qk(s, block);
            if constexpr (kModifiesScores) modifier.modify(s, row, key, listed.is_full);
            mask_scores(s, row, key, sequence);
            if (rows.step(s, scale_log2)) rows.rescale(o);
            pack_weights(p, s);
            multiply_pv(o, p, block);
        }
        #pragma unroll
        for (int n = 0; n < kSTiles; ++n) {
            const float4 of_next = in_memory(kept)[n];
            s[n][0] = of_next.x, s[n][1] = of_next.y, s[n][2] = of_next.z, s[n][3] = of_next.w;
        }
    }

private:
    // S = Q K^T of a block. Keys and rows past the end take those of the last ones.
    __device__ __forceinline__ void multiply_qk(Scores& s, int block) const {
        const auto row_of_q = [&](int r) { return q + min(row + r * 8, sequence.seqlen_q - 1) * params.q.stride_seqlen + 2 * t; };
        const auto load_pair = [](const uint16* at, bool exists) { return exists ? *reinterpret_cast<const uint32*>(at) : 0; };
        #pragma unroll
        for (int n = 0; n < kSTiles; ++n) s[n][0] = s[n][1] = s[n][2] = s[n][3] = 0.f;
        #pragma unroll 1
        for (int col = 0; col < kHeadDim; col += 16) {
            const bool is_whole = col + 8 < kHeadDim;
            const uint16 *row0 = row_of_q(0) + col, *row1 = row_of_q(1) + col;
            const uint32 a[4] = {load_pair(row0, true), load_pair(row1, true), load_pair(row0 + 8, is_whole), load_pair(row1 + 8, is_whole)};
            #pragma unroll
            for (int n = 0; n < kSTiles; ++n) {
                const uint16* key = k + place_of_key(params, params.k, sequence, min(block * kBlockN + n * 8 + g, sequence.seqlen_k - 1)) + col + 2 * t;
                mma_k16(s[n], a, load_pair(key, true), load_pair(key + 8, is_whole));
            }
        }
        if (!kModifiesScores && params.softmax_scale_log2 < 0.f) {
            #pragma unroll
            for (int i = 0; i < 4 * kSTiles; ++i) s[i / 4][i % 4] = -s[i / 4][i % 4];
        }
    }

    // O += P V of a block. Keys past the end count as zeros.
    __device__ __forceinline__ void multiply_pv(Output& o, const Weights& p, int block) const {
        #pragma unroll
        for (int step = 0; step < kBlockN / 16; ++step) {
            const uint16* keys[4];  // 2t, 2t + 1, 2t + 8 and 2t + 9 of the step's
            #pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int key = block * kBlockN + step * 16 + 2 * t + i % 2 + i / 2 * 8;
                keys[i] = key < sequence.seqlen_k ? v + place_of_key(params, params.v, sequence, key) + g : nullptr;
            }
            const auto load = [&](int i, int col) { return keys[i] ? uint32(keys[i][col]) : 0; };
            #pragma unroll
            for (int n = 0; n < kOTiles; ++n) {
                mma_k16(o[n], p[step], load(0, n * 8) | load(1, n * 8) << 16, load(2, n * 8) | load(3, n * 8) << 16);
            }
        }
    }
};
