// From accumulators to boxes in shared memory as TMA stores and wgmma reads them
// (layout/swizzle.cuh). The swizzle keeps the 16-byte rows of the matrices that stmatrix writes at
// once in different banks.

#include "device/layout/swizzle.cuh"
#include "device/ptx/math.cuh"
#include "device/ptx/matrix.cuh"

// A warp's 16 rows, rounded to 16 bits. They begin at `row`, a multiple of 8, of boxes of 64 rows
// at `boxes`. Columns past 8 * kTiles are left undefined.
template <int kTiles>
__device__ __forceinline__ void write_boxes(uint32 boxes, int row, const float (&acc)[kTiles][4], int lane) {
    // Two matrices are rows 0 to 7 and 8 to 15 of one 8-column tile, two of the next.
    const uint32 at = boxes + (row + lane % 16) * kBoxRowBytes + swizzled(lane / 16, lane % 8);
    #pragma unroll
    for (int n = 0; n < kTiles; n += 2) {
        const int next = n + 1 < kTiles ? n + 1 : n;
        const uint32 m[4] = {pack2(acc[n][0], acc[n][1]), pack2(acc[n][2], acc[n][3]),
                             pack2(acc[next][0], acc[next][1]), pack2(acc[next][2], acc[next][3])};
        // A later chunk trades bits of the address alone: n is even, so chunk n ^ c is chunk n + c.
        store_matrices((at ^ n % 8 << 4) + n / 8 * (64 * kBoxRowBytes), m);
    }
}
