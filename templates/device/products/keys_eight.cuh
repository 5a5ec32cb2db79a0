// Warp-level products of 16-bit operands with keys of 8 bits in shared memory, which become fp16 in
// registers (device/eight.cuh), under the names that products/keys_plain.cuh has for keys of q's
// type. The sm80 forward and decode kernels use them. Tiles of keys have columns of two numbers.
//
// ldmatrix hands each lane four consecutive bytes of a row. So the order of the inner dimension in
// Q K^T, and of V's columns in O, differs from the 16-bit products':
//
// - In 16 inner dimensions, a lane has 4t to 4t + 3 where mma wants 2t, 2t + 1, 2t + 8 and 2t + 9.
//   Q is loaded in the same order (load_query), and sums do not depend on it.
// - The even columns of 16 of V make one accumulator and the odd ones the next. A lane
//   therefore holds the columns 4t to 4t + 3 (each_pair).

#include "device/attention/key_scales.cuh"
#include "device/products/fp16_query.cuh"
#include "device/products/gemm_sm80.cuh"

using KeyScales = AccumulatorScales<false>;

constexpr int kKSteps = (kHeadDim + 15) / 16;

// One k-step of a warp's rows of Q.
template <class Tile, int kM>
__device__ __forceinline__ void load_query(uint32 (&a)[kM][4], uint32 tile, int k, int lane) {
    const uint32 at = tile + (lane / 4 * Tile::kStride + k * 16 + lane % 4 * 4) * 2;
    #pragma unroll
    for (int m = 0; m < kM; ++m) {
        const uint2 upper = load_two_words(at + m * 16 * Tile::kRowBytes), lower = load_two_words(at + (m * 16 + 8) * Tile::kRowBytes);
        a[m][0] = upper.x, a[m][1] = lower.x, a[m][2] = upper.y, a[m][3] = lower.y;
    }
}

// C += A B^T for k16 steps k and k + 1, the second only if kIsPair. B is stored [n][k].
template <class TileB, bool kIsPair, int kM, int kN>
__device__ __forceinline__ void gemm_eight_step(float (&c)[kM][kN][4], const uint32 (&a)[kM][4], const uint32 (&next)[kM][4], uint32 tile_b,
                                                int k, int lane) {
    static_assert(kN % 2 == 0, "B operands are loaded in pairs");
    #pragma unroll
    for (int n = 0; n < kN; n += 2) {
        uint32 bytes[4];
        if constexpr (kIsPair) {
            ldmatrix_x4(bytes, TileB::moved(lane_cols_first<TileB>(tile_b, lane), n * 8, k * 8));
        } else {
            ldmatrix_x2(bytes[0], bytes[2], TileB::place(tile_b, n * 8 + lane % 16, k));
        }
        #pragma unroll
        for (int i = 0; i < 2; ++i) {
            uint32 b0, b1;
            eight_to_fp16<false>(bytes[2 * i], b0, b1);
            #pragma unroll
            for (int m = 0; m < kM; ++m) mma_k16_fp16(c[m][n + i], a[m], b0, b1);
            if constexpr (kIsPair) {
                eight_to_fp16<false>(bytes[2 * i + 1], b0, b1);
                #pragma unroll
                for (int m = 0; m < kM; ++m) mma_k16_fp16(c[m][n + i], next[m], b0, b1);
            }
        }
    }
}

// S += Q K^T, with Q in registers or in shared memory.
template <class TileK, int kM, int kN, int kSteps>
__device__ __forceinline__ void multiply_query(float (&s)[kM][kN][4], const uint32 (&q)[kSteps][kM][4], uint32 tile_k, int lane) {
    #pragma unroll
    for (int k = 0; k + 1 < kSteps; k += 2) gemm_eight_step<TileK, true>(s, q[k], q[k + 1], tile_k, k, lane);
    if constexpr (kSteps % 2 != 0) gemm_eight_step<TileK, false>(s, q[kSteps - 1], q[kSteps - 1], tile_k, kSteps - 1, lane);
}
template <class TileQ, class TileK, int kM, int kN>
__device__ __forceinline__ void multiply_query(float (&s)[kM][kN][4], uint32 tile_q, uint32 tile_k, int lane) {
    static_assert(TileQ::kCols == kKSteps * 16, "Q has whole k-steps");
    #pragma unroll
    for (int k = 0; k < kKSteps; k += 2) {
        uint32 a[kM][4], next[kM][4];
        load_query<TileQ>(a, tile_q, k, lane);
        if (k + 1 < kKSteps) {
            load_query<TileQ>(next, tile_q, k + 1, lane);
            gemm_eight_step<TileK, true>(s, a, next, tile_k, k, lane);
        } else {
            gemm_eight_step<TileK, false>(s, a, a, tile_k, k, lane);
        }
    }
}

// O += P V for one k16 step. `tile_v` is moved to its rows. O begins with the tile's first column.
template <class TileB, int kM, int kN>
__device__ __forceinline__ void multiply_weights(float (&c)[kM][kN][4], const uint32 (&a)[kM][4], uint32 tile_b, int lane, int = 0) {
    static_assert(kN % 2 == 0, "16 columns are two accumulators");
    const uint32 at = lane_rows_first<TileB>(tile_b, lane);
    #pragma unroll
    for (int n = 0; n < kN; n += 4) {
        uint32 bytes[4];
        if (n + 2 < kN) {
            ldmatrix_x4_trans(bytes, TileB::moved(at, 0, n * 4));
        } else {
            ldmatrix_x2_trans(bytes[0], bytes[1], TileB::moved(at, 0, n * 4));
        }
        #pragma unroll
        for (int i = 0; i < 2 && n + 2 * i < kN; ++i) {
            uint32 even[2], odd[2];
            eight_to_fp16<true>(bytes[2 * i], even[0], odd[0]);
            eight_to_fp16<true>(bytes[2 * i + 1], even[1], odd[1]);
            #pragma unroll
            for (int m = 0; m < kM; ++m) {
                mma_k16_fp16(c[m][n + 2 * i], a[m], even[0], even[1]);
                mma_k16_fp16(c[m][n + 2 * i + 1], a[m], odd[0], odd[1]);
            }
        }
    }
}

// A lane's first column of O.
__device__ __forceinline__ int first_col(int lane) { return lane % 4 * 4; }

// Calls store(column, first, second) for the pairs of neighbours that a lane holds of a row of O.
// Columns are counted from first_col.
template <int kOTiles, class Store>
__device__ __forceinline__ void each_pair(const float (&o)[kOTiles][4], int r, const Store& store) {
    #pragma unroll
    for (int n = 0; n < kOTiles; n += 2) {
        store(n * 8, o[n][2 * r], o[n + 1][2 * r]);
        store(n * 8 + 2, o[n][2 * r + 1], o[n + 1][2 * r + 1]);
    }
}
