// Writes accumulators to boxes in shared memory in the 128-byte swizzle, as TMA stores and wgmma
// read them (layout/swizzle.cuh). The swizzle puts the 16-byte rows that one stmatrix writes in
// different banks. It knows no tensor. The caller fences the asynchronous proxy before TMA or wgmma
// reads the boxes.

#include "device/layout/swizzle.cuh"
#include "device/ptx/math.cuh"
#include "device/ptx/matrix.cuh"

// Writes a warp's 16 rows, rounded to 16 bits, into boxes of 64 rows at `boxes`: the 8-column tiles
// from `begin`, the first of a box, to `end` - 1. The rows begin at `row`, a multiple of 8, of each
// box. Columns past 8 * kTiles are left undefined.
template <int kTiles>
__device__ __forceinline__ void write_boxes(uint32 boxes, int row, const float (&acc)[kTiles][4], int lane, int begin = 0, int end = kTiles) {
    // Two matrices are rows 0 to 7 and rows 8 to 15 of one 8-column tile. The other two are the
    // same rows of the next tile.
    const uint32 at = boxes + (row + lane % 16) * kBoxRowBytes + swizzled(lane / 16, lane % 8);
    #pragma unroll
    for (int n = begin; n < end; n += 2) {
        const int next = n + 1 < kTiles ? n + 1 : n;
        const uint32 m[4] = {pack2(acc[n][0], acc[n][1]), pack2(acc[n][2], acc[n][3]),
                             pack2(acc[next][0], acc[next][1]), pack2(acc[next][2], acc[next][3])};
        // Since n is even, chunk n ^ c is chunk n + c: a later chunk changes bits of the address
        // alone.
        store_matrices((at ^ n % 8 << 4) + (n - begin) / 8 * (64 * kBoxRowBytes), m);
    }
}
