// The tiles of a batch-invariant sm90 forward kernel whose keys are split: each does a run of the
// segments that its rows see (device/attention/segment_runs.cuh). segment_states.cuh has what they
// leave.

#include "device/attention/segment_runs.cuh"
#include "device/schedule/tile_order.cuh"

// As QueryTiles. In the run of the last keys, Tile::split is the run's lowest segment, at whose
// place the run's state is stored. In other runs Tile::split is -1.
template <int kLeftRows>
struct RunTiles : QueryTiles<kLeftRows> {
    static __device__ __forceinline__ TileOrder order(const KernelParams& params, const Sequence& sequence, int sequences, uint32 feeds) {
        return TileOrder(sequence.seqlen_q, kBlockM, sequences * params.num_heads_q,
                         float(sequence.seqlen_k) * ((kHeadDim + kHeadDimV) * 2) / float(params.group_size), feeds, runs_of_tile(params));
    }
    static __device__ __forceinline__ Tile at(const TileOrder& order, uint32 rank, int head, int batch, uint32, const KernelParams& params) {
        const uint32 count = runs_of_tile(params), row_rank = rank / count;
        const int row = int(kIsCausal ? order.tiles_per_head / count - 1 - row_rank : row_rank) * kBlockM, nth = int(rank % count);
        const SegmentRuns runs(key_blocks<kBlockN>(row, kBlockM, Sequence(params, batch)), params);
        return {row, head, batch, max(0, runs.end(nth) - runs.begin(nth)), runs.begin(nth), nth == 0 ? runs.lowest(0) : -1};
    }
};
