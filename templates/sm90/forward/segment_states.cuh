// What a tile of a batch-invariant sm90 forward kernel leaves where keys are split: the state of
// its run or those of its segments (device/attention/segment_runs.cuh), in the workspace, for
// combine_runs.cu.tera to merge.

#include "device/attention/partials.cuh"
#include "device/schedule/tile_slots.cuh"
#include "sm90/forward/segment_tiles.cuh"
#include "sm90/forward/tile_rows.cuh"

// Writes a lane's elements of two rows to the workspace: a state's reference, sum and O. `row` is
// the index of the first row in its sequence; the second is row + 8.
template <int kTiles>
__device__ __forceinline__ void store_state(const float (&o)[kTiles][4], const float2 (&states)[2], int row, int segment, const KernelParams& params,
                                            const Tile& tile, const Sequence& sequence, int lane) {
    #pragma unroll
    for (int r = 0; r < 2; ++r) {
        if (row + r * 8 >= sequence.seqlen_q) continue;
        const int64 at = partial_row(params, segment, tile.batch, tile.head, row + r * 8);
        if (lane % 4 == 0) segment_states(params)[at] = states[r];
        float* const to = params.partial_o + at * kPartialCols + lane % 4 * 2;
        // The lanes of a quad write the 32 bytes of a sector.
        #pragma unroll
        for (int n = 0; n < kTiles; ++n) *reinterpret_cast<float2*>(to + n * 8) = make_float2(o[n][2 * r], o[n][2 * r + 1]);
    }
}

// Takes the place of SegmentMerge where keys are split. In the run of the last keys it merges
// segments. In other runs it stores the state of each.
template <class MergedO>
struct RunMerge {
    SegmentMerge<MergedO> merged;
    const KernelParams& params;
    const TileSlots& tiles;
    const int consumer, thread;
    uint32 nth = 0;     // the tile's place
    bool is_first = true;
    int segment = 0;    // the one that is stored next

    __device__ __forceinline__ RunMerge(MergedO& o, float4& kept, const KernelParams& params, const TileSlots& tiles, int consumer, int thread)
        : merged(o, kept), params(params), tiles(tiles), consumer(consumer), thread(thread) {}

    template <int kTiles>
    __device__ __forceinline__ void add(const float (&of_segment)[kTiles][4], const SegmentRows& rows) {
        // Read again, since holding the tile would cost registers of the loop over blocks.
        const Tile tile = tiles.get(nth);
        if (tile.split >= 0) {
            merged.is_first = is_first;
            merged.add(of_segment, rows);
            is_first = false;
        } else {
            store(of_segment, rows, tile);
        }
    }
    // Ends a tile.
    template <int kTiles>
    __device__ __forceinline__ void finish(float (&o)[kTiles][4], const SegmentRows& rows, const Tile& tile, bool sees_keys) {
        if (tile.split < 0) {
            if (sees_keys) store(o, rows, tile);
            return;
        }
        MergedRow of_run[2];
        merged.is_first = is_first;
        if (sees_keys) merged.finish(of_run, o, rows);
        const float2 states[2] = {make_float2(of_run[0].reference, of_run[0].sum), make_float2(of_run[1].reference, of_run[1].sum)};
        store_state(o, states, first_row(tile), tile.split, params, tile, Sequence(params, tile.batch), thread % 32);
    }

private:
    __device__ __forceinline__ int first_row(const Tile& tile) const { return tile.first + consumer * 64 + thread / 32 * 16 + thread % 32 / 4; }
    template <int kTiles>
    __device__ __forceinline__ void store(const float (&o)[kTiles][4], const SegmentRows& rows, const Tile& tile) {
        const Sequence sequence(params, tile.batch);
        if (is_first) segment = segment_of((Share::of(tile, sequence, consumer).end - 1) * kBlockN);
        is_first = false;
        const float2 states[2] = {make_float2(rows.reference[0], quad_sum(rows.sum[0])), make_float2(rows.reference[1], quad_sum(rows.sum[1]))};
        store_state(o, states, first_row(tile), segment, params, tile, sequence, thread % 32);
        --segment;
    }
};
