// The sum of O over many blocks of keys, for a consumer of the sm90 forward kernel for e4m3.
//
// wgmma cuts each product of 8 bits to 13 bits behind the first bit of the sum before it adds the
// product. If V's elements have one sign, a sum grows with the number of keys and cuts off more and
// more. On an H100 the result was 18 % too small after 16,384 keys, and 0.5 % after 512
// (docs/tuning/eight-bits.md). So after every kPromoteBlocks blocks the accumulator moves to the
// tile's rows of the output tensor, over a sum of weights, and begins again at 0. No other CTA
// writes these rows, and each lane reads what it wrote itself.

#include "device/attention/narrow_softmax.cuh"
#include "device/layout/store_rows.cuh"
#include "sm90/forward_fp8/multiply.cuh"

// Blocks of 1,024 keys. They make the result 1.5 % too small at most, where rounding the weights to
// e4m3 leaves an error of 2.6 %.
constexpr int kPromoteBlocks = (1024 + kBlockN / 2) / kBlockN;

// The first of a lane's two rows in the output tensor.
struct OutputRows {
    uint16* at;
    int64 stride;  // between rows, in elements
    int left;      // rows that exist from this one on
};

struct Promoted {
    float factor[2];  // of the lane's two rows in the output tensor

    // Whether the accumulator moves before the product of a block that so many blocks precede, and
    // whether it has moved by the end of so many blocks.
    static __device__ __forceinline__ bool moves(int blocks) { return blocks % kPromoteBlocks == 0; }
    static __device__ __forceinline__ bool has_moved(int blocks) { return blocks > kPromoteBlocks; }

    // A move of the softmax's references scales all of O.
    __device__ __forceinline__ void rescale(const float (&by)[2]) { factor[0] *= by[0], factor[1] *= by[1]; }

    // Adds the output rows to the accumulator.
    __device__ __forceinline__ void add_to(Output& o, const OutputRows& rows, int lane) const {
        add_rows(rows.at, rows.stride, o, factor, rows.left, lane);
    }
    // Moves the accumulator to the output rows, over the sums of weights `over`.
    __device__ __forceinline__ void move(Output& o, const OutputRows& rows, bool is_first, const float (&over)[2], int lane) {
        if (!is_first) add_to(o, rows, lane);
        const float inverse[2] = {over[0] > 0.f ? 1.f / over[0] : 0.f, over[1] > 0.f ? 1.f / over[1] : 0.f};
        ::rescale(o, inverse);
        store_rows(rows.at, rows.stride, o, rows.left, lane);
        factor[0] = over[0], factor[1] = over[1];
    }
};
