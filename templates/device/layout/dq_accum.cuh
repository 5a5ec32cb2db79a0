// The fp32 accumulator of dQ in device memory: its layout, addition and reading. The backward
// kernels add to it, and backward_convert reads it. It knows no mask and no schedule.
//
// For each query head the accumulator is [row / kDqTileRows][column / kDqTileCols][128] over
// workspace rows. The 128 floats are one tile of a warp's accumulator, ordered so that the warp's
// addition is one contiguous access. Kernels that compute dQ hold tiles of 16 rows and 8 columns.
// Kernels that compute the transpose (kDqTransposed) hold tiles of 8 rows and 16 columns. From
// sm_90 on a lane adds four floats at once. On older GPUs a warp adds one component of all lanes at
// a time.

#include "device/params.cuh"
#include "device/ptx/global.cuh"

constexpr bool kVectorRed = kArch >= 90;
constexpr int kDqTileRows = kDqTransposed ? 8 : 16, kDqTileCols = kDqTransposed ? 16 : 8;
constexpr int kDqTiles = (kHeadDim + kDqTileCols - 1) / kDqTileCols;  // tiles side by side

// The number of the row tile that begins at a row of the workspace. A workspace row is
// Sequence::workspace_row plus a row of the sequence. The division is unsigned, so it is a shift.
__device__ __forceinline__ int64 dq_row_tile(int64 workspace_row) { return uint64(workspace_row) / kDqTileRows; }
// The offset, in floats, of the row tile that begins at this workspace row.
__device__ __forceinline__ int64 dq_accum_offset(int64 workspace_row) { return dq_row_tile(workspace_row) * (kDqTiles * 128); }
__device__ __forceinline__ float* dq_accum_tile(const KernelParams& params, int64 workspace_row, int column_tile) {
    return params.dq_accum + dq_accum_offset(workspace_row) + column_tile * 128;
}
// The tile in column `column_tile` of the row tile with this number.
__device__ __forceinline__ float* dq_accum_at(const KernelParams& params, int64 row_tile, int column_tile) {
    return params.dq_accum + row_tile * (kDqTiles * 128) + column_tile * 128;
}

__device__ __forceinline__ void dq_accum_add(float* tile, const float (&c)[4], int lane) {
    if constexpr (kVectorRed) {
        add_floats(tile + lane * 4, c);
    } else {
        #pragma unroll
        for (int i = 0; i < 4; ++i) add_float(tile + i * 32 + lane, c[i]);
    }
}

__device__ __forceinline__ void dq_accum_read(float (&c)[4], const float* tile, int lane) {
    if constexpr (kVectorRed) {
        const float4 all = *reinterpret_cast<const float4*>(tile + lane * 4);
        c[0] = all.x, c[1] = all.y, c[2] = all.z, c[3] = all.w;
    } else {
        #pragma unroll
        for (int i = 0; i < 4; ++i) c[i] = tile[i * 32 + lane];
    }
}
