// The 64 query rows of a tile that one consumer warpgroup of the sm90 forward kernel does, and the
// key blocks they see.
//
// Rows and keys are absolute indices within their sequence.

#include "device/attention/block_list.cuh"
#include "device/attention/block_range.cuh"
#include "device/schedule/tile_order.cuh"

// Whether tiles may begin after block 0 of their sequence's keys.
constexpr bool kBeginsLater = kHasWindow || kMaySplit;

// Which of the tile's loaded blocks a warpgroup's rows see: [begin, end), none where begin >= end.
// Blocks of [full_begin, full_end) need no mask. Under a block mask begin and end are positions in
// the list.
struct Share {
    int row, begin, full_begin, full_end, end;  // row: the warpgroup's first

    static __device__ __forceinline__ Share of(const Tile& tile, const Sequence& sequence, int consumer) {
        const int row = tile.first + consumer * 64;
        const BlockRange range = key_blocks<kBlockN>(row, 64, sequence);
        if constexpr (kHasBlockMask) return {row, 0, range.full_begin, range.full_end, row < sequence.seqlen_q ? tile.blocks : 0};
        const int end = row < sequence.seqlen_q ? range.end : 0;
        if constexpr (kMaySplit) {
            const int begin = max(range.begin, tile.begin);
            return {row, begin, max(range.full_begin, begin), range.full_end, min(end, tile.begin + tile.blocks)};
        }
        return {row, range.begin, range.full_begin, range.full_end, end};
    }
    __device__ __forceinline__ bool needs_mask(int block) const { return block >= full_end || (kHasWindow && block < full_begin); }
};

// Whether a row of the share sees a key of the tile.
__device__ __forceinline__ bool sees_keys(int row, const Tile& tile, const Share& share, const Sequence& sequence) {
    if constexpr (kMaySplit) {
        const int begin = max(key_begin(row, sequence), tile.begin * kBlockN);
        const int end = min(key_end(row, sequence), (tile.begin + tile.blocks) * kBlockN);
        return share.end > share.begin && end > begin;
    }
    return share.end > share.begin && key_end(row, sequence) > key_begin(row, sequence);
}
