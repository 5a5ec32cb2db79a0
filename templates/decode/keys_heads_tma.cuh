// How the decode kernel loads the keys of several heads together by TMA, from sm_90 on. The rows of
// a key's heads mostly lie one after the other. The launch's tensor maps take them as one row of
// the tensor, so that boxes have whole lines of 128 bytes (keys_heads.cuh tells what rows of one
// head cost). keys_tma.cuh has the same interface.
//
// Each stage of a team's ring has two barriers. `full` counts the bytes of the stage's K and V.
// Each warp arrives at `empty` when it has read the rows of its head. The warps of a team load
// blocks in rotation: the warp that loads a block waits until the others have read the block that
// it overwrites. So a warp does not wait for the slowest one in each block. With more than two
// stages the warp loads after the scores of the next block, when the others have mostly read the
// block that it overwrites.
//
// Where the rows of heads lie apart, or a CTA has heads that do not exist, each warp copies the
// rows of its own head by cp.async.

#include "decode/teams.cuh"
#include "device/attention/key_boxes.cuh"
#include "device/ptx/cp_async.cuh"
#include "device/ptx/mbarrier.cuh"
#include "device/schedule/team.cuh"

// A stage's tile of all heads, whose rows have the columns of one head after the other. `place`
// gives chunks of the calling warp's head, which may begin anywhere in a box.
template <int kRows_, int kCols_>
struct HeadsTile {
    using All = BoxedTile<kRows_, kHeads * kCols_>;
    static constexpr int kRows = kRows_, kCols = kCols_;
    static constexpr int kBytes = All::kBytes;
    static constexpr bool kMoves = false;  // columns are not reached by `moved`
    static_assert(kCols % 8 == 0, "rows are whole chunks");

    // As All::place, with unsigned numbers. The part that does not depend on the stage is added
    // separately, so that the compiler can compute it once.
    static __device__ __forceinline__ uint32 place(uint32 tile, uint32 row, uint32 chunk) {
        const uint32 at = threadIdx.x / 32 % kHeads * (kCols / 8) + chunk;
        return tile + (row * kBoxRowBytes + ((at ^ row) & 7) * 16 + at / 8 * All::kBoxBytes);
    }
    static __device__ __forceinline__ uint32 part(uint32 tile, int row, int) { return tile + row * kBoxRowBytes; }
};
using TileK = HeadsTile<kBlockN, key_cols(kHeadDim)>;
using TileV = HeadsTile<kBlockN, key_cols(kWarpCols)>;
constexpr int kRingAlignment = 1024;                // bytes: where the swizzle's pattern begins
constexpr int kRingBarrierBytes = kNumStages * 16;  // of a team
constexpr bool kSharesBoxes = false;
constexpr bool kRefillsLate = kNumStages > 2;

static_assert(kHeadWarps == 1 && kTransposes && !kModifiesScores && kMostRows == 0, "a warp has all rows of its head");
static_assert(kKeyBoxRows == kLaunchBoxRows, "src/family computes the same");
static_assert(kKeyBoxRows % 8 == 0, "a box begins where the swizzle's pattern does");
static_assert(kVec == 8, "what TMA demands of addresses and strides");
static_assert(kBlockN <= 32, "a lane of a warp that copies its own head has at most one key of a block");

// The tensors that keys come from.
struct KeySource {
    const TensorMap &map_k, &map_v;
};

// The rows of one head, which a warp copies by itself.
template <class Tile>
struct HeadRows {
    const uint16* row;  // row 0, of the sequence or of page 0

    __device__ __forceinline__ HeadRows(const KernelParams& params, const TensorView& view, const Sequence& sequence, int head_kv)
        : row(static_cast<const uint16*>(view.data) + place_of_keys(params, view, sequence, min(head_kv, params.num_heads_kv - 1))) {}

