// Warp-level products of Q and weights with int4 rows in shared memory (src/four.rs). The decode
// kernel uses them. Tiles of keys have columns of four numbers, then the rows' scales and zeros.
//
// A number is not scaled before it is multiplied. A mask takes two of a word's eight numbers at a
// time, 16 bits apart, and what it leaves are fp16 denormals: n times 2^-24, or 2^-20 where the
// number has the upper half of a byte. A sum over a group of columns is scaled in fp32 (Q K^T), or
// the weights of its keys are before (P V). The zeros' part is one product for four groups, with
// the scales and zeros as they lie in the row.
//
// Products are transposed (transposed.cuh), so that a lane scales the sums of two keys.
//
// - In 32 inner dimensions of Q K^T, a lane has 8t to 8t + 7. The first k-step has 8t, 8t + 4,
//   8t + 1 and 8t + 5 where mma wants 2t, 2t + 1, 2t + 8 and 2t + 9, the second one the two columns
//   behind these. Q is loaded in the same order (load_query), and sums do not depend on it.
// - A lane has the columns 4g to 4g + 3 of 32 of V, as two accumulators with two columns each.
//
// The scales of a row are read from its end, four groups at a time.

#include "device/attention/group_scales.cuh"
#include "device/products/transposed.cuh"

constexpr int kKSteps = kHeadDim / 16;
static_assert(kHeadDim % kKeyGroup == 0 && kHeadDimV % kKeyGroup == 0, "a row is whole groups");
static_assert(kKeyGroup % 32 == 0, "32 columns have one scale");
static_assert(kWarpsV == 1, "a warp has whole rows of V");

// A word's numbers as fp16: pair i has the numbers at 4i bits in either half, times 2^-24 (0 and 2)
// or 2^-20 (1 and 3).
__device__ __forceinline__ void split_numbers(uint32 (&pairs)[4], uint32 word) {
    const uint32 upper = word >> 8;
    pairs[0] = word & 0x000f000f, pairs[1] = word & 0x00f000f0;
    pairs[2] = upper & 0x000f000f, pairs[3] = upper & 0x00f000f0;
}

// The scales and zeros of four groups of a row of kDim columns, from the four groups `four` on.
template <class Tile, int kDim>
__device__ __forceinline__ uint4 load_groups(uint32 tile, int row, int four) {
    return load_four_words(Tile::place(tile, row, kDim / 32 + four));
}
__device__ __forceinline__ uint32 word_of(const uint4& words, int i) {
    return i == 0 ? words.x : i == 1 ? words.y : i == 2 ? words.z : words.w;
}

// ---- Q

// One k-step of a warp's rows of Q as B operands. The numbers of the second word are 16 times as
// large as those of the first, so Q is divided by 16 there.
template <class Tile, int kM>
__device__ __forceinline__ void load_query(uint32 (&b)[kM][2], uint32 tile, int k, int lane) {
    const uint32 at = tile + (lane / 4 * Tile::kStride + k / 2 * 32 + lane % 4 * 8) * 2 + k % 2 * 4;
    #pragma unroll
    for (int m = 0; m < kM; ++m) {
        const uint32 first = load_word(at + m * 8 * Tile::kRowBytes), second = load_word(at + m * 8 * Tile::kRowBytes + 8);
        b[m][0] = permute_bytes(first, second, 0x5410);
        b[m][1] = multiply_fp16_pairs(permute_bytes(first, second, 0x7632), 0x2c002c00);  // 1/16
    }
}

// What the zeros of K are multiplied by: the sums of Q over a group's columns, times 2^-6 so that
// fp16 holds them, as the sum of two fp16 numbers.
constexpr int kQueryFours = (kHeadDim / kKeyGroup + 3) / 4;

template <class Tile, int kM>
struct QuerySums {
    uint32 of[kQueryFours][kM][2];

    __device__ __forceinline__ QuerySums(uint32 tile, int lane) {
        #pragma unroll
        for (int four = 0; four < kQueryFours; ++four) {
            const int group = four * 4 + lane % 4;
            #pragma unroll
            for (int m = 0; m < kM; ++m) {
                const uint32 at = tile + (m * 8 + lane / 4) * Tile::kRowBytes + group * (kKeyGroup * 2);
                float sum = 0.f;
                for (int i = 0; i < kKeyGroup && group < kHeadDim / kKeyGroup; i += 2) {
                    const uint32 pair = load_word(at + i * 2);
                    sum += fp16_to_float(uint16(pair)) + fp16_to_float(uint16(pair >> 16));
                }
                sum *= 1.f / 64;
                const uint32 upper = floats_to_fp16_pair(0.f, sum);
                of[four][m][0] = upper;
                of[four][m][1] = floats_to_fp16_pair(0.f, sum - fp16_to_float(uint16(upper >> 16)));
            }
        }
    }
};

