// Which products of the sm90 forward kernel its consumer warpgroups issue in turns
// (sm90/consumer_turns.cuh): those of blocks that all of a tile's rows see without a mask.

#include "sm90/consumer_turns.cuh"
#include "sm90/forward/shared.cuh"
#include "sm90/forward/tile_rows.cuh"

// Where turns pay, by times of an H100 (docs/tuning/sm90-forward.md#turns). With dropout, modified
// scores and packed sequences they did not. With a window, a block mask, batch_invariant, keys of 8
// bits and several CTAs on an SM they were not timed.
constexpr bool kIsTimedWithTurns = kKeyFormat == 0 && !kReadsWidened && !kHasBlockMask && !kHasWindow && !kIsBatchInvariant && !kHasDropout &&
                                   !kModifiesScores && (!kIsVarlen || kPageSize > 0) && kCtasPerSm == 1;
constexpr int kWiderDim = kHeadDim > kHeadDimV ? kHeadDim : kHeadDimV;
constexpr bool kTakesTurns =
    kIsTimedWithTurns && (kConsumers == 4 ? kWiderDim <= 64 && !kTilesDiffer :
                          kConsumers == 3 ? kWiderDim <= 80 :
                          kConsumers == 2 && (kWiderDim <= 80 || (kWiderDim <= 112 ? !kTilesDiffer : kWiderDim <= 128 && kTilesDiffer)));
using Turns = ConsumerTurns<kConsumers, kTakesTurns>;

// The blocks [begin, end) of a tile that are done in turns. The first warpgroup's rows see the
// fewest keys, so a block that they see without a mask needs none in any row. The first block that
// this warpgroup does is not done in turns, since it is multiplied under the tile before.
struct TurnBlocks {
    int begin, end;
    static __device__ __forceinline__ TurnBlocks of(const Tile& tile, const Sequence& sequence) {
        const Share share = Share::of(tile, sequence, 0);
        const int begin = kBeginsLater ? share.full_begin : 0;
        return {begin, max(begin, min(share.full_end, share.end - 1))};
    }
    __device__ __forceinline__ bool has(int block) const { return block >= begin && block < end; }
};
