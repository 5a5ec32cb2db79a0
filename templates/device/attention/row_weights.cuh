// What every softmax over an accumulator's rows does in registers: a row's maximum, and weights of
// its scores. It knows no reference and no rule that moves one.
//
// A lane holds two rows of a tile (r = 0: g, r = 1: g + 8), two columns of each in four elements.

#include "device/numeric.cuh"

// The factor of row r's scores: one for both rows of a lane, or one for each.
__device__ __forceinline__ float of_row(float scale, int) { return scale; }
__device__ __forceinline__ float of_row(const float (&scale)[2], int r) { return scale[r]; }

// The largest of this lane's scores of row r.
template <int kTiles>
__device__ __forceinline__ float lane_maximum(const float (&s)[kTiles][4], int r) {
    float maximum = fmaxf(s[0][2 * r], s[0][2 * r + 1]);
    #pragma unroll
    for (int n = 1; n < kTiles; ++n) maximum = fmaxf(maximum, fmaxf(s[n][2 * r], s[n][2 * r + 1]));
    return maximum;
}

// The largest of 0 and this lane's scores of row r. Numbers from 0 on are in the order of their
// bits as integers, and Hopper finds the largest of three integers by one instruction (VIMNMX3). A
// NaN passes all numbers; its row is NaN anyway.
template <int kTiles>
__device__ __forceinline__ float lane_maximum_from_0(const float (&s)[kTiles][4], int r) {
    int found[2] = {};  // two chains, for latency
    #pragma unroll
    for (int n = 0; n < kTiles; ++n) {
        found[n % 2] = max(found[n % 2], max(__float_as_int(s[n][2 * r]), __float_as_int(s[n][2 * r + 1])));
    }
    return __int_as_float(max(found[0], found[1]));
}

// The largest of this lane's scores of row r if none is above 0: the least of their bits, since
// negative numbers are in the reverse order.
template <int kTiles>
__device__ __forceinline__ float lane_maximum_to_0(const float (&s)[kTiles][4], int r) {
    uint32 found[2] = {~0u, ~0u};
    #pragma unroll
    for (int n = 0; n < kTiles; ++n) {
        found[n % 2] = min(found[n % 2], min(__float_as_uint(s[n][2 * r]), __float_as_uint(s[n][2 * r + 1])));
    }
    return __uint_as_float(min(found[0], found[1]));
}

// The largest score of row r. All lanes of a quad get the same value.
template <int kTiles>
__device__ __forceinline__ float row_maximum(const float (&s)[kTiles][4], int r) { return quad_max(lane_maximum(s, r)); }

// Whether a score of some row of the warp is past that row's limit, as outgrows(r, score) says.
// Each lane asks for its own columns: the vote is the same as with the maxima of whole rows, which
// few blocks need. If so, `found` has those.
template <bool kByIntegers, int kTiles, class Outgrows>
__device__ __forceinline__ bool find_outgrown(const float (&s)[kTiles][4], float (&found)[2], const Outgrows& outgrows) {
    const auto some_lane_outgrows = [&] { return __any_sync(0xffffffff, outgrows(0, found[0]) || outgrows(1, found[1])); };
    #pragma unroll
    for (int r = 0; r < 2; ++r) found[r] = kByIntegers ? lane_maximum_from_0(s, r) : lane_maximum(s, r);
    if (!some_lane_outgrows()) return false;
    #pragma unroll
    for (int r = 0; r < 2; ++r) found[r] = quad_max(found[r]);
    if constexpr (kByIntegers) {
        // A row without a score above 0 has only a bound so far.
        if (__any_sync(0xffffffff, found[0] == 0.f || found[1] == 0.f)) {
            #pragma unroll
            for (int r = 0; r < 2; ++r) {
                const float to_0 = quad_max(lane_maximum_to_0(s, r));
                if (found[r] == 0.f) found[r] = to_0;
            }
            return some_lane_outgrows();
        }
    }
    return true;
}

// Turns scores into weights in place, 2^(score * scale_log2 - lower), and adds them to the sums of
// this lane's columns.
template <int kTiles, class Scale>
__device__ __forceinline__ void weigh(float (&s)[kTiles][4], float (&sum)[2], const Scale& scale_log2, float lower0, float lower1) {
    #pragma unroll
    for (int n = 0; n < kTiles; ++n) {
        #pragma unroll
        for (int i = 0; i < 4; ++i) {
            s[n][i] = exp2_approx(fmaf(s[n][i], of_row(scale_log2, i / 2), i < 2 ? -lower0 : -lower1));
            sum[i / 2] += s[n][i];
        }
    }
}
