// Q K^T of a team whose warps share V's columns, with kIsBatchInvariant: each warp multiplies by a
// share of the block's keys, and all get the scores of the others through shared memory. A segment
// is walked by one team, so the time of a block is that of few short sequences.
//
// A lane holds the same elements of each 16 x 8 accumulator in all warps, so that the exchange
// keeps their places.

#include "decode/products.cuh"
#include "device/ptx/shared.cuh"
#include "device/schedule/team.cuh"

static_assert(!kSharesScores || kNTiles % (2 * kWarpsV) == 0, "B operands are loaded in pairs");

// S = Q K^T of all of the block's keys. The team met after it read the scores of the block before.
__device__ __forceinline__ void multiply_qk_shared(Scores& s, const QueryOperand& q, uint32 tile_k, uint32 scores, const ThreadPlace& place) {
    constexpr int kOwn = kNTiles / kWarpsV, kBytes = 32 * 16;  // accumulators of a warp, and the bytes of one
    const int first = place.warp_v * kOwn;
    float own[kMTiles][kOwn][4] = {};
    multiply_qk(own, q, TileK::part(tile_k, first * 8, 0), place.lane);
    const auto at = [&](int m, int n) { return scores + ((place.warp_m * kMTiles + m) * kNTiles + n) * kBytes + place.lane * 16; };
    #pragma unroll
    for (int m = 0; m < kMTiles; ++m) {
        #pragma unroll
        for (int n = 0; n < kOwn; ++n) store_floats(at(m, first + n), own[m][n]);
    }
    sync_team<kTeamWarps>(place.team);  // all scores are there
    #pragma unroll
    for (int m = 0; m < kMTiles; ++m) {
        #pragma unroll
        for (int n = 0; n < kNTiles; ++n) {
            const uint4 words = load_four_words(at(m, n));
            s[m][n][0] = __uint_as_float(words.x), s[m][n][1] = __uint_as_float(words.y);
            s[m][n][2] = __uint_as_float(words.z), s[m][n][3] = __uint_as_float(words.w);
        }
    }
}
