// How the decode kernel loads keys by TMA, from sm_90 on: one lane of a team starts the copies of a
// block, from rows or from pages that hold whole boxes. keys_cp_async.cuh has the same interface.
//
// Each stage of a team's ring has a barrier, which counts the bytes of the stage's K and V.

#include "decode/teams.cuh"
#include "device/attention/key_boxes.cuh"
#include "device/ptx/mbarrier.cuh"
#include "device/schedule/team.cuh"

// A stage's tiles: boxes of 64 columns in the 128-byte swizzle.
using TileK = BoxedTile<kBlockN, key_cols(kHeadDim)>;
using TileV = BoxedTile<kBlockN, key_cols(kWarpCols * kWarpsV)>;
constexpr int kRingAlignment = 1024;               // bytes: where the swizzle's pattern begins
constexpr int kRingBarrierBytes = kNumStages * 8;  // of a team

// Whether several warps' columns of V lie in one box.
constexpr bool kSharesBoxes = kSharesScores && kWarpCols < kBoxCols;
static_assert(kWarpsV == 1 || kWarpCols % (kBoxCols * kKeyUnit) == 0 || kSharesBoxes && kBoxCols % kWarpCols == 0, "a warp's columns of V are whole boxes, or a part of one");
static_assert(kKeyBoxRows == kLaunchBoxRows, "src/family computes the same");
static_assert(kKeyBoxRows % 8 == 0, "a box begins where the swizzle's pattern does");
static_assert(kVec == 8, "what TMA demands of addresses and strides");

// The tensors that keys come from.
struct KeySource {
    const TensorMap &map_k, &map_v;
};

// The blocks of a walk, as one team's ring takes them.
class Keys {
    const KernelParams& params;
    const KeySource& source;
    const Sequence& sequence;
    const ThreadPlace& place;
    const TeamRing& ring;
    const int head_kv;
    MapRows rows_k, rows_v;
    BlockPages pages;  // of the next block
    BlockWalk next;           // its block is loaded next
    int stage = 0;
    uint32 parity = 0;  // of the stage's barrier when the acquired block has arrived

    bool issues;            // the thread that starts the team's copies

    __device__ __forceinline__ bool is_first_warp() const { return place.warp % kTeamWarps == 0; }

public:
    // Starts the copy of the next block; past the last block none.
    __device__ __forceinline__ void load(int slot) {
        if (!next.is_past() && is_first_warp()) {
            const uint32 barrier = ring.barriers + slot * 8;
            if (issues) barrier_expect(barrier, TileK::kBytes + TileV::kBytes);
            load_boxes<TileK>(ring.k + slot * TileK::kBytes, source.map_k, barrier, pages, next.block, head_kv, rows_k, issues);
            load_boxes<TileV>(ring.v + slot * TileV::kBytes, source.map_v, barrier, pages, next.block, head_kv, rows_v, issues);
        }
        next.advance();
        pages.fetch(next.block, next.end_of_pages(), place.lane);
    }

    __device__ __forceinline__ Keys(const KernelParams& params, const KeySource& source, const Sequence& sequence, int head_kv,
                                    const KeyBlocks& blocks, const TeamRing& ring, const ThreadPlace& place)
        : params(params), source(source), sequence(sequence), place(place), ring(ring), head_kv(head_kv),
          pages(params, sequence), next(blocks, place.team) {
        pages.fetch(next.block, next.end_of_pages(), place.lane);
    }

    // Makes the team's barriers, by the thread that will start its copies.
    __device__ __forceinline__ void start(bool starts_copies) {
        issues = starts_copies;
        if (issues) {
            for (int slot = 0; slot < kNumStages; ++slot) barrier_init(ring.barriers + slot * 8, 1);
            barrier_init_done();
        }
        __syncwarp();  // the barriers are ready before the first copies count on them
        rows_k = map_rows_k(params, sequence, params.map_rows_k), rows_v = map_rows_k(params, sequence, params.map_rows_v);
    }
    // Returns when this thread's copies of Q have arrived.
    __device__ __forceinline__ void wait_for_q() const { cp_async_wait<0>(); }

    // Returns when the block lies in its tiles, and refills the tiles of the block before.
    __device__ __forceinline__ void acquire(int block) {
        // The team has read the block before, whose tiles the next load overwrites.
        sync_team<kTeamWarps>(place.team);
        load(stage == 0 ? kNumStages - 1 : stage - 1);
        barrier_wait(ring.barriers + stage * 8, parity);
        const int keys_left = sequence.seqlen_k - block * kBlockN;
        if (kPageSize > 0 && keys_left < kBlockN) {
            clear_rows<TileV, kTeamThreads>(v(), keys_left, place.in_team());
            sync_team<kTeamWarps>(place.team);  // the zeros are there before another thread reads V
        }
    }
    // The tiles of the acquired block.
    __device__ __forceinline__ uint32 k() const { return ring.k + stage * TileK::kBytes; }
    __device__ __forceinline__ uint32 v() const { return ring.v + stage * TileV::kBytes; }
    // On to the next block. The next `acquire` frees this one's tiles.
    __device__ __forceinline__ void release() {
        stage = stage == kNumStages - 1 ? 0 : stage + 1;
        if (stage == 0) parity ^= 1;
    }
};
