// The division of a decode kernel whose weights are computed ahead: the roles of a CTA's warps, and
// the CTAs that share a tile by V's columns.
//
// Warp 0 copies keys. kScoringWarps warps take blocks in turn and turn their scores into weights.
// kWarpsV multiplying warps take all blocks in order, with columns of V of their own. Each of the
// tile's kTileCtas CTAs has its own columns of V and computes all weights.

#include "device/layout/key_unit.cuh"
#include "device/layout/padded_tile.cuh"

constexpr int kThreads = (1 + kScoringWarps + kWarpsV) * 32;
constexpr int kTeams = 1;                            // all warps walk the same segments
constexpr int kCtaRows = kBlockM;
constexpr int kMTiles = 1;                           // 16-row tiles of a warp
constexpr int kNTiles = kBlockN / 8;
constexpr int kCtaCols = round_up((kHeadDimV + kTileCtas - 1) / kTileCtas, 64);  // a CTA's columns of V, whole boxes
constexpr int kWarpCols = kCtaCols / kWarpsV;                                    // a multiplying warp's
constexpr int kOTiles = kWarpCols / 8;
constexpr bool kSharesScores = false;  // within a block

static_assert(kBlockM == 16, "a warp has all of a tile's rows");

// A thread's place in the CTA, and the CTA's in the tile.
struct ThreadPlace {
    int thread, warp, lane;
    int part;    // the CTA's number along V's columns
    int warp_v;  // of a multiplying warp, its number along the CTA's columns

    __device__ __forceinline__ ThreadPlace()
        : thread(threadIdx.x), warp(uniform(thread / 32)), lane(thread % 32), part(blockIdx.x % kTileCtas), warp_v(warp - 1 - kScoringWarps) {}

    __device__ __forceinline__ bool copies() const { return warp == 0; }
    __device__ __forceinline__ bool scores() const { return warp <= kScoringWarps; }
    __device__ __forceinline__ int scorer() const { return warp - 1; }
    __device__ __forceinline__ int first_row() const { return 0; }
    __device__ __forceinline__ int first_col() const { return (part * kWarpsV + warp_v) * kWarpCols; }
    // A thread's number among the multiplying ones.
    __device__ __forceinline__ int multiplier() const { return thread - (1 + kScoringWarps) * 32; }
};