    // Copies one key, or writes zeros.
    __device__ __forceinline__ void copy(uint32 tile, int key, int64 place, bool is_valid) const {
        #pragma unroll 1
        for (int chunk = 0; chunk < Tile::kCols / 8; ++chunk) cp_async<16>(Tile::place(tile, key, chunk), row + place + chunk * 8, is_valid);
    }
};

// The blocks of a walk, as one team's ring takes them.
class Keys {
    const KernelParams& params;
    const KeySource& source;
    const Sequence& sequence;
    const ThreadPlace& place;
    const TeamRing& ring;
    const int head_kv;
    const bool is_packed;  // TMA copies the rows of all heads
    MapRows rows_k, rows_v;
    BlockPages pages;  // of the next block
    BlockWalk next;    // its block is loaded next, by this warp
    int stage = 0;
    uint32 parity = 0;   // of the stage's `full` when the acquired block has arrived
    int turn = 0;        // blocks that other warps load before this warp loads one
    int acquired = 0;    // with kRefillsLate in place of `turn`: the block that was acquired last

    __device__ __forceinline__ uint32 full(int slot) const { return ring.barriers + slot * 16; }
    __device__ __forceinline__ uint32 empty(int slot) const { return ring.barriers + slot * 16 + 8; }

    // A warp's own head, by cp.async.
    __device__ __forceinline__ void copy_head(int slot) {
        const int key = place.lane;
        if (kBlockN == 32 || key < kBlockN) {
            const bool is_valid = !next.is_past() && key < sequence.seqlen_k - next.block * kBlockN;
            const auto at = [&](const TensorView& view) {
                if (!is_valid) return int64(0);
                return place_of_key(params, view, sequence, next.block * kBlockN + key);
            };
            HeadRows<TileK>(params, params.k, sequence, head_kv + place.head).copy(ring.k + slot * TileK::kBytes, key, at(params.k), is_valid);
            HeadRows<TileV>(params, params.v, sequence, head_kv + place.head).copy(ring.v + slot * TileV::kBytes, key, at(params.v), is_valid);
        }
        cp_async_commit();
        next.advance();
    }

    // The next block of this warp, by TMA.
    __device__ __forceinline__ void load_boxes_of(int slot) {
        if (!next.is_past()) {
            const bool issues = place.lane == 0;
            if (issues) barrier_expect(full(slot), TileK::kBytes + TileV::kBytes);
            const int group = head_kv / kHeads;
            load_boxes<TileK::All>(ring.k + slot * TileK::kBytes, source.map_k, full(slot), pages, next.block, group, rows_k, issues);
            load_boxes<TileV::All>(ring.v + slot * TileV::kBytes, source.map_v, full(slot), pages, next.block, group, rows_v, issues);
        }
        next.block += kTeams * kTeamWarps;
        pages.fetch(next.block, next.end_of_pages(), place.lane);
    }

    // Loads the slot if it is this warp's turn. kWaits: others may still read the slot's block.
    template <bool kWaits>
    __device__ __forceinline__ void load_in_turn(int slot, uint32 parity_of_empty) {
        if (turn == 0) {
            if constexpr (kWaits) barrier_wait(empty(slot), parity_of_empty);
            load_boxes_of(slot);
            turn = kTeamWarps;
        }
        --turn;
    }

    // With kRefillsLate: loads the block kNumStages - 1 ahead of the acquired one, if it is this
    // warp's, into the slot of the block before, which others may still read.
    __device__ __forceinline__ void refill() {
        if (next.block != acquired + (kNumStages - 1) * kTeams) return;
        const int slot = stage == 0 ? kNumStages - 1 : stage - 1;
        barrier_wait(empty(slot), parity ^ (stage == 0 ? 1 : 0));
        load_boxes_of(slot);
    }

public:
    __device__ __forceinline__ Keys(const KernelParams& params, const KeySource& source, const Sequence& sequence, int head_kv,
                                    const KeyBlocks& blocks, const TeamRing& ring, const ThreadPlace& place)
        : params(params), source(source), sequence(sequence), place(place), ring(ring), head_kv(head_kv),
          is_packed(params.k.stride_head == TileK::kCols && params.v.stride_head == TileV::kCols && head_kv + kHeads <= params.num_heads_kv),
          pages(params, sequence), next(blocks, place.team) {
        if (is_packed) {
            turn = place.head;
            next.block += kTeams * place.head;
            pages.fetch(next.block, next.end_of_pages(), place.lane);
        }
    }

