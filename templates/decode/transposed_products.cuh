// The decode kernel's products, transposed (products/transposed.cuh). products.cuh has the same
// names.

// Whether Q's fragments fit the registers beside O. Otherwise each product loads them again.
constexpr bool kQInRegs = kMTiles * (kKSteps * 2 + kOTiles * 4) <= 128;

using Scores = float[kMTiles][kNTiles][4];
using Output = float[kMTiles][kOTiles][4];

// A warp's rows of Q.
struct QueryOperand {
    uint32 tile;
    const ColumnFactors<TileQ, kMTiles> factors;
    const QuerySums<TileQ, kMTiles> sums;
    uint32 fragments[kKSteps][kMTiles][2];  // in use with kQInRegs

    __device__ __forceinline__ QueryOperand(uint32 tile_q, const ThreadPlace& place)
        : tile(tile_q + place.first_cta_row() * TileQ::kStride * 2), factors(tile, place.lane), sums(tile, place.lane) {
        if constexpr (kQInRegs) {
            #pragma unroll
            for (int k = 0; k < kKSteps; ++k) load_query<TileQ>(fragments[k], tile, k, place.lane);
        }
    }
};

// S = K Q^T.
__device__ __forceinline__ void multiply_qk(Scores& s, const QueryOperand& q, uint32 tile_k, int lane) {
    const auto step = [&](uint32 (&b)[kMTiles][2], int k) {
        if constexpr (kQInRegs) {
            #pragma unroll
            for (int i = 0; i < kMTiles * 2; ++i) b[i / 2][i % 2] = q.fragments[k][i / 2][i % 2];
        } else {
            load_query<TileQ>(b, q.tile, k, lane);
        }
    };
    multiply_rows<TileK>(s, tile_k, lane, step, q.sums);
    multiply_factors(s, q.factors);
}

// O += P V of a block.
__device__ __forceinline__ void multiply_pv(Output& o, const Scores& p, uint32 tile_v, const ThreadPlace& place, KeyScales& scales) {
    #pragma unroll
    for (int n = 0; n < kNTiles; ++n) {
        uint32 operand[kMTiles][2];
        #pragma unroll
        for (int m = 0; m < kMTiles; ++m) pack_columns(operand[m], p[m][n]);
        multiply_weights<TileV>(o, operand, TileV::part(tile_v, n * 16, place.warp_v * kWarpCols / kKeyUnit), place.lane, scales);
    }
}
