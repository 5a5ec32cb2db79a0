// When consumer warpgroups of the sm90 forward kernel for e4m3 take turns at their products
// (sm90/consumer_turns.cuh). Each V block of a tile is a turn of each consumer.

#include "device/schedule/tile_order.cuh"
#include "sm90/consumer_turns.cuh"
#include "sm90/forward_fp8/shared.cuh"

// When a consumer passes its turn on, if it takes turns. docs/tuning/eight-bits.md has the times:
// with products as wide as those past head dim 224, where the producer transposes V, and with three
// consumers or more where tiles have one length.
constexpr bool kPassesAtIssue = kConsumers == 2 && kHeadDim > 224 && !kReadsImages;
constexpr bool kPassesWithScores = kConsumers >= 3 && !kTilesDiffer && !kModifiesScores;
constexpr bool kTakesTurns = kPassesAtIssue || kPassesWithScores;
using Turns = ConsumerTurns<kConsumers, kTakesTurns>;
