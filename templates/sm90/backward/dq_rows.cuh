// dQ where one CTA does all tiles of keys of a head, one after the other: the last tile that meets
// a block of queries writes its dQ to the caller's tensor, in its type. No accumulator is cleared,
// added to and converted.
//
// The first of several tiles leaves its sum in the accumulator's place, in fp32. The last one that
// meets a block starts its product from the sum. Tiles in between add to it in memory, so that
// their products wait for no load. A thread reads what it has written itself, so nothing is waited
// for. As in dq_order.cuh, a block's dQ comes one block late up to head dim 192, so this holds the
// block before. Up to head dim 128, and in pairs of CTAs, a lane holds dQ^T, 16 columns by 8
// queries in each tile, which it transposes in registers.

#include "device/attention/block_range.cuh"
#include "device/attention/sequence.cuh"
#include "device/layout/dq_accum.cuh"
#include "device/layout/store_rows.cuh"
#include "device/ptx/global.cuh"
#include "device/ptx/matrix.cuh"

struct DqRows {
    const int seqlen_q, batch;
    const int end_last;      // the first block that a later tile meets, too
    const bool is_first;     // no tile comes before
    int head = 0, block = 0;  // the block before

    __device__ __forceinline__ DqRows(const Sequence& sequence, const Tile& tile, int)
        : seqlen_q(sequence.seqlen_q), batch(tile.batch), end_last(end_of_last(sequence, tile)), is_first(tile.first == 0) {}

    static __device__ __forceinline__ int end_of_last(const Sequence& sequence, const Tile& tile) {
        const int next = tile.first + kBlockN, keys = sequence.seqlen_k - next;
        if (kDirectTiles == 1 || keys <= 0) return 0x7fffffff;
        return uniform(kIsCausal ? query_blocks<kBlockM>(next, min(kBlockN, keys), sequence).begin : 0);
    }
    // Once dS of `of_block` is stored: its dQ comes next.
    __device__ __forceinline__ void set(const KernelParams&, const Sequence&, const Tile&, int of_head, int of_block) { head = of_head, block = of_block; }

    // Where this lane's sums are, with `at` of DqPart. The first `tiles` of an accumulator's tiles
    // have columns.
    __device__ __forceinline__ float* sums(const KernelParams& params, int at) const {
        const int64 rows = dq_row_tile(Sequence(params, batch).workspace_row(params, head)) + block * (kBlockM / kDqTileRows);
        return params.dq_accum + rows * (kDqTiles * 128) + at;
    }
    template <int kRowFloats, int kTiles>
    __device__ __forceinline__ void load(const KernelParams& params, float (&acc)[kTiles][4], int at, int tiles) const {
        const float* from = sums(params, at);
        #pragma unroll
        for (int n = 0; n < kTiles; ++n) load_floats_if(acc[n], from + n * kRowFloats, n < tiles && !is_first && (kDirectTiles == 2 || block < end_last));
    }
    template <int kRowFloats, int kTiles>
    __device__ __forceinline__ void keep(const KernelParams& params, const float (&acc)[kTiles][4], int at, int tiles) const {
        float* to = sums(params, at);
        #pragma unroll
        for (int n = 0; n < kTiles; ++n) {
            const bool is_kept = n < tiles && block >= end_last;
            store_floats_if(to + n * kRowFloats, acc[n], is_kept && (kDirectTiles == 2 || is_first));
            if constexpr (kDirectTiles > 2) add_floats_if(to + n * kRowFloats, acc[n], is_kept && !is_first);
        }
    }
    static __device__ __forceinline__ float scale_of(const KernelParams& params) {
        return params.softmax_scale * (kHasDropout ? params.dropout_keep_scale : 1.f);
    }
    // Stores dQ: the lane's queries `row` and row + 8 of a block, and 8 * kTiles columns from `col`
    // on.
    template <int kTiles>
    __device__ __forceinline__ void store_untransposed(const KernelParams& params, float (&acc)[kTiles][4], int col, int row, int lane) const {
        #pragma unroll
        for (int n = 0; n < kTiles; ++n) {
            #pragma unroll
            for (int i = 0; i < 4; ++i) acc[n][i] *= scale_of(params);
        }
        const int lane_row = block * kBlockM + row;
        const int64 stride = params.dq.stride_seqlen;
        uint16* to = static_cast<uint16*>(params.dq.data) + Sequence(params, batch).place_q(params, params.dq, head) + lane_row * stride + col;
        store_rows(to, stride, acc, block < end_last ? seqlen_q - lane_row : 0, lane, kHeadDim - col);
    }
    // Stores dQ^T: 16 columns from `col` on and 8 * kTiles queries from `row` on.
    template <int kTiles>
    __device__ __forceinline__ void store(const KernelParams& params, const float (&acc)[kTiles][4], int col, int row, int lane) const {
        const float scale = scale_of(params);
        // Even lanes store 4 of the first 8 columns, and odd ones 4 of the last 8: 32 bytes a row.
        const bool odd = lane & 1;
        const int lane_col = col + (odd ? 8 : 0) + lane % 4 / 2 * 4, lane_row = block * kBlockM + row + lane / 4;
        const int rows_left = lane_col < kHeadDim && block < end_last ? seqlen_q - lane_row : 0;
        const int64 stride = params.dq.stride_seqlen;
        Element* to = static_cast<Element*>(params.dq.data) + Sequence(params, batch).place_q(params, params.dq, head) + lane_row * stride + lane_col;
        #pragma unroll
        for (int n = 0; n < kTiles; ++n) {
            const uint32 low = transpose_matrix(pack2(acc[n][0] * scale, acc[n][1] * scale));
            const uint32 high = transpose_matrix(pack2(acc[n][2] * scale, acc[n][3] * scale));
            const uint32 got = __shfl_xor_sync(0xffffffff, odd ? low : high, 1);
            if (n * 8 < rows_left) *reinterpret_cast<uint2*>(to + n * 8 * stride) = odd ? make_uint2(got, high) : make_uint2(low, got);
        }
    }
    // This tile waits for no other one, and no other one for it.
    __device__ __forceinline__ void wait(const KernelParams&) const {}
    __device__ __forceinline__ void added() const {}
    template <bool kByCopies>
    __device__ __forceinline__ void end(const KernelParams&, bool, int) const {}
};
