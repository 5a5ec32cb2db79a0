// A CTA's shared memory in sm90_backward_wide: sizes of tiles, addresses of slots and barriers.
//
// Tiles come first, then statistics, then barriers. The producers of both CTAs of a cluster fill
// the blocks of Q and dO (load.cuh). P and dS pass between consumers, dS to the other CTA, too.

#include "device/layout/tensor_map.cuh"
#include "device/ptx/mbarrier.cuh"
#include "device/schedule/cluster.cuh"
#include "device/schedule/listed_slots.cuh"
#include "device/schedule/tile_slots.cuh"

constexpr int kKeys = 64;                                       // of this CTA
constexpr int kBytesBoxN = kKeys * kBoxRowBytes, kBytesBoxM = kBlockM * kBoxRowBytes;
constexpr int kBytesK = kBoxesK * kBytesBoxN, kBytesV = kBoxesV * kBytesBoxN;
constexpr int kBytesOtherK = kHalfK * kBytesBoxN;               // the other CTA's keys, this one's half of the columns
constexpr int kBytesQ = kBoxesK * kBytesBoxM, kBytesDo = kBoxesV * kBytesBoxM;
constexpr int kBytesP = kBytesBoxM;                             // [query][64 keys]
constexpr int kBytesStats = kBlockM * 4;                        // LSE or delta of a block
constexpr int kTileBytes = kBytesK + kBytesOtherK + kBytesV + 2 * kBytesQ + kDoStages * kBytesDo + 4 * kBytesP + (2 + kDoStages) * kBytesStats;
constexpr int kBarrierBytes = 1024;
// All operands are boxes of 64 columns with the 128-byte swizzle (layout/swizzle.cuh).
struct Shared {
    uint32 k;         // [box][kKeys keys], from a tile's first block to its last
    uint32 other_k;   // [kHalfK boxes][kKeys keys] of the other CTA, for as long: this CTA's half of the columns
    uint32 v;         // [box][kKeys keys], for as long
    uint32 q;         // [2][box][kBlockM queries], for one block and the products of the next
    uint32 dout;      // [kDoStages][box][kBlockM queries], for one block
    // [2][kBlockM queries][kKeys keys]: P, with dropout negative where a weight is dropped, then dS
    // in its place, until it has been multiplied.
    uint32 ds;
    uint32 other_ds;  // the same of the other CTA's keys
    uint32 lse;       // [2][kBlockM] floats, with Q
    uint32 delta;     // [kDoStages][kBlockM] floats, with dO
    uint32 barriers;
    ClusterTileSlots tiles;
    ListedSlots listed;  // beside Q's slots

    __device__ __forceinline__ explicit Shared(uint32 memory)
        : k((memory + 1023) & ~1023u), other_k(k + kBytesK), v(other_k + kBytesOtherK), q(v + kBytesV), dout(q + 2 * kBytesQ),
          ds(dout + kDoStages * kBytesDo), other_ds(ds + 2 * kBytesP),
          lse(other_ds + 2 * kBytesP), delta(lse + 2 * kBytesStats), barriers(delta + kDoStages * kBytesStats),
          tiles{{(full_p(0) + 64 + 15) & ~15u}}, listed{tiles.own.base + TileSlots::kBytes} {}

    // full: a copy has arrived (one arrival and its bytes). empty: all who read the slot are done
    // with it.
    __device__ __forceinline__ uint32 full_k(int) const { return barriers; }
    __device__ __forceinline__ uint32 empty_k(int) const { return barriers + 8; }
    __device__ __forceinline__ uint32 full_v(int) const { return barriers + 16; }
    __device__ __forceinline__ uint32 empty_v(int) const { return barriers + 24; }
    // With LSE and delta. Copies go to both CTAs: empty when the consumers of both are done.
    __device__ __forceinline__ uint32 full_q(int slot) const { return barriers + (4 + slot) * 8; }
    __device__ __forceinline__ uint32 empty_q(int slot) const { return barriers + (6 + slot) * 8; }
    // The two shares of dO's boxes have their own: consumer 0 is done with the first one early.
    // Delta comes with the first.
    __device__ __forceinline__ uint32 full_do(int slot, uint32 share) const { return barriers + (8 + slot * 2 + share) * 8; }
    __device__ __forceinline__ uint32 empty_do(int slot, uint32 share) const { return full_do(kDoStages + slot, share); }
    // full: consumer 0's warps have written P.
    __device__ __forceinline__ uint32 full_p(int slot) const { return barriers + (8 + 4 * kDoStages + slot) * 8; }
    // full: consumer 1's warps have written dS, or the other CTA's copy of its dS has arrived.
    // empty: the gradient consumers of both CTAs have multiplied with it.
    __device__ __forceinline__ uint32 full_ds(int slot) const { return full_p(0) + 16 + slot * 8; }
    __device__ __forceinline__ uint32 full_other_ds(int slot) const { return full_p(0) + 32 + slot * 8; }
    __device__ __forceinline__ uint32 empty_ds(int slot) const { return full_p(0) + 48 + slot * 8; }

    // By one thread, before all others of the cluster go on.
    __device__ __forceinline__ void init_barriers() const {
        barrier_init(full_k(0), 1), barrier_init(empty_k(0), 2), barrier_init(full_v(0), 1), barrier_init(empty_v(0), 1);
        // In both CTAs: the warps of consumer 0, one thread of consumer 2 (its warps under a block
        // mask), and the warps of consumer 1.
        for (int slot = 0; slot < 2; ++slot) barrier_init(full_q(slot), 1), barrier_init(empty_q(slot), 2 * (4 + (kHasBlockMask ? 4 : 1) + (kDsReadsQSlot ? 4 : 0)));
        for (int slot = 0; slot < kDoStages; ++slot) {
            barrier_init(full_do(slot, 0), 1), barrier_init(full_do(slot, 1), 1);
            // In both CTAs: one thread of consumer 0 and the warps of consumer 1; those warps.
            barrier_init(empty_do(slot, 0), 2 * (1 + 4)), barrier_init(empty_do(slot, 1), 2 * 4);
        }
        for (int slot = 0; slot < 2; ++slot) barrier_init(full_p(slot), 4), barrier_init(full_ds(slot), 4), barrier_init(full_other_ds(slot), 1), barrier_init(empty_ds(slot), 2);
        tiles.init(12);
        barrier_init_done();
    }
};
static_assert(1024 + kTileBytes + kBarrierBytes == kLaunchBytes && kThreads == kLaunchThreads, "src/family/sm90 computes the same");
static_assert((4 + 4 + 4 * kDoStages + 2 + 6) * 8 + 16 + TileSlots::kBytes + 2 * ListedSlots::kSlotBytes <= kBarrierBytes, "barriers and slots");
