// Which key blocks a CTA of the decode kernel and each of its teams take with kIsBatchInvariant. A
// split is a run of segments (device/attention/fixed_order.cuh), of which the teams take one in
// turn. A segment is walked from its last block to its first. walk.cuh has the same interface.

#include "decode/work.cuh"
#include "device/attention/fixed_order.cuh"

// CTAs that fill the largest GPUs a few times over. How segments are shared out changes no bit.
constexpr int kEnoughCtas = 1056;

// A split's share of the segments [begin, end).
struct KeyBlocks {
    int begin, end;
    int seen_begin, seen_end;  // the key blocks that the tile sees
};

struct Split {
    BlockRange seen;  // the key blocks that the tile sees
    int begin, end;   // the split's segments

    __device__ __forceinline__ Split(const QueryTile& tile, const KernelParams& params) {
        const int first_row = tile.row0 / params.group_size, last_row = (tile.end_row() - 1) / params.group_size;
        seen = key_blocks<kBlockN>(first_row, last_row - first_row + 1, tile.sequence);
        const int first = segment_of(seen.begin * kBlockN);
        const int segments = seen.end > seen.begin ? segment_of((seen.end - 1) * kBlockN) - first + 1 : 0;
        // A team has a segment at least.
        const int most = max(1, (segments + kTeams - 1) / kTeams);
        const int count = min(most, max(1, kEnoughCtas / int(gridDim.x))), index = blockIdx.y;
        const int share = segments / count, left_over = segments % count;
        begin = index < count ? first + index * share + min(index, left_over) : 0;
        end = index < count ? begin + share + (index < left_over ? 1 : 0) : 0;
    }
    __device__ __forceinline__ bool is_unused() const { return begin >= end; }
    __device__ __forceinline__ KeyBlocks blocks() const { return {begin, end, seen.begin, seen.end}; }
};

// The blocks of one team.
struct BlockWalk {
    int block, segment;
    int first_block;  // of the segment, as far as the tile sees it
    int seen_begin, seen_end, end_segment;

    __device__ __forceinline__ BlockWalk(const KeyBlocks& blocks, int team)
        : segment(blocks.begin + team), seen_begin(blocks.seen_begin), seen_end(blocks.seen_end), end_segment(blocks.end) {
        begin_segment();
    }
    __device__ __forceinline__ bool is_past() const { return segment >= end_segment; }
    __device__ __forceinline__ bool ends_segment() const { return block == first_block; }
    __device__ __forceinline__ void advance() {
        if (--block >= first_block) return;
        segment += kTeams;
        begin_segment();
    }
    // The end of the blocks whose pages may be looked up.
    __device__ __forceinline__ int end_of_pages() const { return is_past() ? block : seen_end; }

private:
    __device__ __forceinline__ void begin_segment() {
        first_block = max(int(segment_begin(segment) / kBlockN), seen_begin);
        block = int(min(segment_begin(segment + 1) / kBlockN, uint32(seen_end))) - 1;
    }
};
