// The rows of a CTA of the decode kernel: a tile of packed rows
// (device/attention/packed_rows.cuh) of one sequence and K/V head. walk.cuh has the keys.

#include "device/attention/block_range.cuh"
#include "device/attention/packed_rows.cuh"
#include "device/attention/partials.cuh"

// Tiles and heads of one sequence are neighbours in the grid, since they read the same keys.
struct QueryTile {
    int batch_head;
    int row0;  // the first packed row
    int batch, head_kv;
    int first_head;  // the group's first query head
    Sequence sequence;
    int rows;  // packed rows of the sequence

    __device__ __forceinline__ QueryTile(const KernelParams& params)
        : QueryTile(params, kMostRows > 0 ? 1 : (params.seqlen_q * params.group_size + kBlockM - 1) / kBlockM) {}

    __device__ __forceinline__ bool is_empty() const { return row0 >= rows || (kMostRows > 0 && rows > kMostRows); }
    // One past the tile's last row.
    __device__ __forceinline__ int end_row() const { return min(row0 + kBlockM, rows); }

private:
    __device__ __forceinline__ QueryTile(const KernelParams& params, int num_tiles)
        : batch_head(int(blockIdx.x) / kTileCtas / num_tiles), row0(int(blockIdx.x) / kTileCtas % num_tiles * kBlockM), batch(batch_head / params.num_heads_kv),
          head_kv(batch_head % params.num_heads_kv), first_head(head_kv * params.group_size), sequence(params, batch), rows(sequence.seqlen_q * params.group_size) {}
};
