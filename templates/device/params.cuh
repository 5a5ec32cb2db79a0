// The one parameter struct of every kernel, the twin of src/kernel/params.rs. Strides are in elements and 64-bit;
// the last dim is contiguous. Kernels take it as `const __grid_constant__ KernelParams params`.

#include "device/types.cuh"

// A (batch, seqlen, heads, dim) view.
struct TensorView {
    void* data;
    int64 stride_batch, stride_seqlen, stride_head;
};

// A (batch, heads_q, seqlen_q, seqlen_k) view of something that there is one of for each score; a stride is 0 where it is the same.
struct ScoresView {
    void* data;
    int64 stride_batch, stride_head, stride_seqlen_q, stride_seqlen_k;
};

// The lists of a block mask, what device/attention/block_list.cuh reads. Rows are of blocks of queries forward, of keys backward.
struct BlockListsView {
    const int *num_blocks, *indices;            // (batch, heads_q, rows), (batch, heads_q, rows, max_blocks)
    const int *full_num_blocks, *full_indices;  // the same of full blocks; may be null
    int64 num_blocks_stride_batch, num_blocks_stride_head;
    int64 indices_stride_batch, indices_stride_head, indices_stride_row;
    int64 max_blocks;
};

struct KernelParams {
    TensorView q, k, v, out, dout, dq, dk, dv;
    float* lse;          // (batch, heads_q, seqlen_q), with cu_seqlens_q (heads_q, total_q), natural log; may be null forward
    // Workspace (batch, heads_q, workspace_rows), with cu_seqlens_q (heads_q, workspace_rows_of_head).
    float* lse_log2;     // of fp32 tensors in natural units (Log2Lse); +inf for rows without keys and past a sequence's last
    float* delta;        // rowsum(dO * O) - dlse; 0 past a sequence's last row
    float* dq_accum;     // of the same rows, in the order of device/layout/dq_accum.cuh
    uint32* turns;       // what device/schedule/dq_turns.cuh counts; null where the pass is not deterministic
    const uint64* dropout_seed_ptr;
    const uint64* dropout_offset_ptr;
    uint64 dropout_seed, dropout_offset;
    int batch_size, num_heads_q, num_heads_kv, group_size;
    int seqlen_q, seqlen_k;
    int right_shift;     // row i sees keys j <= i + right_shift; device/attention/sequence.cuh adds what sequences of their own lengths need
    int workspace_rows;  // no block of a multiple of 16 rows up to 128 reaches past them
    float softmax_scale;
    float softmax_scale_log2;  // softmax_scale * log2(e)
    uint32 dropout_threshold;  // 16-bit draws below it are dropped
    float dropout_keep_scale;  // 1 / probability of keeping
    ScoresView bias;           // of the tensors' type
    ScoresView dbias;          // fp32, added to
    ScoresView mask;           // bytes, 0 hides the key; with kMaskIsBits bytes of eight keys, the first one's bit the lowest
    const float* alibi_slopes;  // of batch b and query head h at b * alibi_stride_batch + h
    int64 alibi_stride_batch;
    const float* sinks;        // (heads_q)
    float* dsinks;             // (heads_q)
    const float* dlse;         // in the layout of lse
    const int *cu_seqlens_q, *cu_seqlens_k;  // (batch + 1), may be null
    const int *seqused_q, *seqused_k;        // (batch), may be null
    int64 workspace_rows_of_head;  // over all sequences
    int64 total_q;             // rows of lse of a head where q holds sequences end to end
    float softcap_factor;      // softmax_scale / softcap
    float softcap_log2;        // softcap * log2(e)
    int left_shift;            // row i sees keys j >= i + left_shift; as right_shift
    int aligns_ends;           // whether a sequence's last query and key are on its diagonal, else its first
    const int* block_table;    // (batch, blocks): the pages of each sequence, as device/attention/key_pages.cuh says
    int64 block_table_stride;  // from one sequence's to the next
    float *partial_o, *partial_lse;  // workspace, what device/attention/partials.cuh says
    int num_splits;            // of the keys
    int num_pages;             // batch entries of k and v, where they are pages
    // Rows from one sequence to the next in q, k, v and out (forward) or dout (backward), where those are padded (device/layout/tensor_map.cuh).
    int map_rows_q, map_rows_k, map_rows_v, map_rows_o;
    BlockListsView block_lists;
};
static_assert(sizeof(KernelParams) == 376 + 3 * 40 + 11 * 8 + 16 + 40 + 16 + 80, "KernelParams differs from src/kernel/params.rs");
