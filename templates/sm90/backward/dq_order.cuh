// Where in the accumulator the dQ of a block of queries is added, and, in a deterministic pass, in
// which order tiles add to it (device/schedule/dq_turns.cuh).
//
// A consumer adds a block's dQ one block late, when all consumers' dS is there. So this holds the
// place of the block before, and the place that the tile has added to last, whose turn has to end.

#include "device/layout/dq_accum.cuh"
#include "device/ptx/tma.cuh"
#include "device/schedule/dq_turns.cuh"

// kWarps: warps of all consumers that count an addition to a block.
template <int kWarps>
struct DqOrder {
    int64 offset = 0;  // of the block before, in its accumulator, in floats
    // The first tile of rows in the accumulator of the block before, and of the one before that, to
    // which this tile has added. An int holds their number: 2^31 of them take a terabyte.
    int rows_before = 0, rows_added = -1;
    uint32 additions_before;  // by other tiles, before it is this one's turn

    __device__ __forceinline__ DqOrder(const Sequence& sequence, const Tile& tile, int block)
        : additions_before(kIsDeterministic ? uniform(additions_of(sequence, tile, block)) : 0) {}

    static __device__ __forceinline__ uint32 additions_of(const Sequence& sequence, const Tile& tile, int block) {
        return uint32(turns_before<kBlockM, kBlockN>(tile.first, block * kBlockM, sequence) * kWarps);
    }
    // Once dS of `block` is stored: its dQ comes next.
    __device__ __forceinline__ void set(const KernelParams& params, const Sequence& sequence, const Tile& tile, int head, int block) {
        const int64 rows = dq_row_tile(sequence.workspace_row(params, head)) + block * (kBlockM / kDqTileRows);
        offset = rows * (kDqTiles * 128);
        if constexpr (kIsDeterministic) rows_before = int(rows);
        if constexpr (kIsDeterministic && kIsCausal) additions_before = additions_of(sequence, tile, block);
    }
    // Before the additions. All warps wait: a branch around the loop would serialise the product
    // that runs (ptxas, C7520).
    __device__ __forceinline__ void wait(const KernelParams& params) const {
        if constexpr (kIsDeterministic) wait_for_turn(turn_counter(params, rows_before), additions_before);
    }
    // After them.
    __device__ __forceinline__ void added() { rows_added = rows_before; }
    // A product after the additions, which have arrived by then or do so while it runs. `has_dq`:
    // the warp has columns of dQ.
    template <bool kByCopies>
    __device__ __forceinline__ void end(const KernelParams& params, bool has_dq, int lane) const {
        if constexpr (kIsDeterministic) {
            __syncwarp();  // the whole warp has added
            if (kByCopies && lane == 0) bulk_wait();  // this warp's copies have arrived
            if (has_dq && lane == 0 && rows_added >= 0) end_turn(turn_counter(params, rows_added));
        }
    }
};
