// The epilogue of the decode kernel: the teams' states meet in shared memory, and the merged rows
// leave as O and LSE or, where the keys are split, as a partial state
// (device/attention/partials.cuh).

#include "decode/attend.cuh"
#include "decode/walk.cuh"
#include "device/attention/sink.cuh"
#include "device/layout/store_elements.cuh"

// A warp's states to shared memory.
__device__ __forceinline__ void write_states(const MergeMemory& states, const Output& o, const Softmax& softmax,
                                             float scale_log2, const ThreadPlace& place) {
    #pragma unroll
    for (int m = 0; m < kMTiles; ++m) {
        #pragma unroll
        for (int r = 0; r < 2; ++r) {
            const float sum = softmax.total(m, r), maximum = softmax.row_max[m][r];
            const int row = place.team * kCtaRows + place.head * kBlockM + (place.warp_m * kMTiles + m) * kTileRows + r * kRowStep + place.lane_row();
            float* const to = states.o + row * kMergeStride + place.warp_v * kWarpCols + first_col(place.lane);
            each_pair(o[m], r, [&](int col, float first, float second) {
                *reinterpret_cast<float2*>(to + col) = make_float2(first, second);
            });
            if (place.is_first_of_rows() && place.warp_v == 0) {
                states.references[row] = maximum == -infinity() ? maximum : maximum * scale_log2 - Softmax::kWeightLog2;
                states.sums[row] = sum;
            }
        }
    }
}

// Position and head of a row of the CTA's tiles. Rows of a head behind the last one get the last
// one's place; has_row tells them apart.
__device__ __forceinline__ PackedRow place_of_row(const QueryTile& tile, int row, const KernelParams& params) {
    if constexpr (kHeads == 1) return PackedRow(tile.row0 + row, tile.head_kv, params);
    return PackedRow(tile.row0 + row % kBlockM, min(tile.head_kv + row / kBlockM, params.num_heads_kv - 1), params);
}

// The place of a row of the tile in the split's partial state.
__device__ __forceinline__ int64 partial_row_of(const KernelParams& params, const Split& split, const QueryTile& tile, int row, const PackedRow& at) {
    if constexpr (kMostRows > 0) {
        return short_partial_row<kMostRows>(params, split.index, tile.batch, tile.head_kv, row);
    } else {
        return partial_row(params, split.index, tile.batch, at.head, at.position);
    }
}

// Each row's reference, sum and LSE, by one thread. Replaces the teams' references by the factors
// of their O, and the first team's sums by the rows' own.
__device__ __forceinline__ void end_rows(const MergeMemory& states, const QueryTile& tile, const Split& split, const KernelParams& params, int thread) {
    for (int row = thread; row < kCtaRows; row += kThreads) {
        float top = -infinity(), sum = 0.f;
        for (int t = 0; t < kTeams; ++t) top = fmaxf(top, states.references[t * kCtaRows + row]);
        const float reference = Softmax::reference(top);
        for (int t = 0; t < kTeams; ++t) {
            sum += states.sums[t * kCtaRows + row] * exp2_approx(states.references[t * kCtaRows + row] - reference);
        }
        const PackedRow at = place_of_row(tile, row, params);
        const bool exists = tile.has_row(row, params);
        float factor;
        if (split.is_split) {
            // The combine kernel adds the sink, once for all splits.
            factor = sum == 0.f ? 0.f : 1.f / sum;
            const float lse = sum == 0.f ? -infinity() : (reference + log2_approx(sum)) * kLn2;
            if (exists) params.partial_lse[partial_row_of(params, split, tile, row, at)] = lse;
        } else {
            const RowEnd ended = end_row(sum, reference, at.head, params);
            factor = ended.factor;
            if (exists && params.lse) params.lse[tile.sequence.lse_row(params, at.head) + at.position] = ended.lse;
        }
        for (int t = 0; t < kTeams; ++t) {
            float& of_team = states.references[t * kCtaRows + row];
            of_team = exp2_approx(of_team - reference) * factor;
        }
        states.sums[row] = sum;
    }
}

// kWidth columns of a row of O, from the teams' columns and factors.
template <int kWidth>
__device__ __forceinline__ void add_teams(float (&o)[kWidth], const float* of_teams, const float* factors) {
    #pragma unroll
    for (int i = 0; i < kWidth; ++i) o[i] = 0.f;
    #pragma unroll
    for (int team = 0; team < kTeams; ++team) {
        #pragma unroll
        for (int i = 0; i < kWidth; ++i) o[i] += of_teams[team * kCtaRows * kMergeStride + i] * factors[team * kCtaRows];
    }
}

// Merges the teams' O and stores the split's partial O. Rows without a key are not written.
__device__ __forceinline__ void store_partial(const MergeMemory& states, const QueryTile& tile, const Split& split, const KernelParams& params, int thread) {
    constexpr int kChunks = kPartialCols / 4;
    const int rows_here = kHeads > 1 ? kCtaRows : min(kBlockM, tile.rows - tile.row0);
    for (int index = thread; index < rows_here * kChunks; index += kThreads) {
        const int row = index / kChunks, col = index % kChunks * 4;
        if (states.sums[row] == 0.f || (kHeads > 1 && !tile.has_row(row, params))) continue;
        float o[4];
        add_teams(o, states.o + row * kMergeStride + col, states.references + row);
        const PackedRow at = place_of_row(tile, row, params);
        float* to = params.partial_o + partial_row_of(params, split, tile, row, at) * kPartialCols + col;
        *reinterpret_cast<float4*>(to) = make_float4(o[0], o[1], o[2], o[3]);
    }
}

// Merges the teams' O and stores it.
__device__ __forceinline__ void store_o(const MergeMemory& states, const QueryTile& tile, const KernelParams& params, int thread) {
    constexpr int kChunks = kHeadDimV / kVec;
    const int rows_here = kHeads > 1 ? kCtaRows : min(kBlockM, tile.rows - tile.row0);
    for (int index = thread; index < rows_here * kChunks; index += kThreads) {
        const int row = index / kChunks, col = index % kChunks * kVec;
        if (kHeads > 1 && !tile.has_row(row, params)) continue;
        float o[kVec];
        add_teams(o, states.o + row * kMergeStride + col, states.references + row);
        const PackedRow at = place_of_row(tile, row, params);
        uint16* to = static_cast<uint16*>(params.out.data) + tile.sequence.place_q(params, params.out, at.head)
            + at.position * params.out.stride_seqlen + col;
        store_elements<kVec>(to, o);
    }
}
