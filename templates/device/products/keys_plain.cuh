// Products with keys of q's type, under the names that products/keys_eight.cuh has for keys of 8
// bits. The sm80 forward and decode kernels use them. gemm_sm80.cuh or gemm_fp32.cuh comes before.

#include "device/attention/no_key_scales.cuh"

constexpr int kKSteps = (round_up(kHeadDim, 8) + 15) / 16;  // the last one a k8 step where 8 columns are left

constexpr bool kConvertsQuery = false;

using KeyScales = NoKeyScales;

// Q stays as it is.
template <class Tile, int kThreads>
__device__ __forceinline__ void convert_query(uint32, int) {}
template <class Tile, int kM>
struct QueryFactors {
    __device__ __forceinline__ QueryFactors(uint32, int) {}
    template <class Scores>
    __device__ __forceinline__ void multiply(Scores&) const {}
};

// Packs weights as one A operand.
template <class Operand>
__device__ __forceinline__ void pack_weights(Operand& a, const float (&left)[4], const float (&right)[4]) { pack_a(a, left, right); }

// One k-step of a warp's rows of Q.
template <class Tile, class Operand>
__device__ __forceinline__ void load_query(Operand& a, uint32 tile, int k, int lane) { load_a<Tile>(a, tile, k, k == Tile::kCols / 16, lane); }

// S += Q K^T, with Q in registers or in shared memory.
template <class TileK, class Scores, class Query>
__device__ __forceinline__ void multiply_query(Scores& s, const Query& q, uint32 tile_k, int lane) { gemm_regs<TileK>(s, q, tile_k, lane); }
template <class TileQ, class TileK, class Scores>
__device__ __forceinline__ void multiply_query(Scores& s, uint32 tile_q, uint32 tile_k, int lane) { gemm<TileQ, TileK>(s, tile_q, tile_k, lane); }

// O += P V for one k16 step. `tile_v` is moved to its rows.
template <class TileV, class Output, class Weights>
__device__ __forceinline__ void multiply_weights(Output& o, const Weights& p, uint32 tile_v, int lane) { gemm_step_trans<TileV>(o, p, tile_v, lane); }
// The same for V's columns from `first_col` on, in 16 bits.
template <class TileV, class Output, class Weights>
__device__ __forceinline__ void multiply_weights(Output& o, const Weights& p, uint32 tile_v, int lane, int first_col) { gemm_step_trans<TileV>(o, p, tile_v, lane, first_col); }

// A lane's first column of O.
__device__ __forceinline__ int first_col(int lane) { return lane % 4 * 2; }

// Calls store(column, first, second) for the pairs of neighbours that a lane holds of a row of O.
// Columns are counted from first_col.
template <int kOTiles, class Store>
__device__ __forceinline__ void each_pair(const float (&o)[kOTiles][4], int r, const Store& store) {
    #pragma unroll
    for (int n = 0; n < kOTiles; ++n) store(n * 8, o[n][2 * r], o[n][2 * r + 1]);
}
