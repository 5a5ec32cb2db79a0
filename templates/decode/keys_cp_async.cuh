// How the decode kernel loads keys without TMA: each thread of a team copies a share of a block by
// cp.async, from rows or from pages of any size. keys_tma.cuh has the same interface.
//
// A block of the ring is one cp.async group of each thread. A thread waits for its own groups, and
// the team's barrier then says that the other threads' groups have arrived.

#include "decode/teams.cuh"
#include "device/attention/copy_keys.cuh"
#include "device/schedule/team.cuh"

// A stage's tiles: padded rows, without a swizzle.
using TileK = Tile<kBlockN, key_cols(kHeadDim)>;
using TileV = Tile<kBlockN, key_cols(kWarpCols * kWarpsV)>;
constexpr bool kSharesBoxes = false;
constexpr int kRingAlignment = 16;    // bytes
constexpr int kRingBarrierBytes = 0;  // groups of cp.async need no barriers

// The tensors that keys come from.
struct KeySource {};

// Row 0 of a head, of the sequence or of page 0.
struct KeyRows {
    const uint16 *k, *v;

    __device__ __forceinline__ KeyRows(const KernelParams& params, const Sequence& sequence, int head_kv)
        : k(static_cast<const uint16*>(params.k.data) + place_of_keys(params, params.k, sequence, head_kv)),
          v(static_cast<const uint16*>(params.v.data) + place_of_keys(params, params.v, sequence, head_kv)) {}
};

// The blocks of a walk, as one team's ring takes them.
class Keys {
    const KernelParams& params;
    const Sequence& sequence;
    const ThreadPlace& place;
    const TeamRing& ring;
    const KeyRows rows;
    KeyPages<kBlockN> pages;  // of the next block
    BlockWalk next;           // its block is loaded next
    int stage = 0;

public:
    // Starts the copy of the next block. Past the last block it writes zeros, so that every step
    // has its group.
    __device__ __forceinline__ void load(int slot) {
        const int keys_left = next.is_past() ? 0 : sequence.seqlen_k - next.block * kBlockN;
        copy_keys<TileK, kTeamThreads>(ring.k + slot * TileK::kBytes, rows.k, params.k, pages, next.block, keys_left, key_cols(kHeadDim), place.in_team());
        copy_keys<TileV, kTeamThreads>(ring.v + slot * TileV::kBytes, rows.v, params.v, pages, next.block, keys_left, key_cols(kHeadDimV), place.in_team());
        cp_async_commit();
        next.advance();
        pages.fetch(next.block, next.end_of_pages(), place.lane);
    }

    __device__ __forceinline__ Keys(const KernelParams& params, const KeySource&, const Sequence& sequence, int head_kv,
                                    const KeyBlocks& blocks, const TeamRing& ring, const ThreadPlace& place)
        : params(params), sequence(sequence), place(place), ring(ring), rows(params, sequence, head_kv), pages(params, sequence), next(blocks, place.team) {
        pages.fetch(next.block, next.end_of_pages(), place.lane);
    }

    // Groups of cp.async need no preparation. Q's group comes before the keys'.
    __device__ __forceinline__ void start(bool) {}
    // Returns when this thread's copies of Q have arrived.
    __device__ __forceinline__ void wait_for_q() const { cp_async_wait<kNumStages - 1>(); }

    // Returns when the block lies in its tiles, and refills the tiles of the block before.
    __device__ __forceinline__ void acquire(int) {
        cp_async_wait<kNumStages - 2>();
        // The other threads' copies of this block have arrived, and the team has read the block
        // before, whose tiles the next load overwrites.
        sync_team<kTeamWarps>(place.team);
        load(stage == 0 ? kNumStages - 1 : stage - 1);
    }
    // The tiles of the acquired block.
    __device__ __forceinline__ uint32 k() const { return ring.k + stage * TileK::kBytes; }
    __device__ __forceinline__ uint32 v() const { return ring.v + stage * TileV::kBytes; }
    // On to the next block. The next `acquire` frees this one's tiles.
    __device__ __forceinline__ void release() { stage = stage == kNumStages - 1 ? 0 : stage + 1; }
};
