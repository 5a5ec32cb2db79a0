// How the decode kernel loads keys without TMA: each thread of a team copies a share of a block by
// cp.async, from rows or from pages of any size. keys_tma.cuh has the same interface.

#include "decode/cp_async_ring.cuh"
#include "device/attention/copy_keys.cuh"

// A stage's tiles: padded rows, without a swizzle.
using TileK = Tile<kBlockN, key_cols(kHeadDim)>;
using TileV = Tile<kBlockN, key_cols(kWarpCols * kWarpsV)>;
constexpr bool kSharesBoxes = false;

// Row 0 of a head, of the sequence or of page 0.
struct KeyRows {
    const uint16 *k, *v;

    __device__ __forceinline__ KeyRows(const KernelParams& params, const Sequence& sequence, int head_kv)
        : k(static_cast<const uint16*>(params.k.data) + place_of_keys(params, params.k, sequence, head_kv)),
          v(static_cast<const uint16*>(params.v.data) + place_of_keys(params, params.v, sequence, head_kv)) {}
};

// The blocks of a walk, as one team's ring takes them.
class Keys : public CpAsyncRing<Keys> {
    const KernelParams& params;
    const Sequence& sequence;
    const ThreadPlace& place;
    const TeamRing& ring;
    const KeyRows rows;
    BlockPages pages;  // of the next block
    BlockWalk next;           // its block is loaded next

public:
    // Starts the copy of the next block. Past the last block it writes zeros.
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
        : CpAsyncRing(place.team), params(params), sequence(sequence), place(place), ring(ring), rows(params, sequence, head_kv),
          pages(params, sequence), next(blocks, place.team) {
        pages.fetch(next.block, next.end_of_pages(), place.lane);
    }

    // The tiles of the acquired block.
    __device__ __forceinline__ uint32 k() const { return ring.k + stage * TileK::kBytes; }
    __device__ __forceinline__ uint32 v() const { return ring.v + stage * TileV::kBytes; }
};
