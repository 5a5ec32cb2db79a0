// The epilogue of the decode kernel: the teams' states meet in shared memory, and the merged rows
// leave as O and LSE or, where the keys are split, as a partial state
// (device/attention/partials.cuh).

#include "decode/attend.cuh"
#include "decode/walk.cuh"
#include "device/attention/sink.cuh"
#include "device/layout/store_elements.cuh"

// A warp's states to shared memory.
__device__ __forceinline__ void write_states(const MergeMemory& states, const Output& o, const OnlineSoftmax<kMTiles>& softmax,
                                             float scale_log2, const ThreadPlace& place) {
    #pragma unroll
    for (int m = 0; m < kMTiles; ++m) {
        #pragma unroll
        for (int r = 0; r < 2; ++r) {
            const float sum = softmax.total(m, r), maximum = softmax.row_max[m][r];
            const int row = place.team * kBlockM + (place.warp_m * kMTiles + m) * 16 + r * 8 + place.lane / 4;
            float* const to = states.o + row * kMergeStride + place.warp_v * kWarpCols + first_col(place.lane);
            each_pair(o[m], r, [&](int col, float first, float second) {
                *reinterpret_cast<float2*>(to + col) = make_float2(first, second);
            });
            if (place.lane % 4 == 0 && place.warp_v == 0) {
                states.references[row] = maximum == -infinity() ? maximum : maximum * scale_log2;
                states.sums[row] = sum;
            }
        }
    }
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
    for (int row = thread; row < kBlockM; row += kThreads) {
        float top = -infinity(), sum = 0.f;
        for (int t = 0; t < kTeams; ++t) top = fmaxf(top, states.references[t * kBlockM + row]);
        const float reference = OnlineSoftmax<kMTiles>::reference(top);
        for (int t = 0; t < kTeams; ++t) {
            sum += states.sums[t * kBlockM + row] * exp2_approx(states.references[t * kBlockM + row] - reference);
        }
        const PackedRow at(tile.row0 + row, tile.head_kv, params);
        const bool exists = tile.row0 + row < tile.rows;
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
            float& of_team = states.references[t * kBlockM + row];
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
        for (int i = 0; i < kWidth; ++i) o[i] += of_teams[team * kBlockM * kMergeStride + i] * factors[team * kBlockM];
    }
}

// Merges the teams' O and stores the split's partial O. Rows without a key are not written.
__device__ __forceinline__ void store_partial(const MergeMemory& states, const QueryTile& tile, const Split& split, const KernelParams& params, int thread) {
    constexpr int kChunks = kPartialCols / 4;
    const int rows_here = min(kBlockM, tile.rows - tile.row0);
    for (int index = thread; index < rows_here * kChunks; index += kThreads) {
        const int row = index / kChunks, col = index % kChunks * 4;
        if (states.sums[row] == 0.f) continue;
        float o[4];
        add_teams(o, states.o + row * kMergeStride + col, states.references + row);
        const PackedRow at(tile.row0 + row, tile.head_kv, params);
        float* to = params.partial_o + partial_row_of(params, split, tile, row, at) * kPartialCols + col;
        *reinterpret_cast<float4*>(to) = make_float4(o[0], o[1], o[2], o[3]);
    }
}

// Merges the teams' O and stores it.
__device__ __forceinline__ void store_o(const MergeMemory& states, const QueryTile& tile, const KernelParams& params, int thread) {
    constexpr int kChunks = kHeadDimV / kVec;
    const int rows_here = min(kBlockM, tile.rows - tile.row0);
    for (int index = thread; index < rows_here * kChunks; index += kThreads) {
        const int row = index / kChunks, col = index % kChunks * kVec;
        float o[kVec];
        add_teams(o, states.o + row * kMergeStride + col, states.references + row);
        const PackedRow at(tile.row0 + row, tile.head_kv, params);
        uint16* to = static_cast<uint16*>(params.out.data) + tile.sequence.place_q(params, params.out, at.head)
            + at.position * params.out.stride_seqlen + col;
        store_elements<kVec>(to, o);
    }
}
