// The order in which a tile of keys meets the blocks of query rows of its GQA group's heads, in the
// backward pass. Producer and consumers walk the same order. It knows no barrier and no copy: the
// producer passes its loads in.
//
// The walk has two orders. The first applies if tiles see different rows and the group has several
// heads. It takes all heads at one block of rows, then all heads at the next block. Tiles that run
// together then meet in L2. Head by head, tiles that see fewer rows would end up ahead by whole
// heads. Each tile would read Q and dO, and add to dQ, in memory by itself.
//
// Such a walk begins with the last block of rows. With kAlternates (a causal mask) walks of every
// other wave of tiles begin with the first block that the tile sees. The longest tiles start
// first. Tiles of the first wave start together, at the last rows, and end one after the other. As
// each of them ends, a tile of the second wave starts. Its first block lies further on by about the
// blocks that the others have walked meanwhile. So these tiles, too, are at the same rows at any
// time, and end together.
//
// The second order applies otherwise, with turns (device/schedule/dq_turns.cuh), and where tiles
// may share a walk (kMaySplit). It goes head by head, from the first block on. A tile that shares a
// walk begins `steps` steps after the walk's first one.

#include "device/schedule/tile_order.cuh"

struct GroupWalk {
    int head, block;  // the current step
    int first_head, end_head, first_block, end_block;
    const int next_block;  // 1 or -1

    __device__ __forceinline__ GroupWalk(int first_head, int heads, int first_block, int end_block, int steps, bool ascends)
        : head(first_head), block(is_by_head(heads) || ascends ? first_block : end_block - 1),
          first_head(first_head), end_head(first_head + heads), first_block(first_block), end_block(end_block), next_block(ascends ? 1 : -1) {
        if constexpr (kMaySplit) {
            const int steps_per_head = max(1, end_block - first_block);
            head += steps / steps_per_head, block += steps % steps_per_head;
        }
    }
    static __device__ __forceinline__ bool is_by_head(int heads) { return kMaySplit || kIsDeterministic || !(kIsCausal || kHasWindow) || heads == 1; }
    __device__ __forceinline__ void advance() {
        if (is_by_head(end_head - first_head)) {
            if (++block == end_block) block = first_block, ++head;
        } else if (++head == end_head) {
            head = first_head, block += next_block;
        }
    }
};

// The producer's walk through the blocks of queries that a tile of keys meets. `load` starts the
// copies of one block and counts `left` down.
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
        GroupWalk walk(first_head, params.group_size, range.begin, range.end, tile.begin, kAlternates && tile.begin > 0);
        for (; left > 0; walk.advance()) load(walk.head, walk.block, {});
    }
}
