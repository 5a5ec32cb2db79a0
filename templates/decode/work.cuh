// What a CTA of the decode kernel does: a tile of packed rows (device/attention/packed_rows.cuh) of
// one sequence and K/V head, and one split of the key blocks that the tile sees.

#include "device/attention/block_range.cuh"
#include "device/attention/packed_rows.cuh"
#include "device/attention/partials.cuh"

// Tiles and heads of one sequence are neighbours in the grid, since they read the same keys.
struct QueryTile {
    int batch_head;
    int row0;  // the first packed row
    int batch, head_kv;
    int first_head;  // the group's first query head
    Sequence sequence;
    int rows;  // packed rows of the sequence

    __device__ __forceinline__ QueryTile(const KernelParams& params)
        : QueryTile(params, kMostRows > 0 ? 1 : (params.seqlen_q * params.group_size + kBlockM - 1) / kBlockM) {}

    __device__ __forceinline__ bool is_empty() const { return row0 >= rows || (kMostRows > 0 && rows > kMostRows); }
    // One past the tile's last row.
    __device__ __forceinline__ int end_row() const { return min(row0 + kBlockM, rows); }

private:
    __device__ __forceinline__ QueryTile(const KernelParams& params, int num_tiles)
        : batch_head(int(blockIdx.x) / num_tiles), row0(int(blockIdx.x) % num_tiles * kBlockM), batch(batch_head / params.num_heads_kv),
          head_kv(batch_head % params.num_heads_kv), first_head(head_kv * params.group_size), sequence(params, batch), rows(sequence.seqlen_q * params.group_size) {}
};

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
        if constexpr (kIsBatchInvariant && kMaySplit) {
            // The grid has kMaxSplits; a sequence uses as many as its own keys fill.
            count = max(1, min((seen.end - seen.begin) / (kSplitKeys / kBlockN), kMaxSplits));
        }
    }

    // Whether the sequence has too few keys for this split.
    __device__ __forceinline__ bool is_unused() const { return kIsBatchInvariant && kMaySplit && index >= count; }

    // Shares are even to the block; the first splits take what is left over.
    __device__ __forceinline__ KeyBlocks blocks() const {
        const int share = (seen.end - seen.begin) / count, left_over = (seen.end - seen.begin) % count;
        const int begin = seen.begin + index * share + min(index, left_over);
        return {begin, begin + share + (index < left_over ? 1 : 0)};
    }
};

// Tells the combine kernel that a split has seen none of the tile's keys.
__device__ __forceinline__ void mark_unused(const Split& split, const QueryTile& tile, const KernelParams& params, int thread) {
    for (int row = tile.row0 + thread; row < tile.end_row(); row += kThreads) {
        const PackedRow at(row, tile.head_kv, params);
        params.partial_lse[partial_row(params, split.index, tile.batch, at.head, at.position)] = -infinity();
    }
}
