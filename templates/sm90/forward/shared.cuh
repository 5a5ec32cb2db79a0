// The shared memory of the sm90 forward kernel: sizes of tiles, addresses of slots and barriers.
//
// All tiles are boxes of 64 columns with the 128-byte swizzle (device/layout/swizzle.cuh). The
// producer fills slots (load.cuh) and the consumers empty them; the two roles share nothing else.

#include "device/attention/key_boxes.cuh"
#include "device/layout/tensor_map.cuh"
#include "device/ptx/mbarrier.cuh"
#include "device/schedule/listed_slots.cuh"
#include "device/schedule/tile_slots.cuh"

constexpr int kConsumers = kBlockM / 64;  // warpgroups of 64 query rows
constexpr int kThreads = 128 * (kConsumers + 1);
constexpr int kBoxesQK = (kHeadDim + kBoxCols - 1) / kBoxCols;
constexpr int kBoxesV = (kHeadDimV + kBoxCols - 1) / kBoxCols;

// Whether an elected lane starts the copies of 16-bit keys without pages (device/ptx/elect.cuh), or
// thread 0. Four consumers that store O from registers took up to 1.16 times as long with an
// elected lane on long heads at head dim 64; the cause was not measured. Three were not timed.
constexpr bool kElects = kHeadDim > 64 || kConsumers <= 2 || kTmaStore;

// Keys of 8 bits: four warps convert them in registers (load_eight.cuh), or three in the slots to
// which TMA brings their bytes (convert_in_place.cuh). Keys in pages (load_pages.cuh): whether TMA
// or threads copy them, the producer's warps that load, and the arrivals that fill a slot of K or
// V. One thread starts a box in 200 cycles, whatever its size, so up to four warps share the boxes
// of a block (docs/tuning/pages.md): by rows or, where these are few, by columns too.
constexpr bool kConverts = kKeyFormat != 0, kConvertsInPlace = kConverts && kLaunchBoxRows != 0;
constexpr int kConverterWarps = kConvertsInPlace ? 3 : 4;
constexpr bool kPagesByTma = kPageSize > 0 && !kConverts && kKeyBoxRows % 8 == 0;
constexpr bool kPagesByThreads = kPageSize > 0 && !kConverts && !kPagesByTma;
constexpr int kRowsOfBoxes = kBlockN / kKeyBoxRows;
// Parts that a warp starts: a row of boxes or, where a block has fewer than four rows, one box.
constexpr int kPartsOfRow = kPagesByTma && kRowsOfBoxes < 4 && kBoxesQK == kBoxesV ? kBoxesQK : 1;
constexpr int kParts = kRowsOfBoxes * kPartsOfRow;  // of a block
constexpr int kLoaderWarps = kPageSize == 0 && !kConverts ? 0 : kPagesByTma && kParts < 4 ? kParts : 4;
constexpr int kKeyArrivals = kPagesByThreads ? 128 : kConverts ? kConverterWarps : kPagesByTma ? kLoaderWarps : 1;

// The scales of 8-bit keys (scales.cuh). Those of a whole sequence lie beside the tile's slot, and
// others beside the slot of K: of all of the block's keys, or of the block.
constexpr bool kHasTileScales = (kConverts && kKeysPerScale == 0) || kHasTileFactors;
constexpr bool kHasSlotScales = kConverts && kKeysPerScale != 0;
// Scales of single keys lie in the order in which the lanes of a quad hold keys: each lane has a
// row of its own. Rows are four apart modulo the banks. Behind the scales of K and V lie the
// largest scales of V of four warps. With kFoldsScalesOfV a slot has the scales of K, 16 bytes for
// the unit of V's scales (units.cuh), and the scales of V in the order of keys.
constexpr bool kFoldsScalesOfV = kConvertsInPlace && kKeysPerScale == 1;
constexpr int kScaleRow = kBlockN / 4 + 4;
constexpr int kScalesOfSlot = kKeysPerScale == 1 ? 4 * kScaleRow : 1;  // of K, and as many of V
constexpr int kSlotUnit = kScalesOfSlot * 4, kSlotScalesOfV = kSlotUnit + 16;
constexpr int kSlotScaleBytes = kHasKeyFactors ? kBlockN * 4 : !kHasSlotScales ? 0 : kFoldsScalesOfV ? kSlotScalesOfV + kBlockN * 4 : kScalesOfSlot * 8 + (kKeysPerScale == 1 ? 16 : 0);
constexpr int kBytesScales = kHasTileScales ? TileSlots::kSlots * 8 : kKStages * kSlotScaleBytes;
// Each warp of a consumer reads what lies beside the slot of K, and releases the slot itself. With
// kKeepsFirstK it keeps the slot of a tile's first block until the block's softmax, which reads
// that.
constexpr bool kWarpsReleaseK = kHasBlockMask || kHasSlotScales || kHasKeyFactors;
constexpr bool kKeepsFirstK = kHasSlotScales || kHasKeyFactors;

