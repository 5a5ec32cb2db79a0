// Q and weights as fp16, beside keys that become fp16 in registers. products/keys_eight.cuh and
// transposed.cuh use it.
//
// Products are of fp16 for a q in bf16 too, since keys become fp16 in a quarter of the
// instructions. Q is divided by a power of two for each row, so that its range is enough, and
// scores are multiplied by it. Beside int4 a q in fp16 is scaled too, because load_query divides by
// 16. Weights are at most 2^8, or 2^13 with scales of v, or 2^14 beside int4.

#include "device/layout/key_unit.cuh"
#include "device/numeric.cuh"
#include "device/ptx/eight.cuh"
#include "device/ptx/shared.cuh"

constexpr bool kConvertsQuery = kIsBf16 || kKeyFormat == kInt4;

// Turns a tile of Q from bf16 or fp16 to fp16. A row is divided by a power of two that puts its
// largest element at 2^14, and the padding behind the row holds the power. All kThreads threads
// take part; the caller synchronises before and after.
template <class Tile, int kThreads>
__device__ __forceinline__ void convert_query(uint32 tile, int thread) {
    static_assert(Tile::kRowBytes >= Tile::kCols * 2 + 4, "rows have padding");
    for (int row = thread / 32; row < Tile::kRows; row += kThreads / 32) {
        const uint32 at = tile + row * Tile::kRowBytes;
        uint32 largest = 0;  // bits of positive numbers are ordered as the numbers are
        for (int i = thread % 32; i < Tile::kCols / 2; i += 32) {
            const uint32 pair = load_word_in_order(at + i * 4);
            largest = max(largest, max(pair & 0x7fff, pair >> 16 & 0x7fff));
        }
        // The exponent of the power by which the row is multiplied, in fp32's field. An infinity
        // stays one.
        const uint32 top = largest_of_warp(largest);
        const uint32 exponent = kIsBf16 ? min(253u, 268u - (top >> 7)) : 156u - (top >> 10);
        const float power = __uint_as_float(exponent << 23);
        for (int i = thread % 32; i < Tile::kCols / 2; i += 32) {
            const uint32 pair = load_word_in_order(at + i * 4);
            store_word(at + i * 4, floats_to_fp16_pair(unpack(uint16(pair)) * power, unpack(uint16(pair >> 16)) * power));
        }
        if (thread % 32 == 0) store_word(at + Tile::kCols * 2, (254u - exponent) << 23);
    }
}

// The power of two by which scores of a row are multiplied.
template <class Tile>
__device__ __forceinline__ float load_row_factor(uint32 tile, int row) {
    return __uint_as_float(load_word_in_order(tile + row * Tile::kRowBytes + Tile::kCols * 2));
}

// Multiplies a lane's scores by the powers of two of its rows of Q.
template <int kM, int kN>
__device__ __forceinline__ void multiply_row_factors(float (&s)[kM][kN][4], const float (&of)[kM][2]) {
    if constexpr (kConvertsQuery) {
        #pragma unroll
        for (int m = 0; m < kM; ++m) {
            #pragma unroll
            for (int n = 0; n < kN; ++n) {
                #pragma unroll
                for (int i = 0; i < 4; ++i) s[m][n][i] *= of[m][i / 2];
            }
        }
    }
}

// The powers of two of a lane's rows of Q, by which it multiplies scores.
template <class Tile, int kM>
struct QueryFactors {
    float of[kM][2];

    __device__ __forceinline__ QueryFactors(uint32 tile, int lane) {
        if constexpr (kConvertsQuery) {
            #pragma unroll
            for (int m = 0; m < kM; ++m) {
                #pragma unroll
                for (int r = 0; r < 2; ++r) {
                    of[m][r] = load_row_factor<Tile>(tile, m * 16 + r * 8 + lane / 4);
                }
            }
        }
    }
    template <int kN>
    __device__ __forceinline__ void multiply(float (&s)[kM][kN][4]) const { multiply_row_factors(s, of); }
};

// Packs weights as one A operand.
__device__ __forceinline__ void pack_weights(uint32 (&a)[4], const float (&left)[4], const float (&right)[4]) {
    a[0] = floats_to_fp16_pair(left[0], left[1]);
    a[1] = floats_to_fp16_pair(left[2], left[3]);
    a[2] = floats_to_fp16_pair(right[0], right[1]);
    a[3] = floats_to_fp16_pair(right[2], right[3]);
}
