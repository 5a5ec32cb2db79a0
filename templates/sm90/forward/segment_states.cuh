// What a tile of a batch-invariant sm90 forward kernel leaves where keys are split: the state of
// its run, its groups or its segments (device/attention/segment_runs.cuh), in the workspace, for
// combine_runs.cu.tera to merge.

#include "device/attention/partials.cuh"
#include "device/schedule/tile_slots.cuh"
#include "sm90/forward/segment_tiles.cuh"
#include "sm90/forward/tile_rows.cuh"

// Writes a lane's elements of two rows to the workspace: a state's reference, sum and O. `row` is
// the index of the first row in its sequence; the second is row + 8.
template <int kTiles>
__device__ __forceinline__ void store_state(const float (&o)[kTiles][4], const float2 (&states)[2], int row, int place, const KernelParams& params,
                                            const Tile& tile, const Sequence& sequence, int lane) {
    #pragma unroll
    for (int r = 0; r < 2; ++r) {
        if (row + r * 8 >= sequence.seqlen_q) continue;
        const int64 at = partial_row(params, place, tile.batch, tile.head, row + r * 8);
        if (lane % 4 == 0) segment_states(params)[at] = states[r];
        float* const to = params.partial_o + at * kPartialCols + lane % 4 * 2;
        // The lanes of a quad write the 32 bytes of a sector.
        #pragma unroll
        for (int n = 0; n < kTiles; ++n) *reinterpret_cast<float2*>(to + n * 8) = make_float2(o[n][2 * r], o[n][2 * r + 1]);
    }
}

// Takes the place of SegmentMerge where keys are split. The run of the last keys merges all groups.
// Other runs store the state of each group or segment.
template <class MergedO, int kTiles>
struct RunMerge {
    SegmentMerge<MergedO, kTiles> merged;
    const KernelParams& params;
    const TileSlots& tiles;
    const int consumer, thread;
    uint32 nth = 0;     // the tile's place

    __device__ __forceinline__ RunMerge(MergedO& o, float4& kept, MergedGroups<kTiles>& groups, const KernelParams& params, const TileSlots& tiles,
                                        int consumer, int thread)
        : merged(o, kept, groups), params(params), tiles(tiles), consumer(consumer), thread(thread) {}

    __device__ __forceinline__ void begin_tile() { merged.begin_tile(); }
    __device__ __forceinline__ void add(float (&of_segment)[kTiles][4], const SegmentRows& rows, int first_block, bool ends_group) {
        // Read again, since holding the tile would cost registers of the loop over blocks.
        const Tile tile = tiles.get(nth);
        const int segment = segment_of(first_block * kBlockN);
        if (tile.split < 0 && !are_of_groups(params)) {
            store_segment(of_segment, rows, tile, segment);
        } else if (tile.split < 0 && ends_group) {
            store_group(of_segment, rows, tile, segment);
            merged.is_first = true;
        } else {
            merged.add(of_segment, rows, first_block, ends_group);
        }
    }
    // Ends a tile.
    __device__ __forceinline__ void finish(float (&o)[kTiles][4], const SegmentRows& rows, const Tile& tile, bool sees_keys) {
        const int segment = segment_of(tile.begin * kBlockN);
        if (tile.split < 0) {
            if (!sees_keys) return;
            if (are_of_groups(params)) store_group(o, rows, tile, segment);
            else store_segment(o, rows, tile, segment);
            return;
        }
        MergedRow of_run[2];
        if (begins_group(tile.split)) {
            if (sees_keys) merged.finish(of_run, o, rows);
            store_rows(o, of_run, tile, tile.split);
        } else {
            if (sees_keys) merged.finish_group(of_run, o, rows);
            store_rows(o, of_run, tile, tile.split);
            if (!leaves_two_states(tile.split, last_segment(tile))) return;
            MergedRow of_groups[2];
            merged.groups.take(of_groups, o);
            store_rows(o, of_groups, tile, lowest_of_groups(tile.split));
        }
    }

private:
    __device__ __forceinline__ int last_segment(const Tile& tile) const { return segment_of((max(tile.begin + tile.blocks, 1) - 1) * kBlockN); }
    __device__ __forceinline__ int first_row(const Tile& tile) const { return tile.first + consumer * 64 + thread / 32 * 16 + thread % 32 / 4; }
    __device__ __forceinline__ void store_segment(const float (&o)[kTiles][4], const SegmentRows& rows, const Tile& tile, int segment) const {
        const float2 states[2] = {make_float2(rows.reference[0], quad_sum(rows.sum[0])), make_float2(rows.reference[1], quad_sum(rows.sum[1]))};
        store_state(o, states, first_row(tile), place_of(segment, params), params, tile, Sequence(params, tile.batch), thread % 32);
    }
    __device__ __forceinline__ void store_rows(const float (&o)[kTiles][4], const MergedRow (&rows)[2], const Tile& tile, int segment) const {
        const float2 states[2] = {make_float2(rows[0].reference, rows[0].sum), make_float2(rows[1].reference, rows[1].sum)};
        store_state(o, states, first_row(tile), place_of(segment, params), params, tile, Sequence(params, tile.batch), thread % 32);
    }
    __device__ __forceinline__ void store_group(float (&o)[kTiles][4], const SegmentRows& rows, const Tile& tile, int segment) {
        MergedRow of_group[2];
        merged.finish_group(of_group, o, rows);
        store_rows(o, of_group, tile, segment);
    }
};
