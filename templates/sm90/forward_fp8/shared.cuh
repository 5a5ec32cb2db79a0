// The shared memory of the sm90 forward kernel for e4m3: sizes of tiles, addresses of slots and
// barriers.
//
// All tiles are boxes of 128 bytes, in the 128-byte swizzle (device/layout/swizzle.cuh). A box of
// Q, K or V has 128 columns of the head dim for each row. wgmma takes both operands of 8 bits with
// the inner dimension contiguous, which for P V is the keys. So each V block is transposed into a
// slot of V^T, whose boxes have 128 keys for each column of V (transpose.cuh). Without V slots the
// slots of V^T take images of V^T (images.cuh).
//
// The producer warpgroup fills slots and the consumers empty them. The two roles share nothing
// else.

#include "device/layout/round_up.cuh"
#include "device/layout/tensor_map.cuh"
#include "device/ptx/mbarrier.cuh"
#include "device/schedule/listed_slots.cuh"
#include "device/schedule/tile_slots.cuh"
#include "sm90/forward_fp8/images.cuh"

constexpr int kNarrowBoxCols = 128;  // of 8 bits in a row of a box

constexpr int kConsumers = kBlockM / 64;  // warpgroups of 64 query rows
constexpr int kThreads = 128 * (kConsumers + 1);
constexpr int kBoxesQK = (kHeadDim + kNarrowBoxCols - 1) / kNarrowBoxCols;
constexpr int kBoxesV = (kHeadDimV + kNarrowBoxCols - 1) / kNarrowBoxCols;
constexpr int kBoxesVt = (kBlockN + kNarrowBoxCols - 1) / kNarrowBoxCols;
constexpr int kBoxesO = (kHeadDimV + kBoxCols - 1) / kBoxCols;  // O has 16 bits

constexpr int kBytesQ = kBoxesQK * 64 * kBoxRowBytes;  // one warpgroup's rows
constexpr int kBytesK = kBoxesQK * kBlockN * kBoxRowBytes;
constexpr int kBytesV = kBoxesV * kBlockN * kBoxRowBytes;
constexpr int kVtRows = round_up(kHeadDimV, 16);
constexpr bool kReadsImages = kVStages == 0;
constexpr int kBytesVt = kReadsImages ? round_up(kImageBytes, 1024) : kBoxesVt * kVtRows * kBoxRowBytes;
constexpr int kBytesO = kStoresByTma ? kBoxesO * 64 * kBoxRowBytes : 0;  // one warpgroup's rows
constexpr int kTileBytes = kQStages * kConsumers * kBytesQ + kKStages * kBytesK + kVStages * kBytesV + kVtStages * kBytesVt + kConsumers * kBytesO;
constexpr int kBarriersKV = 2 * (kKStages + kVStages + kVtStages), kBarriersQ = 2 * kQStages * kConsumers;
constexpr int kAllBarriers = kBarriersKV + kBarriersQ;
constexpr int kBarrierBytes = 1024;
constexpr bool kStoresFromQ = false;  // no Q slot takes a tile's O; a slot of its own does with kStoresByTma
constexpr int kTransposers = 3;  // warps that transpose V; the fourth one of the producer warpgroup loads
constexpr int kProducers = kReadsImages ? 1 : kTransposers + 1;  // warps that take tiles

static_assert(1024 + kTileBytes + kBarrierBytes == kLaunchBytes && kThreads == kLaunchThreads,
              "src/family computes the same");
static_assert(kAllBarriers * 8 + 16 + TileSlots::kBytes + kKStages * ListedSlots::kSlotBytes <= kBarrierBytes,
              "barriers and slots");

