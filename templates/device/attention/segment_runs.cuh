// The runs of segments into which the keys of a tile of many query rows are split with
// kIsBatchInvariant (device/attention/fixed_order.cuh). Each run has its own CTA, and the number of
// runs changes no bit. The run of the last keys merges its segments and groups, as an unsplit tile
// does. It leaves one state or, if it ends within a group, one of that part of the group and one of
// the groups behind it.
//
// In most launches runs are of whole groups, and each other run leaves the state of each group. If
// that would make runs too unequal, runs are of segments, and each other run leaves the state of
// each segment. A state lies at the place of its lowest segment or group. The host decides
// (src/problem/segments.rs).
//
// The sm90 forward kernel and combine_runs.cu.tera share this file.

#include "device/attention/block_range.cuh"
#include "device/attention/fixed_order.cuh"

// Runs of each tile of a launch.
__device__ __forceinline__ int runs_of_tile(const KernelParams& params) { return params.workspace_rows; }
// Whether runs are of groups. The workspace then has a place for each group.
__device__ __forceinline__ bool are_of_groups(const KernelParams& params) { return params.num_splits <= segment_of(params.seqlen_k - 1); }
__device__ __forceinline__ int place_of(int segment, const KernelParams& params) { return are_of_groups(params) ? group_of(segment) : segment; }

struct SegmentRuns {
    BlockRange range;  // the blocks that the tile sees
    int count;
    bool are_of_groups;

    __device__ __forceinline__ SegmentRuns(const BlockRange& range, const KernelParams& params)
        : range(range), count(runs_of_tile(params)), are_of_groups(::are_of_groups(params)) {}

    // The lowest segment of run `nth`. Run 0 has the last keys. Runs are as equal as whole groups
    // or segments allow, and runs other than run 0 may be empty.
    __device__ __forceinline__ int lowest(int nth) const {
        const int first = segment_of(range.begin * kBlockN), last = segment_of(max(range.end - 1, range.begin) * kBlockN);
        if (nth + 1 >= count) return first;
        // At most 2^25 blocks and 2^5 runs.
        const int key = (range.end - (range.end - range.begin) * (nth + 1) / count) * kBlockN;
        const int units = are_of_groups ? kGroupSegments : 1, unit = segment_of(key) / units * units;
        const bool is_late = 2 * int64(key - int(segment_begin(unit))) >= int64(units) << segment_log2(key);
        return min(unit + (is_late ? units : 0), last / units * units);
    }
    // The first block of run `nth`, and the end of its blocks.
    __device__ __forceinline__ int begin(int nth) const { return max(range.begin, min(range.end, int(segment_begin(lowest(nth)) / kBlockN))); }
    __device__ __forceinline__ int end(int nth) const { return nth == 0 ? range.end : begin(nth - 1); }
};
// Whether run 0 leaves two states. `lowest` is its lowest segment, and `last` the tile's last one.
__device__ __forceinline__ bool leaves_two_states(int lowest, int last) { return !begins_group(lowest) && group_of(lowest) != group_of(last); }
// The segment at whose place the second one lies.
__device__ __forceinline__ int lowest_of_groups(int lowest) { return (group_of(lowest) + 1) * kGroupSegments; }
