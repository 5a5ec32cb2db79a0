// The runs of segments into which the keys of a tile of many query rows are split with
// kIsBatchInvariant (device/attention/fixed_order.cuh). Each run has its own CTA. The run of the
// last keys merges its segments, as an unsplit tile does, and leaves one state. Each other run
// leaves the state of each segment, since a segment may only be merged with the state of all later
// keys. So the number of runs changes no bit.
//
// The sm90 forward kernel and combine_runs.cu.tera share this file.

#include "device/attention/block_range.cuh"
#include "device/attention/fixed_order.cuh"

// SMs of an H100 or H200.
constexpr int kCtasOfRuns = 132;

// Runs of each tile of a launch: about one run of a long tile for each SM. Causal tiles of few keys
// differ in length, so they have more.
__device__ __forceinline__ int runs_of_tile(const KernelParams& params, int tile_rows) {
    const int64 tiles = int64(params.batch_size) * params.num_heads_q * ((params.seqlen_q + tile_rows - 1) / tile_rows);
    const int hidden = kIsCausal ? min(params.seqlen_q, params.seqlen_k) / 2 : 0;
    const int64 runs = int64(kCtasOfRuns) * params.seqlen_k / (tiles * (params.seqlen_k - hidden));
    return max(1, int(min(runs, int64(params.num_splits))));
}

struct SegmentRuns {
    BlockRange range;  // the blocks that the tile sees
    int count;

    // The lowest segment of run `nth`. Run 0 has the last keys. Runs are as equal as whole segments
    // allow, and runs other than run 0 may be empty.
    __device__ __forceinline__ int lowest(int nth) const {
        const int first = segment_of(range.begin * kBlockN), last = segment_of(max(range.end - 1, range.begin) * kBlockN);
        if (nth + 1 >= count) return first;
        const int key = (range.end - int(int64(range.end - range.begin) * (nth + 1) / count)) * kBlockN;
        const int segment = segment_of(key);
        const bool is_late = 2 * (key - int(segment_begin(segment))) >= 1 << segment_log2(key);
        return min(segment + is_late, last);
    }
    // The first block of run `nth`, and the end of its blocks.
    __device__ __forceinline__ int begin(int nth) const { return max(range.begin, min(range.end, int(segment_begin(lowest(nth)) / kBlockN))); }
    __device__ __forceinline__ int end(int nth) const { return nth == 0 ? range.end : begin(nth - 1); }
};
