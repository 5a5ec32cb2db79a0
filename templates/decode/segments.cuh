// The end of a segment in a team of the decode kernel, with kIsBatchInvariant. Its state goes to
// the workspace (device/attention/partials.cuh), where combine_segments merges it with others.

#include "decode/attend.cuh"
#include "decode/segment_walk.cuh"
#include "device/attention/partials.cuh"

// Stores a warp's share of a segment's state, and empties it for the next segment.
__device__ __forceinline__ void store_segment(Output& o, SegmentRows (&segments)[kMTiles], int segment, const QueryTile& tile,
                                              const KernelParams& params, const ThreadPlace& place) {
    #pragma unroll
    for (int m = 0; m < kMTiles; ++m) {
        #pragma unroll
        for (int r = 0; r < 2; ++r) {
            const float sum = quad_sum(segments[m].sum[r]);
            const int row = tile.row0 + place.first_row() + m * 16 + r * 8 + place.lane / 4;
            if (row < tile.rows) {
                const PackedRow at(row, tile.head_kv, params);
                const int64 partial = partial_row(params, segment, tile.batch, at.head, at.position);
                if (place.lane % 4 == 0 && place.first_col() == 0) segment_states(params)[partial] = make_float2(segments[m].reference[r], sum);
                float* const to = params.partial_o + partial * kPartialCols;
                #pragma unroll
                for (int n = 0; n < kOTiles; ++n) {
                    const int col = place.first_col() + n * 8 + place.lane % 4 * 2;
                    if (col < kPartialCols) *reinterpret_cast<float2*>(to + col) = make_float2(o[m][n][2 * r], o[m][n][2 * r + 1]);
                }
            }
        }
        segments[m].reset();
        #pragma unroll
        for (int n = 0; n < kOTiles; ++n) o[m][n][0] = o[m][n][1] = o[m][n][2] = o[m][n][3] = 0.f;
    }
}
