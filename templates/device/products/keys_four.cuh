// Warp-level products of 16-bit operands with int4 rows in shared memory (src/four.rs), which
// become fp16 in registers, under the names that products/keys_plain.cuh has for keys of q's type.
// The decode kernel uses them. Tiles of keys have columns of four numbers, then the rows' scales.
//
// ldmatrix hands each lane four consecutive bytes of a row, and transposed two of each of two rows.
// Both are eight numbers, of which a mask takes two at a time, 16 bits apart. So the order of the
// inner dimension in Q K^T, and of V's columns in O, differs from the 16-bit products':
//
// - In 32 inner dimensions, a lane has 8t to 8t + 7. The first k-step has 8t, 8t + 4, 8t + 1 and
//   8t + 5 where mma wants 2t, 2t + 1, 2t + 8 and 2t + 9, the second one the two columns behind
//   these. Q is loaded in the same order (load_query), and sums do not depend on it.
// - Each fourth column of 32 of V makes one accumulator. A lane therefore holds the columns 8t to
//   8t + 7 (each_pair).
//
// The scales of a row are read from its end, four groups at a time.

#include "device/attention/no_key_scales.cuh"
#include "device/products/fp16_query.cuh"
#include "device/products/gemm_sm80.cuh"

constexpr int kKSteps = kHeadDim / 16;
static_assert(kHeadDim % kKeyGroup == 0 && kHeadDimV % kKeyGroup == 0, "a row is whole groups");
static_assert(kKeyGroup % 32 == 0, "32 columns have one scale");
static_assert(kWarpsV == 1, "a warp has whole rows of V");

// Two of a word's eight numbers as fp16: the ones at 4 kPlace bits in either half.
template <int kPlace>
__device__ __forceinline__ uint32 numbers_at(uint32 word) {
    constexpr uint32 k1024 = 0x64006400, k1Over16 = 0x2c002c00, kMinus64 = 0xd400d400;
    const uint32 low = kPlace < 2 ? word : word >> 8;
    if constexpr (kPlace % 2 == 0) {
        return subtract_fp16_pairs(masked_with_ones<0x000f000f, k1024>(low), k1024);  // the bits of 1024 + n
    } else {
        return fma_fp16_pairs(masked_with_ones<0x00f000f0, k1024>(low), k1Over16, kMinus64);  // of 1024 + 16 n
    }
}

// A word's numbers times scales plus zeros: pair i has the numbers at 4i bits in either half.
__device__ __forceinline__ void dequantise(uint32 (&pairs)[4], uint32 word, uint32 scales, uint32 zeros) {
    pairs[0] = fma_fp16_pairs(numbers_at<0>(word), scales, zeros);
    pairs[1] = fma_fp16_pairs(numbers_at<1>(word), scales, zeros);
    pairs[2] = fma_fp16_pairs(numbers_at<2>(word), scales, zeros);
    pairs[3] = fma_fp16_pairs(numbers_at<3>(word), scales, zeros);
}

// The scales and zeros of four groups of a row of kDim columns, from group `four` on, a multiple of
// 4.
template <class Tile, int kDim>
__device__ __forceinline__ uint4 load_groups(uint32 tile, int row, int four) {
    return load_four_words(Tile::place(tile, row, kDim / 32 + four / 4));
}
__device__ __forceinline__ uint32 word_of(const uint4& words, int i) {
    return i == 0 ? words.x : i == 1 ? words.y : i == 2 ? words.z : words.w;
}

// One k-step of a warp's rows of Q.
template <class Tile, int kM>
__device__ __forceinline__ void load_query(uint32 (&a)[kM][4], uint32 tile, int k, int lane) {
    const uint32 at = tile + (lane / 4 * Tile::kStride + k / 2 * 32 + lane % 4 * 8) * 2 + k % 2 * 4;
    #pragma unroll
    for (int m = 0; m < kM; ++m) {
        #pragma unroll
        for (int r = 0; r < 2; ++r) {
            const uint32 row = at + (m * 16 + r * 8) * Tile::kRowBytes;
            const uint32 first = load_word(row), second = load_word(row + 8);
            a[m][r] = permute_bytes(first, second, 0x5410), a[m][2 + r] = permute_bytes(first, second, 0x7632);
        }
    }
}

// C += A B^T for the 32 columns of two k-steps. `word` has a lane's eight numbers of a key, and
// `group` the scale and the zero of them.
template <int kM, int kN>
__device__ __forceinline__ void multiply_word(float (&c)[kM][kN][4], int n, const uint32 (&a)[kM][4], const uint32 (&next)[kM][4], uint32 word, uint32 group) {
    uint32 b[4];
    dequantise(b, word, low_twice(group), high_twice(group));
    #pragma unroll
    for (int m = 0; m < kM; ++m) mma_k16_fp16(c[m][n], a[m], b[0], b[1]);
    #pragma unroll
    for (int m = 0; m < kM; ++m) mma_k16_fp16(c[m][n], next[m], b[2], b[3]);
}

