// The one parameter struct of every kernel. `make header` makes this file from src/kernel/params.rs
// and src/call.rs. Strides are in elements and 64-bit; the last dim is contiguous.

#include "device/types.cuh"

// A (batch, seqlen, heads, dim) view. Strides are in elements; the last dim is contiguous.
struct TensorView {
    void* data;
    int64 stride_batch;
    int64 stride_seqlen;
    int64 stride_head;
};

// A (batch, heads_q, seqlen_q, seqlen_k) view with one element for each score. Strides are in
// elements, and 0 along a dimension of equal elements.
struct ScoresView {
    void* data;
    int64 stride_batch;
    int64 stride_head;
    int64 stride_seqlen_q;
    int64 stride_seqlen_k;
};

// The lists of a block mask (device/attention/block_list.cuh). A row of blocks is a block of
// queries in the forward pass and a block of keys in the backward pass. Each row of blocks has two
// lists of blocks of the other kind. The mask tensor, if there is one, applies in the blocks of
// `indices` and not in those of `full_indices`. Scores of other blocks do not count. Entries are
// int32, in any order. Strides are in elements, and 0 along a dimension of equal lists.
struct BlockListsView {
    // (batch, heads_q, rows of blocks): the lengths of the lists in `indices`.
    const int* num_blocks;
    // (batch, heads_q, rows of blocks, max_blocks): numbers of blocks.
    const int* indices;
    // The same for the second lists. If NULL, they are empty, and full_indices is NULL too.
    const int* full_num_blocks;
    const int* full_indices;
    // Strides of num_blocks and full_num_blocks. The last dimension is contiguous.
    int64 num_blocks_stride_batch;
    int64 num_blocks_stride_head;
    // Strides of indices and full_indices.
    int64 indices_stride_batch;
    int64 indices_stride_head;
    int64 indices_stride_row;
    // The most entries of a list: the last dimension of indices and of full_indices.
    int64 max_blocks;
};

struct KernelParams {
    // Tensors of 8 bits (kKeyFormat) have strides in pairs of elements.
    TensorView q;
    TensorView k;
    TensorView v;
    TensorView out;
    // Forward, where there is room in the workspace for them: V transposed
    // (sm90/forward_fp8/images.cuh), or K and V widened (sm90_widen_kv.cu.tera).
    TensorView dout;
    // Forward, dq, dk and dv are the fp32 scales of q, k and v (device/eight.cuh). Fields of their
    // own would move the tensor maps, which follow this struct in the parameters of every kernel.
    TensorView dq;
    TensorView dk;
    TensorView dv;
    // fp32 (batch, heads_q, seqlen_q), with cu_seqlens_q (heads_q, total_q), natural log. NULL
    // where the caller does not want it.
    float* lse;
    // Workspace, fp32 (batch, heads_q, workspace_rows), with cu_seqlens_q (heads_q,
    // workspace_rows_of_head). It holds lse * log2(e), or lse itself for fp32 tensors (Log2Lse).
    // It is +inf for rows without keys and for rows past a sequence's last.
    float* lse_log2;
    // Workspace, in the layout of lse_log2: rowsum(dO * O) - dlse. It is 0 past a sequence's last
    // row.
    float* delta;
    // Workspace, fp32, in the layout of device/layout/dq_accum.cuh. It has the rows of lse_log2,
    // with at most workspace_cols columns.
    float* dq_accum;
    // Workspace, the counters of device/schedule/dq_turns.cuh. NULL if the pass is not
    // deterministic.
    uint32* turns;
    const uint64* dropout_seed_ptr;
    const uint64* dropout_offset_ptr;
    uint64 dropout_seed;
    uint64 dropout_offset;
    int batch_size;
    int num_heads_q;
    int num_heads_kv;
    // num_heads_q / num_heads_kv
    int group_size;
    int seqlen_q;
    int seqlen_k;
    // Row i sees keys j <= i + right_shift (kIsCausal). With varlen the kernel adds the shift of
    // each sequence's alignment (device/attention/sequence.cuh).
    int right_shift;
    // Backward: rows of the workspace for each sequence and head. Row blocks of a kernel are a
    // multiple of 16, up to 128, rows. Each block that holds a query ends within these rows.
    // Forward with split keys: the packed rows of each short sequence of a mixed batch, or the
    // rows of each head in split tiles; 0 if the partial states are of all rows
    // (device/attention/partials.cuh). With kIsBatchInvariant: the runs of each tile whose keys
    // are split (device/attention/segment_runs.cuh).
    int workspace_rows;
    float softmax_scale;
    // softmax_scale * log2(e)
    float softmax_scale_log2;
    // Weights whose 16-bit draw is below this are dropped.
    uint32 dropout_threshold;
    // 1 / probability of keeping
    float dropout_keep_scale;
    ScoresView bias;
    // fp32. Kernels add to it.
    ScoresView dbias;
    // Bytes, where 0 hides the key. With kMaskIsBits each byte holds the bits of eight keys, the
    // first key in the lowest bit.
    ScoresView mask;
    // The slope of batch b and query head h is at b * alibi_stride_batch + h.
    const float* alibi_slopes;
    int64 alibi_stride_batch;
    // (heads_q). dsinks has the same layout.
    const float* sinks;
    float* dsinks;
    // In the layout of lse.
    const float* dlse;
    // (batch + 1). NULL if q is not packed end to end. cu_seqlens_k is the same for k and v.
    const int* cu_seqlens_q;
    const int* cu_seqlens_k;
    // (batch). NULL if all rows are used. seqused_k is the same for k and v.
    const int* seqused_q;
    const int* seqused_k;
    // Workspace rows of a query head, over all sequences.
    int64 workspace_rows_of_head;
    // With cu_seqlens_q: the rows of lse for a query head.
    int64 total_q;
    // softmax_scale / softcap
    float softcap_factor;
    // softcap * log2(e)
    float softcap_log2;
    // Row i sees keys j >= i + left_shift (kHasWindow). With varlen the kernel adds the same shift
    // as to right_shift.
    int left_shift;
    // Nonzero if each sequence's last query and key lie on its diagonal. Otherwise the first ones
    // do.
    int aligns_ends;
    // (batch, blocks): the pages of each sequence (device/attention/key_pages.cuh).
    const int* block_table;
    int64 block_table_stride;
    // Workspace of splits: of the keys, as is partial_lse (device/attention/partials.cuh), or
    // backward the partial dK and dV (device/layout/partial_gradients.cuh).
    float* partial_o;
    float* partial_lse;
    // The number of splits: of the keys, or backward of a walk through the queries
    // (device/schedule/group_walk.cuh).
    int num_splits;
    // The number of batch entries of k and v: pages, or those that cache_batch_idx names.
    int num_pages;
    // Rows from one sequence to the next in q, k, v and out (backward: dout) of padded varlen
    // tensors, as tensor maps count them (device/layout/tensor_map.cuh).
    int map_rows_q;
    int map_rows_k;
    int map_rows_v;
    int map_rows_o;
    BlockListsView block_lists;
    // (batch): the entry of k and v that holds each sequence's keys, and the rows there before its
    // first key (kHasKeyStarts). Each may be NULL.
    const int* cache_batch_idx;
    const int* leftpad_k;
    // Backward, where only the last tiles of each head are split (kSplitsLast): their first key.
    int first_split_key;
};
static_assert(sizeof(KernelParams) == 376 + 3 * 40 + 11 * 8 + 16 + 40 + 16 + 80 + 16 + 8, "KernelParams differs from src/kernel/params.rs");
