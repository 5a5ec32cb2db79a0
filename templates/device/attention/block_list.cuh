// Block masks: lists of the key blocks that a block of queries meets, or of the query blocks that a
// block of keys meets, and walks over these lists by tiles. Schedules and producers use it. It
// knows neither scores nor copies.
//
// Each row of blocks (queries forward, keys backward) and query head has two lists. In blocks of
// the first list every rule applies. In full blocks, the second list, the mask does not apply.
// Causal masks and windows apply in both. A block is whole tiles of a kernel in either direction
// (src/family/limits.rs), so a tile lies in one row. The caller owns the lists, and the host has
// not seen them: an index that names no block is never followed.

#include "device/attention/block_range.cuh"

constexpr bool kHasBlockMask = kMaskBlockQ > 0;
static_assert(!kHasBlockMask || (kMaskBlockQ % kBlockM == 0 && kMaskBlockK % kBlockN == 0), "a block is whole tiles");

// A tile that a list names. `tile` is its number within the sequence.
struct ListedTile {
    int tile;
    bool is_full;
};

// The lists of one row of blocks and one query head.
struct BlockList {
    const int *partial = nullptr, *full = nullptr;
    int num_partial = 0, num_full = 0;

    __device__ __forceinline__ BlockList(const KernelParams& params, int batch, int head, int row) {
        if constexpr (!kHasBlockMask) return;
        const BlockListsView& lists = params.block_lists;
        const int64 counts = batch * lists.num_blocks_stride_batch + head * lists.num_blocks_stride_head + row;
        const int64 first = batch * lists.indices_stride_batch + head * lists.indices_stride_head + row * lists.indices_stride_row;
        partial = lists.indices + first, full = lists.full_indices + first;
        num_partial = held(lists.num_blocks[counts], lists);
        num_full = lists.full_num_blocks ? held(lists.full_num_blocks[counts], lists) : 0;
    }
    __device__ __forceinline__ int size() const { return num_partial + num_full; }
    __device__ __forceinline__ bool is_full(int at) const { return at >= num_partial; }
    // Blocks that the mask applies to come first, full blocks last.
    __device__ __forceinline__ int block(int at) const { return is_full(at) ? full[at - num_partial] : partial[at]; }

private:
    static __device__ __forceinline__ int held(int count, const BlockListsView& lists) { return max(0, min(count, int(lists.max_blocks))); }
};

// The key tiles that a query tile meets, at positions from size() - 1 down to 0, as kernels count
// key blocks. An index that names no block gives the block past the last key. All of that block is
// hidden, and nothing is loaded for it.
struct KeyList {
    static constexpr int kTiles = kHasBlockMask ? kMaskBlockK / kBlockN : 1;
    BlockList list;
    uint32 past;  // number of the block past the last one

    __device__ __forceinline__ KeyList(const KernelParams& params, const Sequence& sequence, int head, int row)
        : list(params, sequence.batch, head, kHasBlockMask ? row / kMaskBlockQ : 0), past(kHasBlockMask ? uint32(sequence.seqlen_k + kMaskBlockK - 1) / kMaskBlockK : 0) {}
    __device__ __forceinline__ int size() const { return list.size() * kTiles; }
    __device__ __forceinline__ ListedTile at(int position) const {
        const int block = list.size() - 1 - position / kTiles;
        return {int(min(uint32(list.block(block)), past)) * kTiles + position % kTiles, list.is_full(block)};
    }
};

// The query tiles of one head that a key tile meets, at positions from 0 on. `range` holds the
// tiles in which a query sees a key. Other tiles, and indices that name no block, get a negative
// number: nothing may be loaded for them.
struct QueryList {
    static constexpr int kTiles = kHasBlockMask ? kMaskBlockQ / kBlockM : 1;
    BlockList list;
    int begin, end;

    __device__ __forceinline__ QueryList(const KernelParams& params, const Sequence& sequence, int head, int key, const BlockRange& range)
        : list(params, sequence.batch, head, kHasBlockMask ? key / kMaskBlockK : 0), begin(range.begin), end(range.end) {}
    __device__ __forceinline__ int size() const { return list.size() * kTiles; }
    __device__ __forceinline__ ListedTile at(int position) const {
        const uint32 block = list.block(position / kTiles);
        const int tile = block <= uint32(end) / kTiles ? int(block * kTiles) + position % kTiles : -1;
        return {tile >= begin && tile < end ? tile : -1, list.is_full(position / kTiles)};
    }

    // The number of such tiles over all query heads of a GQA group.
    static __device__ __forceinline__ int count(const KernelParams& params, const Sequence& sequence, int head_kv, int key, const BlockRange& range) {
        int tiles = 0;
        for (int head = head_kv * params.group_size; head < (head_kv + 1) * params.group_size; ++head) {
            const QueryList list(params, sequence, head, key, range);
            for (int position = 0; position < list.size(); position += kTiles) {
                const uint32 block = list.list.block(position / kTiles);
                if (block <= uint32(range.end) / kTiles) tiles += max(0, min(range.end, int(block + 1) * kTiles) - max(range.begin, int(block) * kTiles));
            }
        }
        return tiles;
    }
};

// A walk over the query tiles of a GQA group, one query head after the other. The walk has no end
// mark: its user knows the number of tiles from QueryList::count.
struct QueryWalk {
    const KernelParams& params;
    const Sequence& sequence;
    const BlockRange range;
    const int key;
    int head, position = 0;  // of the next tile
    QueryList list;
    ListedTile at = {};      // the current tile

    __device__ __forceinline__ QueryWalk(const KernelParams& params, const Sequence& sequence, int head_kv, int key, const BlockRange& range)
        : params(params), sequence(sequence), range(range), key(key), head(head_kv * params.group_size), list(params, sequence, head, key, range) {}
    __device__ __forceinline__ void next() {
        do {
            while (position == list.size()) list = QueryList(params, sequence, ++head, key, range), position = 0;
            at = list.at(position++);
        } while (at.tile < 0);
    }
};
