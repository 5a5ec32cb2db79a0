// The sum of O over many blocks of keys, for a consumer of the sm90 forward kernel for e4m3.
//
// wgmma cuts each product of 8 bits to 13 bits behind the first bit of the sum before it adds the
// product. If V's elements have one sign, a sum grows with the number of keys and cuts off more and
// more. On an H100 the result was 18 % too small after 16,384 keys, and 0.5 % after 512
// (docs/tuning/eight-bits.md). So after every kPromoteBlocks blocks the accumulator moves to the
// tile's rows of the output tensor, over a sum of weights, and begins again at 0. No other CTA
// writes these rows.
//
// Blocks with a mask come first, and are few unless there is a window or a block mask. Elsewhere
// their steps have no code for a move: it waits for the next block without a mask.

#include "device/attention/narrow_softmax.cuh"
#include "device/numeric.cuh"
#include "sm90/forward_fp8/multiply.cuh"

// Blocks of 2,048 keys. They make the result 3 % too small at most. Rounding the weights to e4m3
// leaves an error of 2.5 %.
constexpr int kPromoteBlocks = (2048 + kBlockN / 2) / kBlockN;

// The first of a lane's two rows in the output tensor.
struct OutputRows {
    uint16* at;
    int64 stride;  // between rows, in elements
    int left;      // rows that exist from this one on
};

// What a lane keeps in the output tensor: its own elements of O in 16 bits. The lanes of a quad
// share 64 bytes of a row, in an order of their own. So no lane needs another lane's elements, and
// all loads are in flight together.
struct KeptRows {
    static constexpr int kGroups = kOTiles / 4;  // of four accumulator tiles: 16 bytes a lane and row
    static constexpr bool kHasRest = kOTiles % 4 != 0;  // two tiles more: 8 bytes
    static_assert(kOTiles % 2 == 0, "a row is a multiple of 16 columns");

    uint4 groups[2][kGroups > 0 ? kGroups : 1];
    uint2 rest[2];

    __device__ __forceinline__ void load(const OutputRows& rows, int lane) {
        #pragma unroll
        for (int r = 0; r < 2; ++r) {
            const bool exists = r * 8 < rows.left;
            const uint16* row = rows.at + r * 8 * rows.stride;
            #pragma unroll
            for (int n = 0; n < kGroups; ++n) {
                groups[r][n] = exists ? *reinterpret_cast<const uint4*>(row + n * 32 + lane % 4 * 8) : make_uint4(0, 0, 0, 0);
            }
            if constexpr (kHasRest) rest[r] = exists ? *reinterpret_cast<const uint2*>(row + kGroups * 32 + lane % 4 * 4) : make_uint2(0, 0);
        }
    }

    __device__ __forceinline__ void add_to(Output& o, const float (&factor)[2]) const {
        const auto add = [&](int n, int r, uint32 word) {
            o[n][2 * r] = fmaf(unpack(uint16(word)), factor[r], o[n][2 * r]);
            o[n][2 * r + 1] = fmaf(unpack(uint16(word >> 16)), factor[r], o[n][2 * r + 1]);
        };
        #pragma unroll
        for (int r = 0; r < 2; ++r) {
            #pragma unroll
            for (int n = 0; n < kGroups; ++n) {
                const uint4 w = groups[r][n];
                add(4 * n, r, w.x), add(4 * n + 1, r, w.y), add(4 * n + 2, r, w.z), add(4 * n + 3, r, w.w);
            }
            if constexpr (kHasRest) add(4 * kGroups, r, rest[r].x), add(4 * kGroups + 1, r, rest[r].y);
        }
    }

    // Stores O times `factor`.
    static __device__ __forceinline__ void store(const Output& o, const float (&factor)[2], const OutputRows& rows, int lane) {
        #pragma unroll
        for (int r = 0; r < 2; ++r) {
            if (r * 8 >= rows.left) continue;
            uint16* row = rows.at + r * 8 * rows.stride;
            const auto word = [&](int n) { return pack2(o[n][2 * r] * factor[r], o[n][2 * r + 1] * factor[r]); };
            #pragma unroll
            for (int n = 0; n < kGroups; ++n) {
                const uint4 words = make_uint4(word(4 * n), word(4 * n + 1), word(4 * n + 2), word(4 * n + 3));
                *reinterpret_cast<uint4*>(row + n * 32 + lane % 4 * 8) = words;
            }
            if constexpr (kHasRest) {
                const uint2 words = make_uint2(word(4 * kGroups), word(4 * kGroups + 1));
                *reinterpret_cast<uint2*>(row + kGroups * 32 + lane % 4 * 4) = words;
            }
        }
    }
};

struct Promoted {
    float factor[2];  // of the lane's two rows in the output tensor
    int blocks;       // that the accumulator has added up since it was empty
    bool has_moved;

    // A tile begins: no block is in the accumulator.
    __device__ __forceinline__ void clear() { blocks = 0, has_moved = false; }
    // Counts a block; true if the accumulator moves now.
    __device__ __forceinline__ bool add_block() { return ++blocks >= kPromoteBlocks; }

    // A move of the softmax's references scales all of O.
    __device__ __forceinline__ void rescale(const float (&by)[2]) { factor[0] *= by[0], factor[1] *= by[1]; }

    // Adds the output rows to the accumulator.
    __device__ __forceinline__ void add_to(Output& o, const OutputRows& rows, int lane) const {
        if (!has_moved) return;
        KeptRows kept;
        kept.load(rows, lane);
        kept.add_to(o, factor);
    }
    // Moves the accumulator to the output rows, over the sums of weights `over`.
    __device__ __forceinline__ void move(Output& o, const OutputRows& rows, const float (&over)[2], int lane) {
        add_to(o, rows, lane);
        // A row without keys has the sum 0.
        const float inverse[2] = {over[0] > 0.f ? exp2_approx(-log2_approx(over[0])) : 0.f, over[1] > 0.f ? exp2_approx(-log2_approx(over[1])) : 0.f};
        KeptRows::store(o, inverse, rows, lane);
        factor[0] = over[0], factor[1] = over[1], blocks = 0, has_moved = true;
    }
};
