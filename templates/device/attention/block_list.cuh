// Block masks: the lists of which blocks of keys a block of queries meets, or the other way round,
// and the walks over them by tiles.
//
// Of each row of blocks (of queries forward, of keys backward) and query head there are two lists:
// blocks in which every other rule is asked, too, and full ones, in which the mask is not; causal
// masks and windows hold in both. A block is whole tiles of a kernel in either direction
// (src/family/limits.rs), so that a tile lies in one row. Lists are the caller's, and the host has
// not seen them: what is no block is not read.

#include "device/attention/block_range.cuh"

constexpr bool kHasBlockMask = kMaskBlockQ > 0;
static_assert(!kHasBlockMask || (kMaskBlockQ % kBlockM == 0 && kMaskBlockK % kBlockN == 0), "a block is whole tiles");

// A tile that a list names, by its number within the sequence.
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
    // Those in which most is asked come first.
    __device__ __forceinline__ int block(int at) const { return is_full(at) ? full[at - num_partial] : partial[at]; }

private:
    static __device__ __forceinline__ int held(int count, const BlockListsView& lists) { return max(0, min(count, int(lists.max_blocks))); }
};

// The tiles of keys that a tile of queries meets, at positions from size() - 1 down to 0, which is
// how kernels count key blocks. What is no block lies past the last key, where all is hidden and
// nothing is loaded.
struct KeyList {
    static constexpr int kTiles = kHasBlockMask ? kMaskBlockK / kBlockN : 1;
    BlockList list;
    uint32 past;  // the block past the last one

    __device__ __forceinline__ KeyList(const KernelParams& params, const Sequence& sequence, int head, int row)
        : list(params, sequence.batch, head, kHasBlockMask ? row / kMaskBlockQ : 0), past(kHasBlockMask ? uint32(sequence.seqlen_k + kMaskBlockK - 1) / kMaskBlockK : 0) {}
    __device__ __forceinline__ int size() const { return list.size() * kTiles; }
    __device__ __forceinline__ ListedTile at(int position) const {
        const int block = list.size() - 1 - position / kTiles;
        return {int(min(uint32(list.block(block)), past)) * kTiles + position % kTiles, list.is_full(block)};
    }
};

// The tiles of queries of one head that a tile of keys meets, at positions from 0 on. `range` is of
// those in which a query sees a key; the others, and what is no block, have a negative number, and
// nobody may load them.
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

    // How many there are of all query heads of a group.
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

// A walk over them, of one query head after the other; who walks knows by their count where it
// ends.
struct QueryWalk {
    const KernelParams& params;
    const Sequence& sequence;
    const BlockRange range;
    const int key;
    int head, position = 0;  // the next one's
    QueryList list;
    ListedTile at = {};      // where the walk is

    __device__ __forceinline__ QueryWalk(const KernelParams& params, const Sequence& sequence, int head_kv, int key, const BlockRange& range)
        : params(params), sequence(sequence), range(range), key(key), head(head_kv * params.group_size), list(params, sequence, head, key, range) {}
    __device__ __forceinline__ void next() {
        do {
            while (position == list.size()) list = QueryList(params, sequence, ++head, key, range), position = 0;
            at = list.at(position++);
        } while (at.tile < 0);
    }
};
