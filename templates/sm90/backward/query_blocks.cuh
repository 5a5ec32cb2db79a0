// A consumer's walk through the blocks of query rows that meet a tile of keys, for all query heads
// of the GQA group: the same blocks in the same order as the producer loads them.
//
// Without a block mask the order follows from the tile (device/schedule/group_walk.cuh). Under a
// block mask the producer reads the lists and passes each block's number on beside Q's slot.

#include "device/attention/block_range.cuh"
#include "device/schedule/group_walk.cuh"
#include "device/schedule/listed_slots.cuh"

// Whether a block needs a mask, known at run time. Bool says it at compile time.
struct MaybeMasked { bool value; };

struct QueryBlocks {
    // Broadcast from a lane, these are known to be uniform, and leave the registers to the
    // accumulators.
    const int full_begin, full_end;  // blocks in between need no mask for the sake of their rows
    bool is_full = false;            // under a block mask: the mask leaves no score of the block out
    GroupWalk walk;                  // its head counts the query heads of all sequences
    int left;                        // blocks, this one too

    __device__ __forceinline__ QueryBlocks(const KernelParams& params, const Tile& tile, const BlockRange& range)
        : full_begin(uniform(range.full_begin)), full_end(uniform(range.full_end)),
          walk(uniform(tile.batch * params.num_heads_q + tile.head * params.group_size), params.group_size, uniform(range.begin), uniform(range.end), kMaySplit ? uniform(tile.begin) : 0,
               kAlternates && uniform(tile.begin) > 0),
          left(uniform(tile.blocks)) {}

    __device__ __forceinline__ int block() const { return walk.block; }
    __device__ __forceinline__ int batch_head() const { return walk.head; }
    // The query head within the sequence.
    __device__ __forceinline__ int head(const KernelParams& params, const Tile& tile) const { return walk.head - tile.batch * params.num_heads_q; }
    // Under a block mask: reads which block comes next, once its Q is there.
    template <class Memory, class RingQ>
    __device__ __forceinline__ void read_listed(const KernelParams& params, const Tile& tile, const Memory& smem, const RingQ& ring_q) {
        if constexpr (!kHasBlockMask) return;
        barrier_wait(smem.full_q(ring_q.slot), ring_q.parity);
        const ListedSlots::Entry entry = smem.listed.get(ring_q.slot);
        walk.block = entry.tile, walk.head = tile.batch * params.num_heads_q + entry.head, is_full = entry.is_full;
    }
    __device__ __forceinline__ void advance() {
        --left;
        if constexpr (!kHasBlockMask) walk.advance();
    }
    // Calls `step(first, masked, is_tail)` for each block; the step calls advance(). The first
    // block is masked, and each block whose rows may not see all keys of the tile. With kSharesStep
    // later blocks share the code of one step, to which `masked` is MaybeMasked. A later block with
    // up to kTailRows rows left is a tail. The condition stands in the branch: a function that
    // returns it makes the kernels spill more.
    template <int kTailRows = 0, bool kSharesStep = false, class Memory, class RingQ, class Step>
    __device__ __forceinline__ void for_each(const KernelParams& params, const Sequence& sequence, const Tile& tile, const Memory& smem, const RingQ& ring_q, const Step& step) {
        const bool is_cut = tile.first + kBlockN > sequence.seqlen_k;  // the sequence ends in the tile
        read_listed(params, tile, smem, ring_q);
        step(Bool<true>{}, Bool<true>{}, Bool<false>{});
        while (left > 0) {
            read_listed(params, tile, smem, ring_q);
            if (kTailRows > 0 && walk.block * kBlockM + kTailRows >= sequence.seqlen_q) {
                step(Bool<false>{}, Bool<true>{}, Bool<(kTailRows > 0)>{});
            } else if constexpr (kSharesStep) {
                step(Bool<false>{}, MaybeMasked{is_cut || (kHasWindow && walk.block >= full_end)}, Bool<false>{});
            } else if (is_cut || (kIsCausal && walk.block < full_begin) || (kHasWindow && walk.block >= full_end)) {
                step(Bool<false>{}, Bool<true>{}, Bool<false>{});
            } else {
                step(Bool<false>{}, Bool<false>{}, Bool<false>{});
            }
        }
    }
};
