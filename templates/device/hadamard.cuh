// Rotates rows in fp32: y = H D x / sqrt(n). H is the Walsh-Hadamard matrix of n columns. n is the
// largest power of two that divides the row's columns, and H serves each block of n. D is a
// diagonal of signs. src/ops/quantize/rotation.rs has the formula of the signs and the same order
// of additions, so the bits are the same. It knows kThreads but no tensor.

#include "device/lane_row.cuh"

// The bits that D flips, for each chunk of a row's 16-bit elements.
struct SignMasks {
    uint4 chunks[kMostCols / kChunk];

    // Bit c % 32 of words[c / 32] is the sign of column c. A barrier must follow.
    __device__ __forceinline__ void fill(const uint32 (&words)[kMostCols / 32]) {
        for (int pair = threadIdx.x; pair < kMostCols / 2; pair += kThreads) {
            const uint32 bits = words[pair / 16] >> pair % 16 * 2;
            reinterpret_cast<uint32*>(chunks)[pair] = (bits & 1) << 15 | bits >> 1 << 31;
        }
    }
};

struct Hadamard {
    const SignMasks& signs;
    float factor;       // 1 / sqrt(n)
    int mixed_lanes;    // neighbouring lanes that have a block's first or second chunks
    bool mixes_chunks;  // a block has both chunks of its lanes
    int first, second;  // the lane's chunks

    // `lanes` share a row.
    __device__ __forceinline__ Hadamard(const SignMasks& signs, float factor, int head_dim, const LaneCols& cols, int lanes)
        : signs(signs), factor(factor), first(cols.first / kChunk), second(cols.second / kChunk) {
        const int chunks = (head_dim & -head_dim) / kChunk;
        mixed_lanes = min(chunks, lanes), mixes_chunks = chunks > lanes;
    }

    static __device__ __forceinline__ void flip(Chunk<uint16>& chunk, const uint4& signs) {
        chunk.words[0] ^= signs.x, chunk.words[1] ^= signs.y, chunk.words[2] ^= signs.z, chunk.words[3] ^= signs.w;
    }

    // All lanes of the warp call it. Columns past the row's end are 0 and stay 0.
    __device__ __forceinline__ LaneRow rotated(RawRow raw) const {
        flip(raw.chunks[0], signs.chunks[first]), flip(raw.chunks[1], signs.chunks[second]);
        LaneRow row(raw);
        // Distances 1, 2 and 4: within a chunk.
        #pragma unroll
        for (int distance = 1; distance < kChunk; distance *= 2) {
            #pragma unroll
            for (int i = 0; i < kChunk; ++i) {
                if (i & distance) continue;
                butterfly(row.x[0][i], row.x[0][i + distance]);
                butterfly(row.x[1][i], row.x[1][i + distance]);
            }
        }
        // Chunks of two lanes: each computes its own sum or difference. The product is exact.
        #pragma unroll 1
        for (int lanes = 1; lanes < mixed_lanes; lanes *= 2) {
            const float sign = threadIdx.x & lanes ? -1.f : 1.f;
            #pragma unroll
            for (int i = 0; i < kChunk; ++i) {
                row.x[0][i] = fmaf(row.x[0][i], sign, __shfl_xor_sync(0xffffffff, row.x[0][i], lanes));
                row.x[1][i] = fmaf(row.x[1][i], sign, __shfl_xor_sync(0xffffffff, row.x[1][i], lanes));
            }
        }
        if (mixes_chunks) {
            #pragma unroll
            for (int i = 0; i < kChunk; ++i) butterfly(row.x[0][i], row.x[1][i]);
        }
        #pragma unroll
        for (int i = 0; i < kChunk; ++i) row.x[0][i] *= factor, row.x[1][i] *= factor;
        return row;
    }

    static __device__ __forceinline__ void butterfly(float& low, float& high) {
        const float sum = low + high;
        high = low - high;
        low = sum;
    }
};
