// The fp32 accumulator of dQ: its order in memory, adding to it and reading it back.
//
// Per head_q and workspace row: [row / kDqTileRows][column / kDqTileCols][128], the 128 floats of one tile of an accumulator in an
// order that makes a warp's addition one contiguous access. A kernel that computes dQ holds tiles of 16 rows and 8 columns,
// one that computes its transpose (kDqTransposed) of 8 rows and 16 columns. From sm_90 on four floats of a lane are added at
// once (PTX ISA 8.1, "red.global.add.v4.f32"); before, one component of all lanes at a time.

constexpr bool kVectorRed = kArch >= 90;
constexpr int kDqTileRows = kDqTransposed ? 8 : 16, kDqTileCols = kDqTransposed ? 16 : 8;
constexpr int kDqTiles = (kHeadDim + kDqTileCols - 1) / kDqTileCols;  // column tiles

// The number of the tile of rows that begins at a row of the workspace (Sequence::workspace_row and a row of the sequence): a shift, unsigned.
__device__ __forceinline__ int64 dq_row_tile(int64 workspace_row) { return uint64(workspace_row) / kDqTileRows; }
// Where its tiles lie, in floats.
__device__ __forceinline__ int64 dq_accum_offset(int64 workspace_row) { return dq_row_tile(workspace_row) * (kDqTiles * 128); }
__device__ __forceinline__ float* dq_accum_tile(const KernelParams& params, int64 workspace_row, int column_tile) {
    return params.dq_accum + dq_accum_offset(workspace_row) + column_tile * 128;
}
// The same by the number of the tile of rows.
__device__ __forceinline__ float* dq_accum_at(const KernelParams& params, int64 row_tile, int column_tile) {
    return params.dq_accum + row_tile * (kDqTiles * 128) + column_tile * 128;
}

// Adds a lane's four floats at once.
__device__ __forceinline__ void dq_accum_add_at(float* at, const float (&c)[4]) {
    asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(at)), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]) : "memory");
}

__device__ __forceinline__ void dq_accum_add(float* tile, const float (&c)[4], int lane) {
    if constexpr (kVectorRed) {
        dq_accum_add_at(tile + lane * 4, c);
    } else {
        #pragma unroll
        for (int i = 0; i < 4; ++i) {
            asm volatile("red.global.add.f32 [%0], %1;" ::"l"(__cvta_generic_to_global(tile + i * 32 + lane)), "f"(c[i]) : "memory");
        }
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
