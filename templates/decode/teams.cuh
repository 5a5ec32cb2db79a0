// The division of the decode kernel's CTA: teams of warps, and the part of a team's block that one
// warp multiplies.
//
// Each team takes key blocks of its own. Within a team kWarpsM warps share the rows and kWarpsV
// warps share V's columns. Warps with the same rows and other columns repeat Q K^T or, with
// kIsBatchInvariant, share it (shared_scores.cuh).

#include "device/layout/key_unit.cuh"
#include "device/layout/padded_tile.cuh"

constexpr int kThreads = kNumWarps * 32;
constexpr int kTeamWarps = kWarpsM * kWarpsV, kTeamThreads = kTeamWarps * 32;
constexpr int kTeams = kNumWarps / kTeamWarps;
constexpr int kMTiles = kBlockM / (kWarpsM * 16);  // 16-row tiles of a warp
constexpr int kNTiles = kBlockN / 8;
constexpr int kWarpCols = round_up((kHeadDimV + kWarpsV - 1) / kWarpsV, 8 * kKeyUnit);  // a warp's columns of V
constexpr int kOTiles = kWarpCols / 8;
constexpr bool kSharesScores = kIsBatchInvariant && kWarpsV > 1;

static_assert(kBlockM % (16 * kWarpsM) == 0 && kMTiles >= 1, "a warp owns whole 16-row tiles");
static_assert(kBlockN % 16 == 0, "P is consumed 16 keys at a time");
static_assert(kNumWarps % kTeamWarps == 0 && kTeams >= 1, "teams are whole");
static_assert(kTeamWarps == 1 || kTeams < 16, "there are 16 barriers");

// A thread's place in the CTA.
struct ThreadPlace {
    int thread, warp, lane;
    int team;
    int warp_m, warp_v;  // the warp's number along the team's rows and along V's columns

    __device__ __forceinline__ ThreadPlace()
        : thread(threadIdx.x), warp(thread / 32), lane(thread % 32), team(warp / kTeamWarps),
          warp_m(warp % kTeamWarps / kWarpsV), warp_v(warp % kWarpsV) {}

    // The first of the warp's rows of the tile.
    __device__ __forceinline__ int first_row() const { return warp_m * (kMTiles * 16); }
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