// ---- Q K^T

// S = K Q^T without the factors of rows. query(b, k) gives a k-step of Q.
template <class TileK, int kM, int kN, class Query, class Sums>
__device__ __forceinline__ void multiply_rows(float (&s)[kM][kN][4], uint32 tile_k, int lane, const Query& query, const Sums& sums) {
    constexpr int kChunks = kHeadDim / 32, kGroups = kHeadDim / kKeyGroup;
    #pragma unroll
    for (int n = 0; n < kN; ++n) {
        // The zeros' part, 2^-6 of it, becomes 2^-24 of it, as sums of numbers are.
        #pragma unroll
        for (int four = 0; four < kQueryFours; ++four) {
            uint32 a[4];
            ldmatrix_x2(a[0], a[1], TileK::place(tile_k, n * 16 + lane % 16, kChunks + four));
            if (four * 4 + 4 > kGroups && four * 4 + lane % 4 >= kGroups) a[0] = a[1] = 0;  // padding
            a[2] = a[0], a[3] = a[1];
            #pragma unroll
            for (int m = 0; m < kM; ++m) mma_transposed(s[m][n], a, sums.of[four][m][0], sums.of[four][m][1]);
        }
        #pragma unroll
        for (int m = 0; m < kM; ++m) {
            #pragma unroll
            for (int i = 0; i < 4; ++i) s[m][n][i] *= 0x1p-18f;
        }
    }
    #pragma unroll
    for (int n = 0; n < kN; ++n) {
        uint4 groups[2];  // of the keys g and g + 8
        float part[kM][4];
        uint32 words[4];
        #pragma unroll
        for (int chunk = 0; chunk < kChunks; ++chunk) {
            const int group = chunk * 32 / kKeyGroup;
            if (chunk * 32 % (4 * kKeyGroup) == 0) {
                #pragma unroll
                for (int h = 0; h < 2; ++h) groups[h] = load_groups<TileK, kHeadDim>(tile_k, n * 16 + h * 8 + lane / 4, group / 4);
            }
            if (chunk * 32 % kKeyGroup == 0) {
                #pragma unroll
                for (int m = 0; m < kM; ++m) part[m][0] = part[m][1] = part[m][2] = part[m][3] = 0.f;
            }
            if (chunk % 2 == 0) {
                if (chunk + 1 < kChunks) {
                    if constexpr (TileK::kMoves) ldmatrix_x4(words, TileK::moved(lane_cols_first<TileK>(tile_k, lane), n * 16, chunk * 8));
                    else ldmatrix_x4(words, lane_cols_at<TileK>(tile_k, lane, n * 16, chunk));
                } else {
                    ldmatrix_x2(words[0], words[2], TileK::place(tile_k, n * 16 + lane % 16, chunk));
                }
            }
            uint32 left[4], right[4];  // of the keys g and g + 8
            split_numbers(left, words[chunk % 2]);
            split_numbers(right, words[chunk % 2 + 2]);
            #pragma unroll
            for (int k = 0; k < 2; ++k) {
                const uint32 a[4] = {left[2 * k], right[2 * k], left[2 * k + 1], right[2 * k + 1]};
                uint32 b[kM][2];
                query(b, chunk * 2 + k);
                #pragma unroll
                for (int m = 0; m < kM; ++m) mma_transposed(part[m], a, b[m][0], b[m][1]);
            }
            if ((chunk + 1) * 32 % kKeyGroup == 0) {
                #pragma unroll
                for (int h = 0; h < 2; ++h) {
                    const float scale = fp16_to_float(uint16(word_of(groups[h], group % 4)));
                    #pragma unroll
                    for (int m = 0; m < kM; ++m) {
                        s[m][n][h] = fmaf(part[m][h], scale, s[m][n][h]), s[m][n][2 + h] = fmaf(part[m][2 + h], scale, s[m][n][2 + h]);
                    }
                }
            }
        }
    }
}

// The 2^24 that numbers lack, then the factors of rows: the product of both is infinite for rows
// with an element of 2^118 or more.
template <class Factors, int kM, int kN>
__device__ __forceinline__ void multiply_factors(float (&s)[kM][kN][4], const Factors& factors) {
    #pragma unroll
    for (int m = 0; m < kM; ++m) {
        #pragma unroll
        for (int r = 0; r < 2; ++r) {
            #pragma unroll
            for (int i = 0; i < kN * 2; ++i) {
                float& score = s[m][i / 2][2 * r + i % 2];
                score = score * 0x1p24f * factors.of[m][r];
            }
        }
    }
}

