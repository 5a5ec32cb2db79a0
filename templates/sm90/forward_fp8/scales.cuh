// The scales of a tile and of its blocks, for a consumer of the sm90 forward kernel for e4m3.
//
// Without scales by block, one factor of the scores and one of O serve the whole tile. With them, O
// is held in units of the largest scale of V so far. A block's weights are multiplied by its own
// scale in these units before they are rounded, and their sums are not.

#include "device/attention/key_scales.cuh"
#include "device/attention/narrow_softmax.cuh"
#include "device/schedule/tile_order.cuh"

constexpr bool kHasBlockScales = kKeysPerScale != 0;

// The factors that a whole tile has: of scores (with scales by block, q's alone), and of O.
struct TileScales {
    float scores, output;

    // No tile has none.
    static __device__ __forceinline__ TileScales of(const KernelParams& params, const Tile& tile) {
        if (tile.first < 0) return {1.f, 1.f};
        const Sequence sequence(params, tile.batch);
        const int head_kv = tile.head / params.group_size;
        const auto first = [&](const TensorView& view) { return ScaleRow(params, view, sequence, head_kv).of(0, 0); };
        const float of_q = first(scales_of_q(params));
        if constexpr (kHasBlockScales) return {of_q, 1.f};
        return {of_q * first(scales_of_k(params)), first(scales_of_v(params))};
    }
};

// The factors of a block's scores, of its weights, and of the tile's O.
template <bool kByBlock>
struct BlockFactors {
    const TileScales of_tile;

    __device__ __forceinline__ BlockFactors(const KernelParams&, const Sequence&, const Tile&, const TileScales& of_tile) : of_tile(of_tile) {}
    __device__ __forceinline__ void fetch(int) {}
    __device__ __forceinline__ float of_scores() const { return of_tile.scores; }
    __device__ __forceinline__ float of_output() const { return of_tile.output; }
    __device__ __forceinline__ float of_first_weights() const { return 1.f; }
    __device__ __forceinline__ float of_weights(NarrowSoftmax&) const { return 1.f; }
};

template <>
struct BlockFactors<true> {
    const ScaleRow k_row, v_row;
    const float of_q;
    const int last;           // the sequence's last key
    float k = 1.f, v = 1.f;   // of the block that was fetched
    float unit = 0.f;         // of O: the largest scale of V so far

    __device__ __forceinline__ BlockFactors(const KernelParams& params, const Sequence& sequence, const Tile& tile, const TileScales& of_tile)
        : k_row(params, scales_of_k(params), sequence, tile.head / params.group_size),
          v_row(params, scales_of_v(params), sequence, tile.head / params.group_size), of_q(of_tile.scores),
          last(max(0, sequence.seqlen_k - 1)) {}
    // Under a block mask a block may lie behind the sequence's last key.
    __device__ __forceinline__ void fetch(int block) {
        const int key = min(block * kBlockN, last);
        k = k_row.of(key, 0), v = v_row.of(key, 0);
    }
    __device__ __forceinline__ float of_scores() const { return of_q * k; }
    __device__ __forceinline__ float of_output() const { return unit; }
    __device__ __forceinline__ float of_first_weights() {
        unit = v;
        return 1.f;
    }
    // A larger scale than before changes O's unit.
    __device__ __forceinline__ float of_weights(NarrowSoftmax& softmax) {
        if (v > unit) {
            const float ratio = unit / v;
            #pragma unroll
            for (int r = 0; r < 2; ++r) softmax.factor[r] = softmax.pending ? softmax.factor[r] * ratio : ratio;
            softmax.pending = true;
            unit = v;
        }
        // Where all scales so far are 0, O's unit is 0 too, and makes O 0.
        return unit == 0.f ? 1.f : v / unit;
    }
};
