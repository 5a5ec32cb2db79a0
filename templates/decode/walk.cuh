// Which key blocks a CTA of the decode kernel and each of its teams take. A split is a share of
// the blocks that the tile sees. Its teams take one block in turn. segment_walk.cuh has the same
// interface.

#include "decode/work.cuh"

// A split's share of the key blocks [begin, end).
struct KeyBlocks {
    int begin, end;
};

struct Split {
    BlockRange seen;  // the key blocks that the tile sees
    int index;
    int count;        // splits that the tile's keys are shared among
    bool is_split;    // whether the CTA leaves a partial state

    __device__ __forceinline__ Split(const QueryTile& tile, const KernelParams& params) {
        const int first = tile.row0 / params.group_size, last = (tile.end_row() - 1) / params.group_size;
        seen = key_blocks<kBlockN>(first, last - first + 1, tile.sequence);
        index = blockIdx.y;
        count = kMaySplit ? gridDim.y : 1;
        is_split = kMaySplit && count > 1;
    }

    // Shares are even to the block; the first splits take what is left over.
    __device__ __forceinline__ KeyBlocks blocks() const {
        const int share = (seen.end - seen.begin) / count, left_over = (seen.end - seen.begin) % count;
        const int begin = seen.begin + index * share + min(index, left_over);
        return {begin, begin + share + (index < left_over ? 1 : 0)};
    }
};

// The blocks of one team: begin + team, begin + team + kTeams, ... of the split's.
struct BlockWalk {
    int block, end;

    __device__ __forceinline__ BlockWalk(const KeyBlocks& blocks, int team) : block(blocks.begin + team), end(blocks.end) {}
    __device__ __forceinline__ bool is_past() const { return block >= end; }
    __device__ __forceinline__ void advance() { block += kTeams; }
    // The end of the blocks whose pages may be looked up.
    __device__ __forceinline__ int end_of_pages() const { return end; }
};
