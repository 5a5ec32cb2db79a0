// The rows of a CTA of the decode kernel: a tile of packed rows
// (device/attention/packed_rows.cuh) of one sequence and K/V head. walk.cuh has the keys.

#include "device/attention/block_range.cuh"
#include "device/attention/key_pages.cuh"
#include "device/attention/packed_rows.cuh"
#include "device/attention/partials.cuh"

// The pages of a team's block. Over keys of q's type the table's entries become pages at once.
using BlockPages = KeyPages<kBlockN, kKeyFormat != 0>;

// Tiles and heads of one sequence are neighbours in the grid, since they read the same keys.
struct QueryTile {
    int batch_head;
    int row0;  // the first packed row
    int batch, head_kv;  // head_kv: the first of the CTA's
    int first_head;  // the group's first query head
    Sequence sequence;
    int rows;  // packed rows of the sequence

    __device__ __forceinline__ QueryTile(const KernelParams& params)
        : QueryTile(params, kMostRows > 0 ? 1 : (params.seqlen_q * params.group_size + kBlockM - 1) / kBlockM) {}

    __device__ __forceinline__ bool is_empty() const { return row0 >= rows || (kMostRows > 0 && rows > kMostRows); }
    // Whether a row of the CTA's tiles exists: its head and its position.
    __device__ __forceinline__ bool has_row(int cta_row, const KernelParams& params) const {
        if constexpr (kHeads == 1) return row0 + cta_row < rows;
        return row0 + cta_row % kBlockM < rows && head_kv + cta_row / kBlockM < params.num_heads_kv;
    }
    // A K/V head of the CTA's. The last one that exists stands for those behind it.
    __device__ __forceinline__ int head_of(int head, const KernelParams& params) const {
        if constexpr (kHeads == 1) return head_kv;
        return min(head_kv + head, params.num_heads_kv - 1);
    }
    // One past the tile's last row.
    __device__ __forceinline__ int end_row() const { return min(row0 + kBlockM, rows); }

private:
    static __device__ __forceinline__ int head_groups(const KernelParams& params) { return (params.num_heads_kv + kHeads - 1) / kHeads; }
    __device__ __forceinline__ QueryTile(const KernelParams& params, int num_tiles)
        : batch_head(int(blockIdx.x) / kTileCtas / num_tiles), row0(int(blockIdx.x) / kTileCtas % num_tiles * kBlockM), batch(batch_head / head_groups(params)),
          head_kv(batch_head % head_groups(params) * kHeads), first_head(head_kv * params.group_size), sequence(params, batch), rows(sequence.seqlen_q * params.group_size) {}
};
