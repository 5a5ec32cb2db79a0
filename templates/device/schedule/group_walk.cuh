// In which order a tile of keys meets the blocks of query rows of its GQA group's heads, backward.
//
// Where tiles see different rows, of several heads all at one block of rows, then all at the block
// before it, from the last one on: head by head, tiles that see fewer rows would be ahead by whole
// heads in the end, and read Q and dO and add to dQ in memory, each by itself, where so they meet
// in L2. Else, and in turns (device/schedule/dq_turns.cuh), head by head from the first block on.

#include "device/schedule/tile_order.cuh"

struct GroupWalk {
    int head, block;  // where it is
    int first_head, end_head, first_block, end_block;

    __device__ __forceinline__ GroupWalk(int first_head, int heads, int first_block, int end_block)
        : head(first_head), block(is_by_head(heads) ? first_block : end_block - 1),
          first_head(first_head), end_head(first_head + heads), first_block(first_block), end_block(end_block) {}
    static __device__ __forceinline__ bool is_by_head(int heads) { return kIsDeterministic || !(kIsCausal || kHasWindow) || heads == 1; }
    __device__ __forceinline__ void advance() {
        if (is_by_head(end_head - first_head)) {
            if (++block == end_block) block = first_block, ++head;
        } else if (++head == end_head) {
            head = first_head, --block;
        }
    }
};

// The producer's walk through the blocks of queries that a tile of keys meets; `load` starts the
// copies of one and counts `left` down.
template <typename Load>
__device__ __forceinline__ void load_queries(const KernelParams& params, const Sequence& sequence, const Tile& tile, const BlockRange& range, const int& left, const Load& load) {
    const int first_head = tile.head * params.group_size, end_head = first_head + params.group_size;
    if constexpr (kHasBlockMask) {
        for (int head = first_head; head < end_head; ++head) {
            const QueryList list(params, sequence, head, tile.first, range);
            for (int position = 0; position < list.size(); ++position) {
                const ListedTile listed = list.at(position);
                if (listed.tile >= 0) load(head, listed.tile, listed);
            }
        }
    } else {
        GroupWalk walk(first_head, params.group_size, range.begin, range.end);
        for (; left > 0; walk.advance()) load(walk.head, walk.block, {});
    }
}
