// Warp-level products of fp32 tiles by the tensor cores' tf32 products (PTX ISA, "mma.m16n8k8").
// Names and operands are those of gemm_sm80.cuh, so the sm80 kernels take either file. It knows
// tiles in shared memory but no mask and no pipeline.
//
// tf32 has 11 significant bits of fp32's 24. An element is split into two tf32 numbers, x = big +
// small, and a product takes three: small * big + big * small + big * big. The omitted terms are
// small * small and the last bit of a small, about 2^-23 of the product. Tensor cores truncate the
// bits that a sum does not hold, always towards 0, so long sums would drift there. Each k16 step is
// therefore summed from 0. An fp32 addition, which rounds to nearest, adds the step to the
// accumulator.
//
// Lane t of a quad holds two of 8 inner indices, in one of two orders. In pairs it holds 2t and 2t
// + 1, if one operand lies [k][..] or in an accumulator. Otherwise both operands lie [..][k], and
// it holds t and t + 4, as ldmatrix gives them. Any order gives the same sum if both operands have
// it.

#include "device/ptx/matrix.cuh"
#include "device/ptx/mma.cuh"
#include "device/ptx/shared.cuh"

using OperandA = uint32[2][4];  // 16 x 16: a lane's words of the two k8 halves, as fp32
using OperandB = uint32[2][2];  // 16 x 8

// The number of B operands that may be loaded before their products. A warp barrier stands between
// such groups. Without it the compiler loads all operands of a step, and registers spill.
constexpr int kTilesAhead = 2;

// Splits each element. `big` is rounded to nearest, so at most one of the 12 bits of `small` is cut
// off. A NaN becomes a NaN in `small`, whatever `big` becomes.
template <int kCount>
__device__ __forceinline__ void split(uint32 (&big)[2][kCount], uint32 (&small)[2][kCount], const uint32 (&x)[2][kCount]) {
    #pragma unroll
    for (int i = 0; i < 2 * kCount; ++i) {
        const uint32 rounded = (x[i / kCount][i % kCount] + 0x1000u) & 0xffffe000u;
        big[i / kCount][i % kCount] = rounded;
        small[i / kCount][i % kCount] = __float_as_uint(__uint_as_float(x[i / kCount][i % kCount]) - __uint_as_float(rounded));
    }
}

// kM A operands, split once for all B operands that they meet.
template <int kM>
struct SplitA {
    OperandA big[kM], small[kM];

    __device__ __forceinline__ explicit SplitA(const OperandA (&a)[kM]) {
        #pragma unroll
        for (int m = 0; m < kM; ++m) split(big[m], small[m], a[m]);
    }

    // C += A B for column tile n of each A operand. A half step takes the first halves alone.
    template <int kN>
    __device__ __forceinline__ void multiply(float (&c)[kM][kN][4], const OperandB& b, int n, bool half) const {
        OperandB big_b, small_b;
        split(big_b, small_b, b);
        #pragma unroll
        for (int m = 0; m < kM; ++m) {
            float sum[4] = {};
            // The small products come first, while the sum is small too.
            mma_tf32(sum, small[m][0], big_b[0]);
            if (!half) mma_tf32(sum, small[m][1], big_b[1]);
            mma_tf32(sum, big[m][0], small_b[0]);
            if (!half) mma_tf32(sum, big[m][1], small_b[1]);
            mma_tf32(sum, big[m][0], big_b[0]);
            if (!half) mma_tf32(sum, big[m][1], big_b[1]);
            #pragma unroll
            for (int i = 0; i < 4; ++i) c[m][n][i] += sum[i];
        }
    }
};

// Two neighbouring 16 x 8 accumulators as one 16 x 16 A operand, in pairs.
__device__ __forceinline__ void pack_a(OperandA& a, const float (&left)[4], const float (&right)[4]) {
    #pragma unroll
    for (int i = 0; i < 4; ++i) {
        a[0][i] = __float_as_uint(left[i % 2 * 2 + i / 2]);
        a[1][i] = __float_as_uint(right[i % 2 * 2 + i / 2]);
    }
}

// Loads one k-step of kM 16-row A operands stored [m][k], not in pairs. A k8 step (half) fills only
// the first halves.
template <class Tile, int kM>
__device__ __forceinline__ void load_a(OperandA (&a)[kM], uint32 tile, int k, bool half, int lane) {
    // The matrices have 8 rows of 16 bytes, which are 4 columns. They are rows 0-7 and rows 8-15,
    // then the same rows of the next columns.
    const uint32 at = tile + uint32(lane % 16) * Tile::kRowBytes + lane / 16 * 16 + k * 64;
    #pragma unroll
    for (int m = 0; m < kM; ++m) {
        ldmatrix_x4(a[m][0], at + m * 16 * Tile::kRowBytes);
        if (!half) ldmatrix_x4(a[m][1], at + m * 16 * Tile::kRowBytes + 32);
    }
}
// As load_a for a k16 step, but in pairs, for gemm_step_trans.
template <class Tile, int kM>
__device__ __forceinline__ void load_a_for_trans(OperandA (&a)[kM], uint32 tile, int k, int lane) {
    const uint32 at = tile + uint32(lane / 4) * Tile::kRowBytes + lane % 4 * 8 + k * 64;
    #pragma unroll
    for (int i = 0; i < kM * 4; ++i) {
        const int m = i / 4, half = i / 2 % 2, r = i % 2;  // r: rows g and g + 8
        const uint2 pair = load_two_words(at + (m * 16 + r * 8) * Tile::kRowBytes + half * 32);
        a[m][half][r] = pair.x, a[m][half][r + 2] = pair.y;
    }
}

