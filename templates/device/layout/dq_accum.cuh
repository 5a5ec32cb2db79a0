// The fp32 accumulator of dQ: its order in memory, adding to it and reading it back.
//
// Per head_q and workspace row: [row / kDqTileRows][column / kDqTileCols][128]. The 128 floats are
// one tile of a warp's accumulator, in an order that makes the warp's addition one contiguous
// access. A kernel that computes dQ holds tiles of 16 rows and 8 columns. A kernel that computes
// its transpose (kDqTransposed) holds tiles of 8 rows and 16 columns. From sm_90 on a lane adds
// four floats at once; before, one component of all lanes at a time.

#include "device/params.cuh"
#include "device/ptx/global.cuh"

constexpr bool kVectorRed = kArch >= 90;
constexpr int kDqTileRows = kDqTransposed ? 8 : 16, kDqTileCols = kDqTransposed ? 16 : 8;
constexpr int kDqTiles = (kHeadDim + kDqTileCols - 1) / kDqTileCols;  // column tiles

// The number of the tile of rows that begins at a row of the workspace (Sequence::workspace_row
// plus a row of the sequence). Unsigned, the division is a shift.
__device__ __forceinline__ int64 dq_row_tile(int64 workspace_row) { return uint64(workspace_row) / kDqTileRows; }
// The offset of the tiles of that row, in floats.
__device__ __forceinline__ int64 dq_accum_offset(int64 workspace_row) { return dq_row_tile(workspace_row) * (kDqTiles * 128); }
__device__ __forceinline__ float* dq_accum_tile(const KernelParams& params, int64 workspace_row, int column_tile) {
    return params.dq_accum + dq_accum_offset(workspace_row) + column_tile * 128;
}
// The same by the number of the tile of rows.
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
