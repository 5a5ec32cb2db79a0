// The shared memory of sm90_backward_middle: sizes of tiles, addresses of slots and barriers.
//
// Tiles come first, then statistics, then barriers. The producer fills K, V and the blocks of Q and
// dO (load.cuh), and the consumers empty them. P, dS and dQ pass between consumers.

#include "device/layout/tensor_map.cuh"
#include "device/ptx/mbarrier.cuh"
#include "device/schedule/listed_slots.cuh"
#include "device/schedule/tile_slots.cuh"

constexpr int kBytesBoxN = kBlockN * kBoxRowBytes, kBytesBoxM = kBlockM * kBoxRowBytes;
constexpr int kBytesK = kBoxesK * kBytesBoxN, kBytesV = kBoxesV * kBytesBoxN;
constexpr int kBytesQ = kBoxesK * kBytesBoxM, kBytesDo = kBoxesV * kBytesBoxM;
constexpr int kBytesP = kConsumers * kBytesBoxM;               // or dS: [query][keys], a box of 64 keys for each consumer's kKeys
constexpr int kBytesStats = kBlockM * 4;                       // LSE or delta of a block
constexpr int kBytesDq = kBoxesK > 3 ? 0 : 8 * 128 * 4;        // a warp's part of dQ on its way out: 16 rows of a box of columns; unused where there is one box
constexpr int kTileBytes = kBytesK + kBytesV + 2 * (kBytesQ + kBytesStats) + kDoStages * (kBytesDo + kBytesStats) + 3 * kBytesP + kConsumers * 4 * kBytesDq;
constexpr int kBarrierBytes = 1024;
// All operands are boxes of 64 columns with the 128-byte swizzle (layout/swizzle.cuh).
struct Shared {
    uint32 k;      // [box][kBlockN keys], from a tile's first block to its last
    uint32 v;      // the same
    uint32 q;      // [2][box][64 queries], for one block
    uint32 dout;   // [kDoStages][box][64 queries], for one block
    uint32 p;      // [consumer][64 queries][kKeys keys], for one block; at a tile's end a box of dK or dV on its way out
    uint32 ds;     // [2][consumer][64 queries][kKeys keys], for one block and the products of the next
    uint32 dq;     // [consumer][warp][8 tiles][128] floats, no swizzle: a warp's part of dQ on its way out
    uint32 lse;    // [2][64] floats, with Q
    uint32 delta;  // [kDoStages][64] floats, with dO
    uint32 barriers, ds_barriers;
    TileSlots tiles;
    ListedSlots listed;  // beside Q's slots

    __device__ __forceinline__ explicit Shared(uint32 memory)
        : k((memory + 1023) & ~1023u), v(k + kBytesK), q(v + kBytesV), dout(q + 2 * kBytesQ), p(dout + kDoStages * kBytesDo),
          ds(p + kBytesP), dq(ds + 2 * kBytesP), lse(dq + kConsumers * 4 * kBytesDq), delta(lse + 2 * kBytesStats),
          barriers(delta + kDoStages * kBytesStats), ds_barriers(barriers + (8 + 2 * kDoStages) * 8),
          tiles{(ds_barriers + 4 * 8 + 15) & ~15u}, listed{tiles.base + TileSlots::kBytes} {}

    // full: a copy has arrived (one arrival and its bytes). empty: every consumer is done with
    // the slot.
    __device__ __forceinline__ uint32 full_k(int) const { return barriers; }
    __device__ __forceinline__ uint32 empty_k(int) const { return barriers + 8; }
    __device__ __forceinline__ uint32 full_v(int) const { return barriers + 16; }
    __device__ __forceinline__ uint32 empty_v(int) const { return barriers + 24; }
    // With LSE and delta, which every consumer warp reads by itself: empty when each of these warps
    // is done.
    __device__ __forceinline__ uint32 full_q(int slot) const { return barriers + (4 + slot) * 8; }
    __device__ __forceinline__ uint32 empty_q(int slot) const { return barriers + (6 + slot) * 8; }
    __device__ __forceinline__ uint32 full_do(int slot) const { return barriers + (8 + slot) * 8; }
    __device__ __forceinline__ uint32 empty_do(int slot) const { return barriers + (8 + kDoStages + slot) * 8; }
    // full: both consumers have written dS. empty: both have multiplied with it.
    __device__ __forceinline__ uint32 full_ds(int slot) const { return ds_barriers + slot * 8; }
    __device__ __forceinline__ uint32 empty_ds(int slot) const { return ds_barriers + (2 + slot) * 8; }

    // By one thread, before all others go on.
    __device__ __forceinline__ void init_barriers() const {
        barrier_init(full_k(0), 1), barrier_init(full_v(0), 1), barrier_init(empty_k(0), kConsumers), barrier_init(empty_v(0), kConsumers);
        for (int slot = 0; slot < 2; ++slot) barrier_init(full_q(slot), 1), barrier_init(empty_q(slot), kConsumers * 4);
        for (int slot = 0; slot < kDoStages; ++slot) barrier_init(full_do(slot), 1), barrier_init(empty_do(slot), kConsumers * 4);
        for (int slot = 0; slot < 2; ++slot) barrier_init(full_ds(slot), kConsumers), barrier_init(empty_ds(slot), kConsumers);
        tiles.init(kConsumers * 4);
        barrier_init_done();
    }
};
static_assert(1024 + kTileBytes + kBarrierBytes == kLaunchBytes && kThreads == kLaunchThreads, "src/family/sm90 computes the same");
static_assert((4 + 4 + 2 * kDoStages + 4) * 8 + 16 + TileSlots::kBytes + 2 * ListedSlots::kSlotBytes <= kBarrierBytes, "barriers and slots");
