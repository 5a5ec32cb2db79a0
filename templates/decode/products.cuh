// The decode kernel's products: Q's operand, Q K^T, and P V.

// Whether Q's fragments fit the registers beside O. Otherwise each product loads them again.
constexpr bool kQInRegs = kMTiles * (kKSteps + kOTiles) * 4 <= 128;

using Scores = float[kMTiles][kNTiles][4];
using Output = float[kMTiles][kOTiles][4];

// A warp's rows of Q.
struct QueryOperand {
    uint32 tile;
    const QueryFactors<TileQ, kMTiles> factors;
    uint32 fragments[kKSteps][kMTiles][4];  // in use with kQInRegs

    __device__ __forceinline__ QueryOperand(uint32 tile_q, const ThreadPlace& place)
        : tile(tile_q + place.first_row() * TileQ::kStride * 2), factors(tile, place.lane) {
        if constexpr (kQInRegs) {
            #pragma unroll
            for (int k = 0; k < kKSteps; ++k) load_query<TileQ>(fragments[k], tile, k, place.lane);
        }
    }
};

// S = Q K^T, without scales of K, for the keys that S has columns for.
template <int kTiles>
__device__ __forceinline__ void multiply_qk(float (&s)[kMTiles][kTiles][4], const QueryOperand& q, uint32 tile_k, int lane) {
    if constexpr (kQInRegs) {
        multiply_query<TileK>(s, q.fragments, tile_k, lane);
    } else {
        multiply_query<TileQ, TileK>(s, q.tile, tile_k, lane);
    }
    q.factors.multiply(s);
}

using Weights = uint32[kMTiles][4];  // P of 16 keys as an A operand

// P of the keys from 16 * k on.
__device__ __forceinline__ void pack_step(Weights& operand, const Scores& p, int k) {
    #pragma unroll
    for (int m = 0; m < kMTiles; ++m) pack_weights(operand[m], p[m][2 * k], p[m][2 * k + 1]);
}
// O += P V of these keys, in the warp's columns of V.
__device__ __forceinline__ void multiply_pv_step(Output& o, const Weights& operand, uint32 tile_v, int k, const ThreadPlace& place) {
    if constexpr (kSharesBoxes) {
        multiply_weights<TileV>(o, operand, TileV::part(tile_v, k * 16, 0), place.lane, place.warp_v * kWarpCols);
    } else {
        multiply_weights<TileV>(o, operand, TileV::part(tile_v, k * 16, place.warp_v * kWarpCols / kKeyUnit), place.lane);
    }
}
// O += P V of a block.
__device__ __forceinline__ void multiply_pv(Output& o, const Scores& p, uint32 tile_v, const ThreadPlace& place) {
    #pragma unroll
    for (int k = 0; k < kBlockN / 16; ++k) {
        Weights operand;
        pack_step(operand, p, k);
        multiply_pv_step(o, operand, tile_v, k, place);
    }
}