    // Makes the team's barriers.
    __device__ __forceinline__ void start(bool makes_barriers) {
        if (!is_packed) return;
        if (makes_barriers) {
            for (int slot = 0; slot < kNumStages; ++slot) barrier_init(full(slot), 1), barrier_init(empty(slot), kTeamWarps);
            barrier_init_done();
        }
        sync_team<kTeamWarps>(place.team);  // the barriers are ready before the first copies count on them
        rows_k = map_rows_k(params, sequence, params.map_rows_k), rows_v = map_rows_k(params, sequence, params.map_rows_v);
    }
    // Starts the copy of the next block into a slot that was never in use.
    __device__ __forceinline__ void load(int slot) {
        if (!is_packed) {
            copy_head(slot);
        } else if constexpr (kRefillsLate) {
            if (slot % kTeamWarps == place.head) load_boxes_of(slot);
            // Its last slot is free, too.
            constexpr int kLast = kNumStages - 1;
            if (slot == kLast - 1 && kLast % kTeamWarps == place.head) load_boxes_of(kLast);
        } else {
            load_in_turn<false>(slot, 0);
        }
    }
    // Returns when this thread's copies of Q have arrived.
    __device__ __forceinline__ void wait_for_q() const {
        if (is_packed) cp_async_wait<0>();
        else cp_async_wait<kNumStages - 1>();
    }

    // Returns when the block lies in its tiles. Without kRefillsLate it refills the tiles of the
    // block before.
    __device__ __forceinline__ void acquire(int block) {
        const int before = stage == 0 ? kNumStages - 1 : stage - 1;
        if (!is_packed) {
            cp_async_wait<kNumStages - 2>();
            __syncwarp();  // the other lanes' copies have arrived, and all lanes have read the block before
            copy_head(before);
            return;
        }
        // The first block has none before it. A fresh barrier lets a wait for parity 1 pass.
        if constexpr (!kRefillsLate) load_in_turn<true>(before, parity ^ (stage == 0 ? 1 : 0));
        acquired = block;
        barrier_wait(full(stage), parity);
        const int keys_left = sequence.seqlen_k - block * kBlockN;
        if (kPageSize > 0 && keys_left < kBlockN) {
            // A weight of 0 cancels whatever a page holds behind the last key, except NaN and inf.
            for (int row = keys_left + place.lane / 8; row < kBlockN; row += 4) {
                for (int chunk = place.lane % 8; chunk < TileV::kCols / 8; chunk += 8) store_zeros(TileV::place(v(), row, chunk));
            }
            __syncwarp();
        }
    }
    // Refills the tiles of the block before, if `acquire` did not. The scores of the acquired block
    // are there.
    __device__ __forceinline__ void refill_behind_scores() {
        if constexpr (kRefillsLate) {
            if (is_packed) refill();
        }
    }
    // The tiles of the acquired block that the warp's head has.
    __device__ __forceinline__ uint32 k() const { return ring.k + stage * TileK::kBytes; }
    __device__ __forceinline__ uint32 v() const { return ring.v + stage * TileV::kBytes; }
    // On to the next block. The team's next load frees this one's tiles.
    __device__ __forceinline__ void release() {
        if (is_packed) {
            __syncwarp();  // all lanes have read the block
            if (place.lane == 0) barrier_arrive(empty(stage));
        }
        stage = stage == kNumStages - 1 ? 0 : stage + 1;
        if (stage == 0) parity ^= 1;
    }
};
