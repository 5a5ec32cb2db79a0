// Warp-level products of 16-bit tiles in shared memory, built from ptx/mma.cuh. The sm80 and decode
// kernels use them. It knows tiles by their address functions, and no mask and no pipeline.
//
// An operand is a tile's address, moved to the warp's first row or column, and the lane. The part
// of an address that depends on the lane is loop-invariant, and the rest is an immediate. A
// BoxedTile applies the column within a box by an xor. Inner dimensions are walked in k16 steps,
// with a last k8 step if only 8 columns are left. A head dim of 40 or 72 therefore costs 40 or 72.

#include "device/ptx/math.cuh"
#include "device/ptx/matrix.cuh"
#include "device/ptx/mma.cuh"

// The address of one lane's row in a 16 x 16 block. The matrices are rows 0-7 and rows 8-15, then
// the same rows of columns 8-15. The block is an A operand stored [m][k], or, read transposed, two
// B operands stored [k][n].
template <class Tile>
__device__ __forceinline__ uint32 lane_rows_first(uint32 tile, int lane) {
    return Tile::place(tile, lane % 16, lane / 16);
}
// The same address with columns first. The block is two B operands stored [n][k], or, read
// transposed, an A operand stored [k][m].
template <class Tile>
__device__ __forceinline__ uint32 lane_cols_first(uint32 tile, int lane) {
    return Tile::place(tile, lane % 8 + lane / 16 * 8, lane / 8 % 2);
}

using OperandA = uint32[4];  // 16 x 16: the words of one lane

// Two neighbouring 16 x 8 accumulators as one 16 x 16 A operand.
__device__ __forceinline__ void pack_a(uint32 (&a)[4], const float (&left)[4], const float (&right)[4]) {
    a[0] = pack2(left[0], left[1]);
    a[1] = pack2(left[2], left[3]);
    a[2] = pack2(right[0], right[1]);
    a[3] = pack2(right[2], right[3]);
}

// Loads one k-step of kM 16-row A operands. A k8 step (half) fills only a[..][0] and a[..][1].
template <class Tile, int kM>
__device__ __forceinline__ void load_a(uint32 (&a)[kM][4], uint32 tile, int k, bool half, int lane) {
    const uint32 at = Tile::moved(lane_rows_first<Tile>(tile, lane), 0, k * 16);
    #pragma unroll
    for (int m = 0; m < kM; ++m) {
        if (half) {
            ldmatrix_x2(a[m][0], a[m][1], at + m * 16 * Tile::kRowBytes);
        } else {
            ldmatrix_x4(a[m], at + m * 16 * Tile::kRowBytes);
        }
    }
}

// As load_a for a k16 step, for gemm_step_trans.
template <class Tile, int kM>
__device__ __forceinline__ void load_a_for_trans(uint32 (&a)[kM][4], uint32 tile, int k, int lane) { load_a<Tile>(a, tile, k, false, lane); }

// C += A B^T for one k-step: A in registers, B stored [n][k].
template <class TileB, int kM, int kN>
__device__ __forceinline__ void gemm_step(float (&c)[kM][kN][4], const uint32 (&a)[kM][4], uint32 tile_b, int k, bool half, int lane) {
    static_assert(kN % 2 == 0, "B operands are loaded in pairs");
    #pragma unroll
    for (int n = 0; n < kN; n += 2) {
        if (half) {
            uint32 b0, b1;
            ldmatrix_x2(b0, b1, TileB::place(tile_b, n * 8 + lane % 16, k * 2));
            #pragma unroll
            for (int m = 0; m < kM; ++m) mma_k8(c[m][n], a[m], b0), mma_k8(c[m][n + 1], a[m], b1);
        } else {
            uint32 b[4];
            ldmatrix_x4(b, TileB::moved(lane_cols_first<TileB>(tile_b, lane), n * 8, k * 16));
            #pragma unroll
            for (int m = 0; m < kM; ++m) mma_k16(c[m][n], a[m], b[0], b[1]), mma_k16(c[m][n + 1], a[m], b[2], b[3]);
        }
    }
}

// C += A B^T over the tiles' whole inner dimension, both operands in shared memory.
template <class TileA, class TileB, int kM, int kN>
__device__ __forceinline__ void gemm(float (&c)[kM][kN][4], uint32 tile_a, uint32 tile_b, int lane) {
    #pragma unroll
    for (int k = 0; k < (TileA::kCols + 15) / 16; ++k) {
        const bool half = k == TileA::kCols / 16;
        uint32 a[kM][4];
        load_a<TileA>(a, tile_a, k, half, lane);
        gemm_step<TileB>(c, a, tile_b, k, half, lane);
    }
}
// As gemm, with A's k-steps held in registers.
template <class TileB, int kM, int kN, int kSteps>
__device__ __forceinline__ void gemm_regs(float (&c)[kM][kN][4], const uint32 (&a)[kSteps][kM][4], uint32 tile_b, int lane) {
    #pragma unroll
    for (int k = 0; k < kSteps; ++k) gemm_step<TileB>(c, a[k], tile_b, k, k == TileB::kCols / 16, lane);
}

// C += A B for one k16 step: A in registers, B stored [k][n], its address moved to the step's 16
// rows. `first_col` is the first of B's columns that C has.
template <class TileB, int kM, int kN>
__device__ __forceinline__ void gemm_step_trans(float (&c)[kM][kN][4], const uint32 (&a)[kM][4], uint32 tile_b, int lane, int first_col = 0) {
    const uint32 at = TileB::moved(lane_rows_first<TileB>(tile_b, lane), 0, first_col);
    #pragma unroll
    for (int n = 0; n + 1 < kN; n += 2) {
        uint32 b[4];
        ldmatrix_x4_trans(b, TileB::moved(at, 0, n * 8));
        #pragma unroll
        for (int m = 0; m < kM; ++m) mma_k16(c[m][n], a[m], b[0], b[1]), mma_k16(c[m][n + 1], a[m], b[2], b[3]);
    }
    if constexpr (kN % 2 != 0) {
        uint32 b0, b1;
        ldmatrix_x2_trans(b0, b1, TileB::moved(at, 0, (kN - 1) * 8));
        #pragma unroll
        for (int m = 0; m < kM; ++m) mma_k16(c[m][kN - 1], a[m], b0, b1);
    }
}

// Loads one k16 step of kM 16-row A operands stored [k][m]. `tile` is the address of the step's
// first row and first m.
template <class Tile, int kM>
__device__ __forceinline__ void load_a_trans(uint32 (&a)[kM][4], uint32 tile, int lane) {
    const uint32 at = lane_cols_first<Tile>(tile, lane);
    #pragma unroll
    for (int m = 0; m < kM; ++m) ldmatrix_x4_trans(a[m], at + m * 32);
}
