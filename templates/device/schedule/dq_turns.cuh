// The order in which tiles of keys add to dQ in deterministic backward passes. The tile with the
// last keys adds first, so every run gives the same bits. Backward kernels wait and signal through
// this file, and backward_delta sets all counters to zero. It knows no pipeline and no layout of
// dQ.
//
// A turn is a tile's right to add to one block of query rows. For each query head, one counter for
// each block of query rows holds the number of finished additions. A tile waits for the additions
// of all tiles behind its own, and ends its turn when its own additions have arrived. turns_before
// gives the number of tiles behind. A tile behind one that meets a block of rows meets the block
// too, unless it lies behind the last key that the block sees.
//
// The last tile goes first because of the causal mask, under which a tile begins with the rows at
// its own diagonal. Tiles that begin together are then a tile's rows apart, and the ones behind are
// ahead.
//
// No tile waits for ever. A CTA draws its tiles by ticket while it runs, the first one too, and
// only when it needs one. A head's tiles descend as tickets ascend. The CTA with the last
// unfinished tile therefore has nothing else to do first, and no tile to wait for. A static
// schedule could deadlock. A CTA that never starts, for example because SMs are set aside for other
// work, would keep its tile. The CTAs that hold the SMs would wait for that tile.

#include "device/ptx/global.cuh"

// The number of tickets drawn so far. The pointer is null if there are no queries. backward_delta,
// which sets counters to zero, does not run then, and no tile has a block to wait at.
__device__ __forceinline__ uint32* ticket_counter(const KernelParams& params) { return params.seqlen_q > 0 ? params.turns : nullptr; }

// The counter of the block of query rows that begins with this row tile of the dQ accumulator. Row
// tiles are numbered over all heads.
__device__ __forceinline__ uint32* turn_counter(const KernelParams& params, int64 row_tile) { return params.turns + 1 + row_tile; }

// Waits until a counter has reached `additions`. The acquire orders the counted additions before
// this thread's own.
__device__ __forceinline__ void wait_for_turn(const uint32* counter, uint32 additions) {
    while (load_acquire(counter) < additions) {}
}

// Counts one addition. One thread calls it, after a barrier with the threads that have added. The
// release orders their additions before the count.
__device__ __forceinline__ void end_turn(uint32* counter) {
    count_up_release(counter);
}

// The number of tiles of kBlockN keys behind the tile that begins at `key`, as far as they meet the
// block of kBlockM query rows that begins at `row`. Both indices are absolute within the sequence.
template <int kBlockM, int kBlockN>
__device__ __forceinline__ int turns_before(int key, int row, const Sequence& sequence) {
    return (key_end(row + kBlockM - 1, sequence) - 1) / kBlockN - key / kBlockN;
}
