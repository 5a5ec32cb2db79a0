// The division of the decode kernel's CTA: teams of warps, and the part of a team's block that one
// warp multiplies.
//
// Each team takes key blocks of its own. Within a team kWarpsM warps share the rows and kWarpsV
// warps share V's columns. A team has kWarpsM * kWarpsV warps for each of kHeads heads, which share
// the copies of a block of keys. Warps with the same rows and other columns repeat Q K^T or, with
// kIsBatchInvariant, share it (shared_scores.cuh).

#include "device/layout/key_unit.cuh"
#include "device/layout/padded_tile.cuh"

constexpr int kThreads = kNumWarps * 32;
constexpr int kHeadWarps = kWarpsM * kWarpsV;  // warps of a head
constexpr int kTeamWarps = kHeadWarps * kHeads, kTeamThreads = kTeamWarps * 32;
constexpr int kCtaRows = kHeads * kBlockM;     // packed rows of a CTA's tiles, head by head
constexpr int kTeams = kNumWarps / kTeamWarps;
constexpr int kMTiles = kBlockM / (kWarpsM * kTileRows);  // tiles of rows of a warp
constexpr int kNTiles = kBlockN / (kTransposes ? 16 : 8);
constexpr int kWarpCols = round_up((kHeadDimV + kWarpsV - 1) / kWarpsV, 8 * kKeyUnit);  // a warp's columns of V
// Tiles of the zeros' part of O, each for eight groups.
constexpr int kZeroTiles = kKeyFormat == kInt4 ? (kHeadDimV / (kKeyGroup + (kKeyGroup == 0)) + 7) / 8 : 0;
constexpr int kOTiles = kTransposes ? kWarpCols / 16 + kZeroTiles : kWarpCols / 8;
constexpr bool kSharesScores = kIsBatchInvariant && kWarpsV > 1;

static_assert(kBlockM % (kTileRows * kWarpsM) == 0 && kMTiles >= 1, "a warp owns whole tiles of rows");
static_assert(kBlockN % 16 == 0, "P is consumed 16 keys at a time");
static_assert(kNumWarps % kTeamWarps == 0 && kTeams >= 1, "teams are whole");
static_assert(kTeamWarps == 1 || kTeams < 16, "there are 16 barriers");

// A thread's place in the CTA.
struct ThreadPlace {
    int thread, warp, lane;
    int team;
    int head;            // the warp's, counted from the CTA's first
    int warp_m, warp_v;  // the warp's number along the head's rows and along V's columns

    __device__ __forceinline__ ThreadPlace()
        : thread(threadIdx.x), warp(thread / 32), lane(thread % 32), team(warp / kTeamWarps),
          head(kHeads > 1 ? warp % kTeamWarps / kHeadWarps : 0), warp_m(warp % kHeadWarps / kWarpsV), warp_v(warp % kWarpsV) {}

    // The first of the warp's rows, of its head's tile and of the CTA's.
    __device__ __forceinline__ int first_cta_row() const { return head * kBlockM + first_row(); }
    __device__ __forceinline__ int first_row() const { return warp_m * (kMTiles * kTileRows); }
    // The lane's first row of each of the warp's tiles. The second one is kRowStep behind it.
    __device__ __forceinline__ int lane_row() const { return kTransposes ? lane % 4 * 2 : lane / 4; }
    // Whether the lane is the first one of those that share rows.
    __device__ __forceinline__ bool is_first_of_rows() const { return kTransposes ? lane < 4 : lane % 4 == 0; }
    // The first of its columns of V.
    __device__ __forceinline__ int first_col() const { return warp_v * kWarpCols; }
    // The thread's number in its team.
    __device__ __forceinline__ int in_team() const { return thread % kTeamThreads; }
};

// Where a team's ring lies in shared memory: kNumStages tiles of K, as many of V, and where TMA
// copies keys a barrier for each stage.
struct TeamRing {
    uint32 k, v, barriers;
};