// C += A B^T for one k-step: A in registers, B stored [n][k].
template <class TileB, int kM, int kN>
__device__ __forceinline__ void gemm_step(float (&c)[kM][kN][4], const OperandA (&a)[kM], uint32 tile_b, int k, bool half, int lane) {
    const SplitA<kM> split_a(a);
    // The matrices have 8 rows of 4 columns, from left to right.
    const uint32 at = tile_b + uint32(lane % 8) * TileB::kRowBytes + (half ? lane / 8 % 2 : lane / 8) * 16 + k * 64;
    #pragma unroll
    for (int n = 0; n < kN; ++n) {
        // Keeps the loads of later B operands behind the products before (kTilesAhead).
        if (n % kTilesAhead == 0) __syncwarp();
        uint32 words[4];
        if (half) {
            ldmatrix_x2(words[0], words[1], at + n * 8 * TileB::kRowBytes);
            words[2] = words[3] = 0;
        } else {
            ldmatrix_x4(words, at + n * 8 * TileB::kRowBytes);
        }
        const OperandB b = {{words[0], words[1]}, {words[2], words[3]}};
        split_a.multiply(c, b, n, half);
    }
}

// C = A B^T over the whole inner dimension by fp32 arithmetic, where the tensor cores gave a NaN.
// An infinity has no two parts. Its product with an operand whose small part is 0 would be NaN.
template <class TileA, class TileB, int kM, int kN>
__device__ __forceinline__ void redo_gemm(float (&c)[kM][kN][4], uint32 tile_a, uint32 tile_b, int lane) {
    #pragma unroll
    for (int m = 0; m < kM; ++m) {
        #pragma unroll
        for (int n = 0; n < kN; ++n) c[m][n][0] = c[m][n][1] = c[m][n][2] = c[m][n][3] = 0.f;
    }
    const uint32 at_a = tile_a + uint32(lane / 4) * TileA::kRowBytes, at_b = tile_b + uint32(lane % 4 * 2) * TileB::kRowBytes;
    #pragma unroll 1
    for (int k = 0; k < TileA::kCols * 4; k += 4) {
        #pragma unroll
        for (int i = 0; i < kM * kN * 4; ++i) {
            const int m = i / (kN * 4), n = i / 4 % kN, r = i / 2 % 2, col = i % 2;
            const float a = __uint_as_float(load_word(at_a + (m * 16 + r * 8) * TileA::kRowBytes + k));
            const float b = __uint_as_float(load_word(at_b + (n * 8 + col) * TileB::kRowBytes + k));
            c[m][n][i % 4] = fmaf(a, b, c[m][n][i % 4]);
        }
    }
}

// C += A B^T over the tiles' whole inner dimension, both operands in shared memory. C begins as 0.
template <class TileA, class TileB, int kM, int kN>
__device__ __forceinline__ void gemm(float (&c)[kM][kN][4], uint32 tile_a, uint32 tile_b, int lane) {
    #pragma unroll
    for (int k = 0; k < (TileA::kCols + 15) / 16; ++k) {
        const bool half = k == TileA::kCols / 16;
        OperandA a[kM];
        load_a<TileA>(a, tile_a, k, half, lane);
        gemm_step<TileB>(c, a, tile_b, k, half, lane);
    }
    float sum = 0.f;
    #pragma unroll
    for (int i = 0; i < kM * kN * 4; ++i) sum += c[i / (kN * 4)][i / 4 % kN][i % 4];
    if (__any_sync(0xffffffff, sum != sum)) redo_gemm<TileA, TileB>(c, tile_a, tile_b, lane);
}
// As gemm, with A's k-steps held in registers. fp32 kernels never do that, since a product may have
// to be repeated from shared memory.
template <class TileB, int kM, int kN, int kSteps>
__device__ __forceinline__ void gemm_regs(float (&c)[kM][kN][4], const OperandA (&a)[kSteps][kM], uint32 tile_b, int lane) {
    static_assert(kSteps == 0, "src/family/sm80 keeps no fp32 operand in registers");
}

// C += A B for one k16 step: A in registers and in pairs, B stored [k][n], its address moved to the
// step's 16 rows. Rows lie an odd number of 16 bytes apart. The four lanes of a column read rows
// that are two apart, so these rows begin in banks that are 8 apart.
template <class TileB, int kM, int kN>
__device__ __forceinline__ void gemm_step_trans(float (&c)[kM][kN][4], const OperandA (&a)[kM], uint32 tile_b, int lane) {
    const SplitA<kM> split_a(a);
    const uint32 at = tile_b + uint32(lane % 4 * 2) * TileB::kRowBytes + lane / 4 * 4;
    #pragma unroll
    for (int n = 0; n < kN; ++n) {
        if (n % kTilesAhead == 0) __syncwarp();
        OperandB b;
        #pragma unroll
        for (int i = 0; i < 4; ++i) b[i / 2][i % 2] = load_word(at + n * 32 + (i / 2 * 8 + i % 2) * TileB::kRowBytes);
        split_a.multiply(c, b, n, false);
    }
}

// Loads one k16 step of kM 16-row A operands stored [k][m], in pairs. `tile` is the address of the
// step's first row and first m.
template <class Tile, int kM>
__device__ __forceinline__ void load_a_trans(OperandA (&a)[kM], uint32 tile, int lane) {
    const uint32 at = tile + uint32(lane % 4 * 2) * Tile::kRowBytes + lane / 4 * 4;
    #pragma unroll
    for (int i = 0; i < kM * 8; ++i) {
        const int m = i / 8, half = i / 4 % 2, k = i / 2 % 2, r = i % 2;  // k of a pair; r: rows g and g + 8
        a[m][half][k * 2 + r] = load_word(at + (m * 16 + r * 8) * 4 + (half * 8 + k) * Tile::kRowBytes);
    }
}
