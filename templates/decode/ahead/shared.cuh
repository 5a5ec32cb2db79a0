// Shared memory of a decode kernel whose weights are computed ahead: where each buffer lies, its
// shape and its lifetime. All lie there for the kernel's whole life.
//
//   a ring of tiles of K    a block's slot follows from its number in the walk, and so does the
//                           scoring warp that takes it
//   a ring of tiles of V    this CTA's columns
//   Q                       (kBlockM, kHeadDim) in padded rows
//   a ring of weights       of a block: P as A operands [k16 step][lane] of 16 bytes, then for each
//                           lane sums and factors of O in 16 bytes, then references in 8
//   references              of a block's rows in fp32, from its scoring warp to the next block's
//   barriers                a full and an empty one for each slot of the three rings, and a full
//                           one for each slot of references

#include "decode/ahead/warps.cuh"
#include "device/attention/key_boxes.cuh"
#include "device/ptx/mbarrier.cuh"
#include "device/schedule/ring.cuh"

using TileK = BoxedTile<kBlockN, kHeadDim>;
using TileV = BoxedTile<kBlockN, kCtaCols>;
using TileQ = Tile<kBlockM, round_up(kHeadDim, 8 * kKeyUnit)>;
constexpr int kSlots = kNumStages * kScoringWarps;  // of each ring
// Several warps' columns of V lie in one box.
constexpr bool kSharesBoxes = kWarpCols < kBoxCols;
constexpr int kAlignment = 1024;  // bytes: where the swizzle's pattern begins
constexpr int kBytesP = kBlockN / 16 * 32 * 16, kBytesWeights = kBytesP + 32 * (16 + 8), kBytesReferences = kBlockM * 4;
constexpr int kSharedBytes = kAlignment + TileQ::kBytes + kSlots * (TileK::kBytes + TileV::kBytes + kBytesWeights + kBytesReferences + 7 * 8);
static_assert(kSharedBytes == kLaunchBytes, "src/family computes the same");
static_assert(kSharesBoxes ? kBoxCols % kWarpCols == 0 : kWarpCols % kBoxCols == 0, "a warp's columns of V are whole boxes, or a part of one");
static_assert(kKeyBoxRows == kLaunchBoxRows && kKeyBoxRows % 8 == 0, "src/family computes the same; a box begins where the swizzle's pattern does");
static_assert(kVec == 8, "what TMA demands of addresses and strides");

using WalkRing = Ring<kSlots>;

struct Memory {
    uint32 k, v, q, weights, references, barriers;

    __device__ __forceinline__ Memory(const uint8* shared) {
        k = (shared_address(shared) + kAlignment - 1) & ~uint32(kAlignment - 1);
        v = k + kSlots * TileK::kBytes;
        q = v + kSlots * TileV::kBytes;
        weights = q + TileQ::kBytes;
        references = weights + kSlots * kBytesWeights;
        barriers = references + kSlots * kBytesReferences;
    }
    __device__ __forceinline__ uint32 full_k(uint32 slot) const { return barriers + slot * 56; }
    __device__ __forceinline__ uint32 empty_k(uint32 slot) const { return barriers + slot * 56 + 8; }
    __device__ __forceinline__ uint32 full_v(uint32 slot) const { return barriers + slot * 56 + 16; }
    __device__ __forceinline__ uint32 empty_v(uint32 slot) const { return barriers + slot * 56 + 24; }
    __device__ __forceinline__ uint32 full_weights(uint32 slot) const { return barriers + slot * 56 + 32; }
    __device__ __forceinline__ uint32 empty_weights(uint32 slot) const { return barriers + slot * 56 + 40; }
    __device__ __forceinline__ uint32 full_references(uint32 slot) const { return barriers + slot * 56 + 48; }

    // By one thread, before all others of the CTA go on.
    __device__ __forceinline__ void init_barriers() const {
        for (int slot = 0; slot < kSlots; ++slot) {
            barrier_init(full_k(slot), 1), barrier_init(empty_k(slot), 1);
            barrier_init(full_v(slot), 1), barrier_init(empty_v(slot), kWarpsV);
            barrier_init(full_weights(slot), 1), barrier_init(empty_weights(slot), kWarpsV);
            barrier_init(full_references(slot), 1);
        }
        barrier_init_done();
    }
    __device__ __forceinline__ uint32 tile_k(uint32 slot) const { return k + slot * TileK::kBytes; }
    __device__ __forceinline__ uint32 tile_v(uint32 slot) const { return v + slot * TileV::kBytes; }
};
