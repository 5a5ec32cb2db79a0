// Turns in which consumer warpgroups issue their products, for the forward kernels of sm90.
//
// The tensor cores work on the products of all warpgroups alternately. So warpgroups that issue
// together also get their scores together, and then all compute exponentials while no product
// waits. With turns a warpgroup issues the products of a block when the one before it has issued
// its own, or has its scores: one multiplies while another computes its softmax (FlashAttention-3,
// Shah et al. 2024, section 3.1, arXiv 2407.08608).
//
// All consumers take the same number of turns, whether their rows see a block or not. Two consumers
// meet at a named barrier: one takes the turn there that the other passes on. It needs no register
// for a parity. This file does not know which blocks are turns.

#include "device/ptx/sync.cuh"

template <int kConsumers, bool kTakesTurns>
struct ConsumerTurns {
    static constexpr int kFirstBarrier = 8;  // behind those of single warpgroups
    const int consumer;

    __device__ __forceinline__ explicit ConsumerTurns(int consumer) : consumer(consumer) {
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
