// Warp-level products of Q and weights with keys of 8 bits in shared memory, transposed
// (transposed.cuh), under the names that keys_four.cuh has. The decode kernel uses them for tiles
// of 8 rows. Tiles of keys have columns of two numbers, which become fp16 in registers
// (device/eight.cuh).
//
// ldmatrix hands each lane four consecutive bytes of a row, as in keys_eight.cuh:
//
// - In 16 inner dimensions of Q K^T, a lane has 4t to 4t + 3 where mma wants 2t, 2t + 1, 2t + 8 and
//   2t + 9. Q is loaded in the same order (load_query), and sums do not depend on it.
// - A lane has the columns 2g and 2g + 1 of 16 of V, where mma wants g and g + 8.

#include "device/attention/key_scales.cuh"
#include "device/products/transposed.cuh"

using KeyScales = AccumulatorScales<true>;

constexpr int kKSteps = (kHeadDim + 15) / 16;

// One k-step of a warp's rows of Q as B operands.
template <class Tile, int kM>
__device__ __forceinline__ void load_query(uint32 (&b)[kM][2], uint32 tile, int k, int lane) {
    const uint32 at = tile + (lane / 4 * Tile::kStride + k * 16 + lane % 4 * 4) * 2;
    #pragma unroll
    for (int m = 0; m < kM; ++m) {
        const uint2 words = load_two_words(at + m * 8 * Tile::kRowBytes);
        b[m][0] = words.x, b[m][1] = words.y;
    }
}

// Keys have no zeros.
template <class Tile, int kM>
struct QuerySums {
    __device__ __forceinline__ QuerySums(uint32, int) {}
};

// S = K Q^T without the factors of rows. query(b, k) gives a k-step of Q.
template <class TileK, int kM, int kN, class Query, class Sums>
__device__ __forceinline__ void multiply_rows(float (&s)[kM][kN][4], uint32 tile_k, int lane, const Query& query, const Sums&) {
    #pragma unroll
    for (int n = 0; n < kN; ++n) {
        uint32 bytes[4];  // of the keys g (0 and 1) and g + 8, in two k-steps
        #pragma unroll
        for (int k = 0; k < kKSteps; ++k) {
            if (k % 2 == 0) {
                if (k + 1 < kKSteps) {
                    if constexpr (TileK::kMoves) ldmatrix_x4(bytes, TileK::moved(lane_cols_first<TileK>(tile_k, lane), n * 16, k * 8));
                    else ldmatrix_x4(bytes, lane_cols_at<TileK>(tile_k, lane, n * 16, k));
                } else {
                    ldmatrix_x2(bytes[0], bytes[2], TileK::place(tile_k, n * 16 + lane % 16, k));
                }
            }
            uint32 a[4], b[kM][2];
            eight_to_fp16_pairs<false>(bytes[k % 2], a[0], a[2]);
            eight_to_fp16_pairs<false>(bytes[k % 2 + 2], a[1], a[3]);
            query(b, k);
            #pragma unroll
            for (int m = 0; m < kM; ++m) mma_transposed(s[m][n], a, b[m][0], b[m][1]);
        }
    }
}

template <class Factors, int kM, int kN>
__device__ __forceinline__ void multiply_factors(float (&s)[kM][kN][4], const Factors& factors) {
    multiply_row_factors(s, factors.of);
}

// O += P V for one k16 step. `tile_v` is moved to its rows and to O's first column.
template <class TileV, int kM, int kO, class Scales>
__device__ __forceinline__ void multiply_weights(float (&o)[kM][kO][4], const uint32 (&b)[kM][2], uint32 tile_v, int lane, const Scales&) {
    const uint32 at = lane_rows_first<TileV>(tile_v, lane);
    #pragma unroll
    for (int n = 0; n < kO; n += 2) {
        uint32 bytes[4];
        if (n + 1 < kO) {
            if constexpr (TileV::kMoves) ldmatrix_x4_trans(bytes, TileV::moved(at, 0, n * 8));
            else ldmatrix_x4_trans(bytes, lane_rows_at<TileV>(tile_v, lane, n));
        } else {
            if constexpr (TileV::kMoves) ldmatrix_x2_trans(bytes[0], bytes[1], TileV::moved(at, 0, n * 8));
            else ldmatrix_x2_trans(bytes[0], bytes[1], lane_rows_at<TileV>(tile_v, lane, n));
        }
        #pragma unroll
        for (int i = 0; i < 2 && n + i < kO; ++i) {
            uint32 a[4];
            eight_to_fp16_pairs<true>(bytes[2 * i], a[0], a[1]);
            eight_to_fp16_pairs<true>(bytes[2 * i + 1], a[2], a[3]);
            #pragma unroll
            for (int m = 0; m < kM; ++m) mma_transposed(o[m][n + i], a, b[m][0], b[m][1]);
        }
    }
}

// A lane's first column of O.
__device__ __forceinline__ int first_col(int lane) { return lane / 4 * 2; }

// Calls store(column, first, second) for the pairs of neighbours that a lane holds of a row of O.
// Columns are counted from first_col.
template <int kOTiles, class Store>
__device__ __forceinline__ void each_pair(const float (&o)[kOTiles][4], int r, const Store& store) {
    #pragma unroll
    for (int n = 0; n < kOTiles; ++n) store(n * 16, o[n][2 * r], o[n][2 * r + 1]);
}