// Where O leaves by TMA from: with two Q slots from its tile's slot, and with one from a buffer of
// each consumer for half of the boxes.
constexpr bool kStoresFromQ = kTmaStore && kQStages == 2;
constexpr bool kStoresApart = kTmaStore && !kStoresFromQ;
constexpr int kBoxesO = kStoresApart ? kBoxesV / 2 : 1;
constexpr int kBytesO = kStoresApart ? kBoxesO * 64 * kBoxRowBytes : 0;

constexpr int kBytesQ = kBoxesQK * 64 * kBoxRowBytes;  // one warpgroup's rows
constexpr int kBytesK = kBoxesQK * kBlockN * kBoxRowBytes;
constexpr int kBytesV = kBoxesV * kBlockN * kBoxRowBytes;
constexpr int kSlotBytes = kQStages * kConsumers * kBytesQ + kKStages * kBytesK + kVStages * kBytesV + kConsumers * kBytesO;
constexpr int kBarrierBytes = 1024;
// The merged O of a batch-invariant tile (device/attention/fixed_order.cuh). Four consumers have no
// registers for it, three of more than 64 columns and two of more than 128. It then is in pieces of
// 16 bytes of each thread: in shared memory where the launch has room, or else in local memory.
constexpr bool kMergesInPieces = kIsBatchInvariant && (kConsumers == 4 || kConsumers == 3 && kHeadDimV > 64 || kHeadDimV > 128);
constexpr int kPieces = (kHeadDimV + 7) / 8, kBytesPiece = 128 * 16;  // of one warpgroup
constexpr int kSharedPieces = kMergesInPieces ? (kLaunchBytes - 1024 - kBarrierBytes - kSlotBytes) / (kConsumers * kBytesPiece) : 0;
constexpr int kLocalPieces = kMergesInPieces ? kPieces - kSharedPieces : 0, kBytesMerged = kSharedPieces * kBytesPiece;
static_assert(kLocalPieces >= 0, "src/family computes the same");
constexpr int kTileBytes = kSlotBytes + kConsumers * kBytesMerged + kBytesScales;
constexpr int kBarriersKV = 2 * (kKStages + kVStages), kBarriersQ = 2 * kQStages * kConsumers;
constexpr int kBarriersBytes = kConvertsInPlace ? kKStages + kVStages : 0;
static_assert(1024 + kTileBytes + kBarrierBytes == kLaunchBytes && kThreads == kLaunchThreads,
              "src/family computes the same");
static_assert((kBarriersKV + kBarriersQ + kBarriersBytes) * 8 + 16 + TileSlots::kBytes + kKStages * ListedSlots::kSlotBytes <= kBarrierBytes,
              "barriers and slots");

struct Shared {
    uint32 q;         // [kQStages][kConsumers][box][64 rows]: Q of a tile; with kStoresFromQ then its O
    uint32 k;         // [kKStages][box][kBlockN keys]: one K block, read by all consumers
    uint32 v;         // [kVStages][box][kBlockN keys]: one V block, read by all consumers
    uint32 o;         // [kConsumers][kBoxesO][64 rows]: a part of O on its way to device memory
    uint32 merged;    // [kConsumers]: O of the segments that a tile has merged, with kMergesInPieces
    uint32 scales;    // [nth tile or slot of K][K, V]: the scales of 8-bit keys
    uint32 barriers;  // of K, V and Q in this order: for each slot `full`, then for each slot `empty`; then `bytes` of K and V
    TileSlots tiles;  // which tiles the CTA does, from the producer to the consumers
    ListedSlots listed_slots;  // under a block mask: which block each K slot holds

