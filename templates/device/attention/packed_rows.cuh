// Packed rows: the query heads that share a key-value head, and their positions, as rows of one
// tile, so that a group of heads reads its keys once. Row r is position r / group_size of head r %
// group_size of the group: positions ascend with the rows, as masks need it.

#include "device/attention/mask.cuh"
#include "device/attention/scores.cuh"

struct PackedRow {
    int position;  // within the sequence; past its end where the tile is not full
    int head;      // query head, which exists in any case

    __device__ __forceinline__ PackedRow(int row, int head_kv, const KernelParams& params)
        : position(row / params.group_size), head(head_kv * params.group_size + row % params.group_size) {}
};

// What scores.cuh and mask.cuh do to scores, of an accumulator of 16 packed rows by 8 * kTiles
// keys: a lane holds rows `row` and row + 8, of each 8 keys the two from `key` on.
template <int kTiles>
__device__ __forceinline__ void modify_packed(float (&acc)[kTiles][4], int row, int head_kv, int key, const KernelParams& params, const Sequence& sequence) {
    #pragma unroll
    for (int r = 0; r < 2; ++r) {
        const PackedRow at(row + r * 8, head_kv, params);
        // A modifier is of one head, and the two rows may be of two: each is the first of two
        // lines, whose second comes to nothing.
        const ScoreModifier modifier(params, sequence, at.head);
        float line[kTiles][4];
        #pragma unroll
        for (int n = 0; n < kTiles; ++n) line[n][0] = acc[n][2 * r], line[n][1] = acc[n][2 * r + 1], line[n][2] = line[n][3] = 0.f;
        modifier.modify(line, at.position, key);
        #pragma unroll
        for (int n = 0; n < kTiles; ++n) acc[n][2 * r] = line[n][0], acc[n][2 * r + 1] = line[n][1];
    }
}
template <int kTiles>
__device__ __forceinline__ void mask_packed(float (&acc)[kTiles][4], int row, int key, const KernelParams& params, const Sequence& sequence) {
    #pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int position = (row + r * 8) / params.group_size;
        const int begin = key_begin(position, sequence), end = key_end(position, sequence);
        #pragma unroll
        for (int n = 0; n < kTiles; ++n) {
            #pragma unroll
            for (int c = 0; c < 2; ++c) {
                const int j = key + n * 8 + c;
                if (j >= end || (kHasWindow && j < begin)) acc[n][2 * r + c] = -infinity();
            }
        }
    }
}