// S += Q K^T. query(a, k) gives a k-step of Q.
template <class TileK, int kM, int kN, class Query>
__device__ __forceinline__ void multiply_rows(float (&s)[kM][kN][4], uint32 tile_k, int lane, const Query& query) {
    static_assert(kN % 2 == 0, "B operands are loaded in pairs");
    constexpr int kChunks = kHeadDim / 32;
    uint4 groups[kN];
    #pragma unroll
    for (int chunk = 0; chunk < kChunks; chunk += 2) {
        if (chunk * 32 % (4 * kKeyGroup) == 0) {
            #pragma unroll
            for (int n = 0; n < kN; ++n) groups[n] = load_groups<TileK, kHeadDim>(tile_k, n * 8 + lane / 4, chunk * 32 / kKeyGroup);
        }
        uint32 q[4][kM][4];
        #pragma unroll
        for (int k = 0; k < 4 && chunk * 2 + k < kKSteps; ++k) query(q[k], chunk * 2 + k);
        #pragma unroll
        for (int n = 0; n < kN; n += 2) {
            uint32 words[4];
            if (chunk + 1 < kChunks) {
                ldmatrix_x4(words, TileK::moved(lane_cols_first<TileK>(tile_k, lane), n * 8, chunk * 8));
            } else {
                ldmatrix_x2(words[0], words[2], TileK::place(tile_k, n * 8 + lane % 16, chunk));
            }
            #pragma unroll
            for (int i = 0; i < 2; ++i) {
                multiply_word(s, n + i, q[0], q[1], words[2 * i], word_of(groups[n + i], chunk * 32 / kKeyGroup % 4));
                if (chunk + 1 < kChunks) {
                    multiply_word(s, n + i, q[2], q[3], words[2 * i + 1], word_of(groups[n + i], (chunk + 1) * 32 / kKeyGroup % 4));
                }
            }
        }
    }
}

// The same with Q in registers or in shared memory.
template <class TileK, int kM, int kN, int kSteps>
__device__ __forceinline__ void multiply_query(float (&s)[kM][kN][4], const uint32 (&q)[kSteps][kM][4], uint32 tile_k, int lane) {
    multiply_rows<TileK>(s, tile_k, lane, [&](uint32 (&a)[kM][4], int k) {
        #pragma unroll
        for (int m = 0; m < kM; ++m) {
            #pragma unroll
            for (int i = 0; i < 4; ++i) a[m][i] = q[k][m][i];
        }
    });
}
template <class TileQ, class TileK, int kM, int kN>
__device__ __forceinline__ void multiply_query(float (&s)[kM][kN][4], uint32 tile_q, uint32 tile_k, int lane) {
    multiply_rows<TileK>(s, tile_k, lane, [&](uint32 (&a)[kM][4], int k) { load_query<TileQ>(a, tile_q, k, lane); });
}

// O += P V for one k16 step. `tile_v` is moved to its rows.
template <class TileB, int kM, int kN>
__device__ __forceinline__ void multiply_weights(float (&c)[kM][kN][4], const uint32 (&a)[kM][4], uint32 tile_b, int lane, int = 0) {
    static_assert(kN % 4 == 0, "32 columns are four accumulators");
    const uint32 at = lane_rows_first<TileB>(tile_b, lane);
    uint4 groups[4];  // of the keys 2t, 2t + 1, 2t + 8 and 2t + 9
    #pragma unroll
    for (int n = 0; n < kN; n += 8) {
        if (n * 8 % (4 * kKeyGroup) == 0) {
            #pragma unroll
            for (int i = 0; i < 4; ++i) groups[i] = load_groups<TileB, kHeadDimV>(tile_b, lane % 4 * 2 + i % 2 + i / 2 * 8, n * 8 / kKeyGroup);
        }
        uint32 words[4];
        if (n + 4 < kN) {
            ldmatrix_x4_trans(words, TileB::moved(at, 0, n * 2));
        } else {
            ldmatrix_x2_trans(words[0], words[1], TileB::moved(at, 0, n * 2));
        }
        #pragma unroll
        for (int i = 0; i < 2 && n + 4 * i < kN; ++i) {
            const int group = (n + 4 * i) * 8 / kKeyGroup % 4;
            uint32 b[2][4];
            #pragma unroll
            for (int half = 0; half < 2; ++half) {
                const uint32 even = word_of(groups[2 * half], group), odd = word_of(groups[2 * half + 1], group);
                dequantise(b[half], words[2 * i + half], permute_bytes(even, odd, 0x5410), permute_bytes(even, odd, 0x7632));
            }
            #pragma unroll
            for (int column = 0; column < 4; ++column) {
                #pragma unroll
                for (int m = 0; m < kM; ++m) mma_k16_fp16(c[m][n + 4 * i + column], a[m], b[0][column], b[1][column]);
            }
        }
    }
}

// A lane's first column of O.
__device__ __forceinline__ int first_col(int lane) { return lane % 4 * 8; }

// Calls store(column, first, second) for the pairs of neighbours that a lane holds of a row of O.
// Columns are counted from first_col.
template <int kOTiles, class Store>
__device__ __forceinline__ void each_pair(const float (&o)[kOTiles][4], int r, const Store& store) {
    #pragma unroll
    for (int n = 0; n < kOTiles; n += 4) {
        #pragma unroll
        for (int half = 0; half < 2; ++half) {
            store(n * 8 + 4 * half, o[n][2 * r + half], o[n + 1][2 * r + half]);
            store(n * 8 + 4 * half + 2, o[n + 2][2 * r + half], o[n + 3][2 * r + half]);
        }
    }
}
