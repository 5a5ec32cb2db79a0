// Turns: tiles of keys add to the same rows of dQ in an order of their keys, the last first, so
// that every run gives the same bits.
//
// Of each query head, a counter for each block of query rows says how many additions are done. Who
// is about to add waits for those of all tiles behind its own, and ends its turn when its own have
// arrived. "All tiles behind" is their number: of the tiles behind one that meets a block of rows,
// those meet it too that are not behind the last key that the block sees (turns_before).
//
// The last first, since under a causal mask a tile begins with the rows at its own diagonal: tiles
// that begin together are then a tile's rows apart, the ones behind ahead.
//
// Nobody waits for ever: a block of threads draws its tiles by ticket while it runs, its first one
// too, and none before it needs it; a head's tiles descend as tickets ascend. So whoever holds the
// last tile that is not done has nothing else to do first, and no tile to wait for. Static
// schedules would not do: a block of threads that never starts, as where SMs are set aside for
// others, would keep its tile from those that hold the SMs and wait for it. backward_delta sets all
// counters to zero.

#include "device/ptx/global.cuh"

// Tickets drawn so far. Null where there are no queries: backward_delta, which sets counters to
// zero, then does not run, and no tile has a block to wait at.
__device__ __forceinline__ uint32* ticket_counter(const KernelParams& params) { return params.seqlen_q > 0 ? params.turns : nullptr; }

// The counter of the block of query rows that begins with this tile of rows of the dQ accumulator,
// of all heads.
__device__ __forceinline__ uint32* turn_counter(const KernelParams& params, int64 row_tile) { return params.turns + 1 + row_tile; }

__device__ __forceinline__ void wait_for_turn(const uint32* counter, uint32 additions) {
    while (load_acquire(counter) < additions) {}
}

// By one thread, after a barrier with those that have added: waits until what they added has
// arrived.
__device__ __forceinline__ void end_turn(uint32* counter) {
    count_up_release(counter);
}

// How many tiles of kBlockN keys behind the one that begins at `key` meet the block of kBlockM
// query rows that begins at `row`.
template <int kBlockM, int kBlockN>
__device__ __forceinline__ int turns_before(int key, int row, const Sequence& sequence) {
    return (key_end(row + kBlockM - 1, sequence) - 1) / kBlockN - key / kBlockN;
}
