// The order in which consumer warpgroups of the sm90 forward kernel for e4m3 issue their products.
//
// The tensor cores work on the products of all warpgroups alternately. So warpgroups that issue
// together also get their scores together, and then all compute exponentials while no product
// waits. With turns a warpgroup issues the products of a block when the one before it has issued
// its own: one multiplies while the other computes its softmax (FlashAttention-3, Shah et al.
// 2024, section 3.1, arXiv 2407.08608).
//
// Each V block of a tile is a turn of each consumer, whether its rows see the block or not. So all
// consumers take the same number of turns.

#include "device/ptx/mbarrier.cuh"
#include "sm90/forward_fp8/shared.cuh"

// It pays at the widest head dims, whose products take longest, where the producer transposes V
// (docs/tuning/eight-bits.md).
constexpr bool kTakesTurns = kConsumers == 2 && kHeadDim > 224 && !kReadsImages;

struct Turns {
    const uint32 before, own;  // barriers of the consumer whose turn precedes, and of this one
    uint32 parity;
    const bool arrives;        // one lane arrives for its warp: no warp may be two turns ahead of another

    __device__ __forceinline__ Turns(const Shared& shared, int consumer, int lane)
        : before(shared.turn_done(consumer == 0 ? kConsumers - 1 : consumer - 1)), own(shared.turn_done(consumer)),
          parity(consumer == 0 ? 1 : 0), arrives(lane == 0) {}
    __device__ __forceinline__ void take() const {
        if constexpr (kTakesTurns) barrier_wait(before, parity);
    }
    __device__ __forceinline__ void pass() {
        if constexpr (kTakesTurns) {
            if (arrives) barrier_arrive(own);
            parity ^= 1;
        }
    }
};
