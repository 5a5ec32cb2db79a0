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

// The largest score of row r. All lanes of a quad get the same value.
template <int kTiles>
__device__ __forceinline__ float row_maximum(const float (&s)[kTiles][4], int r) { return quad_max(lane_maximum(s, r)); }

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
