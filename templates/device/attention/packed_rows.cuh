// Packed rows: a tile's rows are the positions of all query heads of a GQA group, so that the group
// reads its keys once. Decode kernels use them. This file knows scores and the mask rule but no
// tile in memory.
//
// Row r is position r / group_size of query head r % group_size of the group. Positions ascend with
// the rows, as masks need it.

#include "device/attention/mask.cuh"
#include "device/attention/scores.cuh"
#include "device/layout/key_unit.cuh"

struct PackedRow {
    int position;  // absolute within the sequence; past its end if the tile is not full
    int head;      // query head, which always exists

    __device__ __forceinline__ PackedRow(int row, int head_kv, const KernelParams& params)
        : position(row / params.group_size), head(head_kv * params.group_size + row % params.group_size) {}
};

// Where a lane's accumulators have packed rows and keys, counted from the first: of 16 rows and
// 8 * kTiles keys, as mma leaves them, or of 8 rows and 16 * kTiles keys (transposed).
constexpr int kRowStep = kTransposes ? 1 : 8;
constexpr int kTileKeys = kTransposes ? 16 : 8, kKeyStep = kTransposes ? 8 : 1;

// Applies scores.cuh, or mask.cuh's rule, to an accumulator. `row` is the lane's first packed row,
// and `key` its first key, which is absolute.
template <int kTiles>
__device__ __forceinline__ void modify_packed(float (&acc)[kTiles][4], int row, int head_kv, int key, const KernelParams& params, const Sequence& sequence) {
    #pragma unroll
    for (int r = 0; r < 2; ++r) {
        const PackedRow at(row + r * kRowStep, head_kv, params);
        // A modifier belongs to one head, and the two rows may belong to two heads. Each row is
        // therefore the first of two lines, and the result of the second line is dropped.
        const ScoreModifier modifier(params, sequence, at.head);
        if constexpr (kTransposes) {
            // `modify` expects two adjacent keys of every 8. A transposed lane has only the first
            // one.
            float line[2 * kTiles][4] = {};
            #pragma unroll
            for (int n = 0; n < 2 * kTiles; ++n) line[n][0] = acc[n / 2][2 * r + n % 2];
            modifier.modify(line, at.position, key);
            #pragma unroll
            for (int n = 0; n < 2 * kTiles; ++n) acc[n / 2][2 * r + n % 2] = line[n][0];
        } else {
            float line[kTiles][4];
            #pragma unroll
            for (int n = 0; n < kTiles; ++n) line[n][0] = acc[n][2 * r], line[n][1] = acc[n][2 * r + 1], line[n][2] = line[n][3] = 0.f;
            modifier.modify(line, at.position, key);
            #pragma unroll
            for (int n = 0; n < kTiles; ++n) acc[n][2 * r] = line[n][0], acc[n][2 * r + 1] = line[n][1];
        }
    }
}
template <int kTiles>
__device__ __forceinline__ void mask_packed(float (&acc)[kTiles][4], int row, int key, const KernelParams& params, const Sequence& sequence) {
    #pragma unroll
    for (int r = 0; r < 2; ++r) {
        // The position is absolute within the sequence, and so are the ends of its keys.
        const int position = (row + r * kRowStep) / params.group_size;
        const int begin = key_begin(position, sequence), end = key_end(position, sequence);
        #pragma unroll
        for (int n = 0; n < kTiles; ++n) {
            #pragma unroll
            for (int c = 0; c < 2; ++c) {
                // Key j is absolute.
                const int j = key + n * kTileKeys + c * kKeyStep;
                if (j >= end || (kHasWindow && j < begin)) acc[n][2 * r + c] = -infinity();
            }
        }
    }
}
