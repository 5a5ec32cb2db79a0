// The order in which consumer warpgroups of the sm90 forward kernel for e4m3 issue their products.
//
// The tensor cores work on the products of all warpgroups alternately. So warpgroups that issue
// together also get their scores together, and then all compute exponentials while no product
// waits. With turns a warpgroup issues the products of a block when the one before it has issued
// its own, or has its scores: one multiplies while another computes its softmax (FlashAttention-3,
// Shah et al. 2024, section 3.1, arXiv 2407.08608).
//
// Each V block of a tile is a turn of each consumer, whether its rows see the block or not. So all
// consumers take the same number of turns. Two consumers meet at a named barrier: one takes the
// turn there that the other passes on. It needs no register for a parity.

#include "device/ptx/sync.cuh"
#include "device/schedule/tile_order.cuh"
#include "sm90/forward_fp8/shared.cuh"

// When a consumer passes its turn on, if it takes turns. docs/tuning/eight-bits.md has the times:
// with products as wide as those past head dim 224, where the producer transposes V, and with three
// consumers or more where tiles have one length.
constexpr bool kPassesAtIssue = kConsumers == 2 && kHeadDim > 224 && !kReadsImages;
constexpr bool kPassesWithScores = kConsumers >= 3 && !kTilesDiffer && !kModifiesScores;
constexpr bool kTakesTurns = kPassesAtIssue || kPassesWithScores;

struct Turns {
    static constexpr int kFirstBarrier = 8;  // behind those of single warpgroups
    const int consumer;

    __device__ __forceinline__ explicit Turns(int consumer) : consumer(consumer) {
        if (consumer == kConsumers - 1) pass();
    }
    __device__ __forceinline__ void take() const {
        if constexpr (kTakesTurns) named_barrier<256>(kFirstBarrier + consumer);
    }
    // The next consumer's turn begins.
    __device__ __forceinline__ void pass() const {
        if constexpr (kTakesTurns) named_barrier_arrive<256>(kFirstBarrier + (kConsumers == 2 ? 1 - consumer : (consumer + 1) % kConsumers));
    }
    // Takes the turn that the last consumer passed on last.
    __device__ __forceinline__ void finish() const {
        if (consumer == 0) take();
    }
};
