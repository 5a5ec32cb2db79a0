// Partial dK and dV in device memory: what one of several splits has added up for its keys. The
// backward kernels write them, and backward_convert adds them. This file knows their layout and no
// mask and no schedule.
//
// The array is fp32 (row of tiles, kv head, split, tile, 128): first the tiles of dK, then those of
// dV. The 128 floats are one tile of a warp's accumulator, ordered so that the warp's access is
// contiguous. A tile has 16 keys and 8 columns or, in a kernel whose gradients stand transposed, 8
// keys and 16 columns. A kernel whose gradients stand transposed computes dQ as it is, and the
// other kernels compute dQ transposed (device/layout/dq_accum.cuh).
//
// Each sequence has rows of tiles for params.seqlen_k keys, rounded up to 16, or with kSplitsLast
// for those of them that are split. Tiles past a sequence's last key are not written.

#include "device/attention/sequence.cuh"
#include "device/layout/dq_accum.cuh"

constexpr int kGradientTileKeys = kDqTransposed ? 16 : 8, kGradientTileCols = 24 - kGradientTileKeys;
constexpr int kDkTiles = (kHeadDim + kGradientTileCols - 1) / kGradientTileCols, kDvTiles = (kHeadDimV + kGradientTileCols - 1) / kGradientTileCols;

// The first key of each head in a tile that is split.
__device__ __forceinline__ int first_split_key(const KernelParams& params) { return kSplitsLast ? params.first_split_key : 0; }

// The tiles of a row of one split, from the key that begins the row.
struct PartialGradients {
    float* const tiles;
    const bool has_keys;

    __device__ __forceinline__ PartialGradients(const KernelParams& params, const Sequence& sequence, int head, int split, int key)
        : tiles(params.partial_o + (((first_key(params, sequence) + key - first_split_key(params)) / kGradientTileKeys * params.num_heads_kv + head) * params.num_splits + split) * (kDkTiles + kDvTiles) * 128),
          has_keys(key < sequence.seqlen_k) {}
    // In a main kernel: of the split that a tile is.
    template <class Tile>
    __device__ __forceinline__ PartialGradients(const KernelParams& params, const Sequence& sequence, const Tile& tile, int key)
        : PartialGradients(params, sequence, tile.head, tile.split, key) {}

    __device__ __forceinline__ void store_dk_tile(const float (&c)[4], int n, int lane) const { store(c, n, n < kDkTiles, lane); }
    __device__ __forceinline__ void store_dv_tile(const float (&c)[4], int n, int lane) const { store(c, kDkTiles + n, n < kDvTiles, lane); }
    // Tiles side by side, the first of which has this number.
    template <int kTiles>
    __device__ __forceinline__ void store_dk(const float (&acc)[kTiles][4], int first, int lane) const {
        #pragma unroll
        for (int n = 0; n < kTiles; ++n) store_dk_tile(acc[n], first + n, lane);
    }
    template <int kTiles>
    __device__ __forceinline__ void store_dv(const float (&acc)[kTiles][4], int first, int lane) const {
        #pragma unroll
        for (int n = 0; n < kTiles; ++n) store_dv_tile(acc[n], first + n, lane);
    }

private:
    __device__ __forceinline__ void store(const float (&c)[4], int n, bool is_column, int lane) const {
        if (has_keys && is_column) *reinterpret_cast<float4*>(tiles + n * 128 + lane * 4) = float4{c[0], c[1], c[2], c[3]};
    }
    // The number of the sequence's first key, a multiple of 16.
    static __device__ __forceinline__ int64 first_key(const KernelParams& params, const Sequence& sequence) {
        return int64(sequence.batch) * ((params.seqlen_k - first_split_key(params) + 15) / 16 * 16);
    }
};
