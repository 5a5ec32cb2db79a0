// The rows of Q in the decode kernel: their copy into shared memory.

#include "decode/work.cuh"
#include "device/layout/copy_elements.cuh"

// Where Q's rows lie in device memory.
struct QuerySource {
    const uint16* data;
    int64 group;  // elements from `data` to the sequence's row 0 of the group's first head

    __device__ __forceinline__ QuerySource(const QueryTile& tile, const KernelParams& params)
        : data(static_cast<const uint16*>(params.q.data)), group(tile.sequence.place_q(params, params.q, tile.first_head)) {}
};

// Starts the copy of the tile's rows by all threads, as one group of cp.async. Rows past the
// sequence's end and columns past the head dim are zeros.
__device__ __forceinline__ void start_q(uint32 tile_q, const QuerySource& source, const QueryTile& tile, const KernelParams& params, int thread) {
    constexpr int kChunks = TileQ::kCols / kVec;  // per row
    const uint16* q = source.data + source.group;
    for (int index = thread; index < kCtaRows * kChunks; index += kThreads) {
        const int row = index / kChunks, col = index % kChunks * kVec;
        const int packed = tile.row0 + (kHeads > 1 ? row % kBlockM : row);
        const int position = packed / params.group_size;
        const int head = packed % params.group_size + (kHeads > 1 ? row / kBlockM * params.group_size : 0);
        copy_elements<kVec>(tile_q + uint32(row * TileQ::kStride + col) * 2,
                            q + position * params.q.stride_seqlen + head * params.q.stride_head + col,
                            tile.has_row(row, params) && col < kHeadDim);
    }
    cp_async_commit();
}

// Completes Q in shared memory. The caller has waited for its own copies.
__device__ __forceinline__ void finish_q(uint32 tile_q, const KernelParams& params, int thread) {
    __syncthreads();  // every thread's copies of Q have arrived
    if (!kModifiesScores && params.softmax_scale_log2 < 0.f) {
        // The softmax takes the maximum of unscaled scores, so a negative scale's sign goes into Q.
        negate_tile<TileQ, kThreads>(tile_q, thread);
        __syncthreads();  // all of Q is negated before a warp reads it
    }
    if constexpr (kConvertsQuery) {
        convert_query<TileQ, kThreads>(tile_q, thread);
        __syncthreads();  // all of Q is converted before a warp reads it
    }
}