    // The 128-byte swizzle needs tiles at multiples of 1024 bytes. `bytes` is only 16-byte aligned,
    // and kLaunchBytes has 1024 bytes for the rounding.
    __device__ __forceinline__ explicit Shared(const uint8* bytes) {
        q = (shared_address(bytes) + 1023) & ~1023u;
        k = q + kQStages * kConsumers * kBytesQ;
        v = k + kKStages * kBytesK;
        o = v + kVStages * kBytesV;
        merged = o + kConsumers * kBytesO;
        scales = merged + kConsumers * kBytesMerged;
        barriers = scales + kBytesScales;
        tiles = {(barriers + (kBarriersKV + kBarriersQ + kBarriersBytes) * 8 + 15) & ~15u};
        listed_slots = {tiles.base + TileSlots::kBytes};
    }
    __device__ __forceinline__ uint32 q_slot(int slot, int consumer) const { return q + (slot * kConsumers + consumer) * kBytesQ; }
    __device__ __forceinline__ uint32 k_slot(int slot) const { return k + slot * kBytesK; }
    __device__ __forceinline__ uint32 v_slot(int slot) const { return v + slot * kBytesV; }

    __device__ __forceinline__ uint32 o_slot(int consumer) const { return o + consumer * kBytesO; }

    __device__ __forceinline__ uint32 tile_scales(uint32 nth) const { return scales + nth % TileSlots::kSlots * 8; }
    __device__ __forceinline__ uint32 slot_scales(int slot) const { return scales + slot * kSlotScaleBytes; }

    // full: the copy into the slot has arrived (kKeyArrivals and their bytes). empty: every
    // consumer has read the slot.
    __device__ __forceinline__ uint32 full_k(int slot) const { return barriers + slot * 8; }
    __device__ __forceinline__ uint32 empty_k(int slot) const { return barriers + (kKStages + slot) * 8; }
    __device__ __forceinline__ uint32 full_v(int slot) const { return barriers + (2 * kKStages + slot) * 8; }
    __device__ __forceinline__ uint32 empty_v(int slot) const { return barriers + (2 * kKStages + kVStages + slot) * 8; }
    __device__ __forceinline__ uint32 full_q(int slot, int consumer) const {
        return barriers + (kBarriersKV + slot * kConsumers + consumer) * 8;
    }
    __device__ __forceinline__ uint32 empty_q(int slot, int consumer) const {
        return barriers + (kBarriersKV + (kQStages + slot) * kConsumers + consumer) * 8;
    }

    // With kConvertsInPlace: the slot's bytes have arrived, and the scales that come with K.
    __device__ __forceinline__ uint32 bytes_k(int slot) const { return barriers + (kBarriersKV + kBarriersQ + slot) * 8; }
    __device__ __forceinline__ uint32 bytes_v(int slot) const { return barriers + (kBarriersKV + kBarriersQ + kKStages + slot) * 8; }

    // By one thread, before any other thread uses a barrier.
    __device__ __forceinline__ void init_barriers() const {
        // Converters read V's scales beside K's slot after they have handed K over.
        const int releases_k = (kWarpsReleaseK ? kConsumers * 4 : kConsumers) + (kFoldsScalesOfV ? kConverterWarps : 0);
        for (int slot = 0; slot < kKStages; ++slot) barrier_init(full_k(slot), kKeyArrivals), barrier_init(empty_k(slot), releases_k);
        for (int slot = 0; slot < kVStages; ++slot) barrier_init(full_v(slot), kKeyArrivals), barrier_init(empty_v(slot), kConsumers);
        for (int slot = 0; slot < kQStages; ++slot) {
            for (int consumer = 0; consumer < kConsumers; ++consumer) {
                barrier_init(full_q(slot, consumer), 1), barrier_init(empty_q(slot, consumer), 1);
            }
        }
        if constexpr (kConvertsInPlace) {
            // The thread that starts the copies of boxes, and a warp that copies scales.
            for (int slot = 0; slot < kKStages; ++slot) barrier_init(bytes_k(slot), 1 + 32);
            for (int slot = 0; slot < kVStages; ++slot) barrier_init(bytes_v(slot), 1);
        }
        tiles.init(kConsumers * 4 + kLoaderWarps);
        barrier_init_done();
    }
};
