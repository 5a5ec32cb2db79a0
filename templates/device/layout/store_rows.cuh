// Stores accumulators as rows in device memory, 16 bytes a store. It knows the fragment of an mma
// accumulator but no tile in shared memory.
//
// The four lanes of a quad hold two columns each of four neighbouring 8-column tiles. They exchange
// words by shuffles, and each lane then holds all eight columns of one tile.

#include "device/numeric.cuh"
#include "device/ptx/math.cuh"

// Transposes words over a quad. Lane t of the quad has words w[0..3], and gets word t of every
// lane, in lane order.
__device__ __forceinline__ void quad_transpose(uint32 (&w)[4], int lane) {
    const bool odd = lane & 1, upper = lane & 2;
    #pragma unroll
    for (int i = 0; i < 4; i += 2) {
        const uint32 got = __shfl_xor_sync(0xffffffff, odd ? w[i] : w[i + 1], 1);
        if (odd) w[i] = got; else w[i + 1] = got;
    }
    #pragma unroll
    for (int i = 0; i < 2; ++i) {
        const uint32 got = __shfl_xor_sync(0xffffffff, upper ? w[i] : w[i + 2], 2);
        if (upper) w[i] = got; else w[i + 2] = got;
    }
}

// Stores rows g and g + 8 of a warp's 16 rows. `out` points at row g. `rows_left` counts the rows
// that exist from row g on, and `cols_left` the columns that exist.
template <int kTiles>
__device__ __forceinline__ void store_rows(uint16* out, int64 stride, const float (&acc)[kTiles][4], int rows_left, int lane, int cols_left = kTiles * 8) {
    #pragma unroll
    for (int r = 0; r < 2; ++r) {
        #pragma unroll
        for (int n = 0; n < kTiles; n += 4) {
            uint32 w[4] = {};
            #pragma unroll
            for (int i = 0; i < 4; ++i) {
                if (n + i < kTiles) w[i] = pack2(acc[n + i][2 * r], acc[n + i][2 * r + 1]);
            }
            quad_transpose(w, lane);
            if (r * 8 < rows_left && n + lane % 4 < kTiles && (n + lane % 4) * 8 < cols_left) {
                *reinterpret_cast<uint4*>(out + r * 8 * stride + (n + lane % 4) * 8) = make_uint4(w[0], w[1], w[2], w[3]);
            }
        }
    }
}