struct Shared {
    uint32 q;         // [kQStages][kConsumers][box][64 rows]
    uint32 k;         // [kKStages][box][kBlockN keys]
    uint32 v;         // [kVStages][box][kBlockN keys]: a V block as it lies in device memory
    uint32 vt;        // [kVtStages][box][kVtRows columns]: the same, transposed
    uint32 o;         // [kConsumers][box][64 rows]: a tile's O on its way to device memory
    uint32 barriers;  // of K, V, V^T and Q: for each slot `full`, then for each slot `empty`
    TileSlots tiles;  // which tiles the CTA does, from the producer to the consumers
    ListedSlots listed_slots;  // under a block mask: which block each K slot holds

    __device__ __forceinline__ explicit Shared(const uint8* bytes) {
        // The 128-byte swizzle needs tiles at multiples of 1024 bytes.
        q = (shared_address(bytes) + 1023) & ~1023u;
        k = q + kQStages * kConsumers * kBytesQ;
        v = k + kKStages * kBytesK;
        vt = v + kVStages * kBytesV;
        o = vt + kVtStages * kBytesVt;
        barriers = o + kConsumers * kBytesO;
        tiles = {(barriers + kAllBarriers * 8 + 15) & ~15u};
        listed_slots = {tiles.base + TileSlots::kBytes};
    }
    __device__ __forceinline__ uint32 q_slot(int slot, int consumer) const { return q + (slot * kConsumers + consumer) * kBytesQ; }
    __device__ __forceinline__ uint32 o_slot(int consumer) const { return o + consumer * kBytesO; }
    __device__ __forceinline__ uint32 k_slot(int slot) const { return k + slot * kBytesK; }
    __device__ __forceinline__ uint32 v_slot(int slot) const { return v + slot * kBytesV; }
    __device__ __forceinline__ uint32 vt_slot(int slot) const { return vt + slot * kBytesVt; }

    // full: the slot holds its block. empty: all readers have read the slot.
    __device__ __forceinline__ uint32 full_k(int slot) const { return barriers + slot * 8; }
    __device__ __forceinline__ uint32 empty_k(int slot) const { return barriers + (kKStages + slot) * 8; }
    __device__ __forceinline__ uint32 full_v(int slot) const { return barriers + (2 * kKStages + slot) * 8; }
    __device__ __forceinline__ uint32 empty_v(int slot) const { return barriers + (2 * kKStages + kVStages + slot) * 8; }
    __device__ __forceinline__ uint32 full_vt(int slot) const { return barriers + (2 * (kKStages + kVStages) + slot) * 8; }
    __device__ __forceinline__ uint32 empty_vt(int slot) const { return barriers + (2 * (kKStages + kVStages) + kVtStages + slot) * 8; }
    __device__ __forceinline__ uint32 full_q(int slot, int consumer) const {
        return barriers + (kBarriersKV + slot * kConsumers + consumer) * 8;
    }
    __device__ __forceinline__ uint32 empty_q(int slot, int consumer) const {
        return barriers + (kBarriersKV + (kQStages + slot) * kConsumers + consumer) * 8;
    }

    // By one thread, before any other thread uses a barrier.
    __device__ __forceinline__ void init_barriers() const {
        // Under a block mask each warp of a consumer reads the listed slot and releases K's slot
        // itself.
        const int releases_k = kHasBlockMask ? kConsumers * 4 : kConsumers;
        for (int slot = 0; slot < kKStages; ++slot) barrier_init(full_k(slot), 1), barrier_init(empty_k(slot), releases_k);
        for (int slot = 0; slot < kVStages; ++slot) barrier_init(full_v(slot), 1), barrier_init(empty_v(slot), kTransposers);
        for (int slot = 0; slot < kVtStages; ++slot) barrier_init(full_vt(slot), kReadsImages ? 1 : kTransposers), barrier_init(empty_vt(slot), kConsumers);
        for (int slot = 0; slot < kQStages; ++slot) {
            for (int consumer = 0; consumer < kConsumers; ++consumer) {
                barrier_init(full_q(slot, consumer), 1), barrier_init(empty_q(slot, consumer), 1);
            }
        }
        tiles.init(kConsumers * 4 + kProducers);  // the loading warp reads tiles too
        barrier_init_done();
    }
};