// ---- P V

// O += P V for one k16 step. `tile_v` is moved to its rows. O's last tiles have the zeros' part, a
// group in each second row of mma.
template <class TileV, int kM, int kO, class Scales>
__device__ __forceinline__ void multiply_weights(float (&o)[kM][kO][4], const uint32 (&b)[kM][2], uint32 tile_v, int lane, Scales& scales) {
    constexpr int kChunks = kHeadDimV / 32, kGroups = kHeadDimV / kKeyGroup;
    const uint32 at = lane_rows_first<TileV>(tile_v, lane);
    #pragma unroll
    for (int four = 0; four * 4 < kGroups; four += 2) {
        uint32 a[4];
        if (four * 4 + 4 < kGroups) {
            uint32 words[4];
            ldmatrix_x4_trans(words, TileV::place(tile_v, lane % 16, kChunks + four + lane / 16));
            a[0] = words[0], a[2] = words[1], a[1] = words[2], a[3] = words[3];
        } else {
            ldmatrix_x2_trans(a[0], a[2], TileV::place(tile_v, lane % 16, kChunks + four));
            a[1] = a[3] = 0;
        }
        #pragma unroll
        for (int m = 0; m < kM; ++m) mma_transposed(o[m][kChunks * 2 + four / 2], a, b[m][0], b[m][1]);
    }

    uint32 pairs[4][2];  // scales of the keys 2t and 2t + 1 (h = 0), and of 2t + 8 and 2t + 9
    uint32 scaled[kM][2], words[4];
    #pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
        const int group = chunk * 32 / kKeyGroup;
        if (chunk * 32 % (4 * kKeyGroup) == 0) {
            uint4 groups[4];
            #pragma unroll
            for (int i = 0; i < 4; ++i) groups[i] = load_groups<TileV, kHeadDimV>(tile_v, lane % 4 * 2 + i % 2 + i / 2 * 8, group / 4);
            #pragma unroll
            for (int i = 0; i < 4; ++i) {
                #pragma unroll
                for (int h = 0; h < 2; ++h) {
                    pairs[i][h] = group + i < kGroups ? permute_bytes(word_of(groups[2 * h], i), word_of(groups[2 * h + 1], i), 0x5410) : 0;
                }
            }
            scales.fit(pairs, o);
        }
        if (chunk * 32 % kKeyGroup == 0) {
            #pragma unroll
            for (int i = 0; i < kM * 2; ++i) scaled[i / 2][i % 2] = multiply_fp16_pairs(b[i / 2][i % 2], pairs[group % 4][i % 2]);
        }
        if (chunk % 2 == 0) {
            if (chunk + 1 < kChunks) {
                if constexpr (TileV::kMoves) ldmatrix_x4_trans(words, TileV::moved(at, 0, chunk * 8));
                else ldmatrix_x4_trans(words, lane_rows_at<TileV>(tile_v, lane, chunk));
            } else {
                if constexpr (TileV::kMoves) ldmatrix_x2_trans(words[0], words[1], TileV::moved(at, 0, chunk * 8));
                else ldmatrix_x2_trans(words[0], words[1], lane_rows_at<TileV>(tile_v, lane, chunk));
            }
        }
        uint32 left[4], right[4];  // of the keys 2t and 2t + 1, and of those 8 behind
        split_numbers(left, words[chunk % 2 * 2]);
        split_numbers(right, words[chunk % 2 * 2 + 1]);
        #pragma unroll
        for (int i = 0; i < 2; ++i) {
            const uint32 a[4] = {left[2 * i], left[2 * i + 1], right[2 * i], right[2 * i + 1]};
            #pragma unroll
            for (int m = 0; m < kM; ++m) mma_transposed(o[m][chunk * 2 + i], a, scaled[m][0], scaled[m][1]);
        }
    }
}

// A lane's first column of O.
__device__ __forceinline__ int first_col(int lane) { return lane / 4 * 4; }

// Calls store(column, first, second) for the pairs of neighbours that a lane holds of a row of O.
// Columns are counted from first_col.
template <int kOTiles, class Store>
__device__ __forceinline__ void each_pair(const float (&o)[kOTiles][4], int r, const Store& store) {
    #pragma unroll
    for (int n = 0; n < kHeadDimV / 16; ++n) store(n / 2 * 32 + n % 2 * 2, o[n][2 * r], o[n][2 * r + 1]);
}
