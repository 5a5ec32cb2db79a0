// Shared memory of the decode kernel: where each buffer lies, its shape and its lifetime.
//
//   main loop   Q (kCtaRows, kHeadDim) in padded rows; each team's ring of kNumStages tiles of K
//               and of V, in the layout of keys_cp_async.cuh, keys_tma.cuh, keys_heads.cuh or
//               keys_heads_tma.cuh
//               with kSharesScores each team's scores of a block in fp32 (shared_scores.cuh)
//   epilogue    in their place, each team's O, references and sums in fp32 (merge.cuh)
//   throughout  the barriers of TMA's copies, where nothing else ever lies

#include "decode/teams.cuh"

using TileQ = Tile<kCtaRows, round_up(kHeadDim, 8 * kKeyUnit)>;
constexpr int kRingBytes = kNumStages * (TileK::kBytes + TileV::kBytes);  // of a team
// The rings come before Q where their tiles must be aligned further than shared memory is.
constexpr bool kAlignsRings = kRingAlignment > 128;

// A row of a team's O. The stride of 8 banks past a multiple of 32 keeps pairs of rows apart.
constexpr int kMergeStride = round_up(kWarpCols * kWarpsV, 32) + 8;
constexpr int kMergeBytes = kTeams * kCtaRows * (kMergeStride + 2) * 4;
constexpr int kScoresBytes = kSharesScores ? kBlockM * kBlockN * 4 : 0;  // of a team
constexpr int kLoopBytes = TileQ::kBytes + kTeams * (kRingBytes + kScoresBytes) + (kAlignsRings ? kRingAlignment : 0);
constexpr int kTilesBytes = kLoopBytes > kMergeBytes ? kLoopBytes : kMergeBytes;
constexpr int kSharedBytes = kTilesBytes + kTeams * kRingBarrierBytes;
static_assert(kSharedBytes == kLaunchBytes, "src/family computes the same");

// Over 8 bits registers and shared memory would let an SM hold a third CTA. More bytes in flight
// than suffice are slower (docs/tuning/decode.md), and so is a last wave of few CTAs. So where TMA
// copies keys, a CTA takes unused shared memory, with which kCtasPerSm CTAs fill an SM of 228 KB.
// CTAs of several heads take it too, since the host counts waves of kCtasPerSm for them as well. It
// is static, of which there are 48 KB at most.
constexpr int kSmBytes = kArch == 90 || kArch / 10 == 10 ? 228 << 10 : 0;
constexpr int kLackingBytes = kSmBytes / (kCtasPerSm + 1) - 1024 + 128 - kSharedBytes;  // 1024 are the system's
constexpr bool kFillsSm = kKeyFormat != 0 && kKeyFormat != kInt4 && kBlockM <= 16 && kAlignsRings && kLackingBytes > 0 && kLackingBytes <= 40 << 10;
constexpr int kUnusedBytes = kFillsSm ? kLackingBytes : 0;
template <int kBytes>
__device__ __forceinline__ void take_unused() {
    if constexpr (kBytes > 0) {
        __shared__ uint8 unused[kBytes];
        in_memory(unused);
    }
}

// The addresses of the main loop, of one team.
struct LoopMemory {
    uint32 q;
    TeamRing ring;
    uint32 scores;  // [kBlockM / 16][kNTiles][lane] of 16 bytes, with kSharesScores

    __device__ __forceinline__ LoopMemory(const uint8* shared, int team) {
        const uint32 start = shared_address(shared);
        if constexpr (kAlignsRings) {
            const uint32 rings = (start + kRingAlignment - 1) & ~uint32(kRingAlignment - 1);
            q = rings + kTeams * kRingBytes;
            ring.k = rings + team * kRingBytes;
            scores = q + TileQ::kBytes + team * kScoresBytes;
        } else {
            q = start;
            ring.k = q + TileQ::kBytes + team * kRingBytes;
            scores = q + TileQ::kBytes + kTeams * kRingBytes + team * kScoresBytes;
        }
        ring.barriers = start + kTilesBytes + team * kRingBarrierBytes;
        ring.v = ring.k + kNumStages * TileK::kBytes;
    }
};

// The buffers of the epilogue. A state is a team's row: unnormalised O, the reference in log2 units
// and the sum of weights.
struct MergeMemory {
    float* o;           // (team, row, kMergeStride)
    float* references;  // (team, row), later the factor of the team's O
    float* sums;        // (team, row)

    __device__ __forceinline__ MergeMemory(uint8* shared)
        : o(reinterpret_cast<float*>(shared)), references(o + kTeams * kCtaRows * kMergeStride), sums(references + kTeams * kCtaRows) {}
};
