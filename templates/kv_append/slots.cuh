// The argument of the append kernels for slots, rotations and caches of 8 bits.

#include "kv_append/rows.cuh"

// The twin of KvAppendSlotsParams in src/ops/kv_append/kernel.rs. Tensor strides and row lengths
// count accesses.
struct KvAppendSlotsParams {
    KvAppendParams append;        // num_pages also counts the entries that cache_batch_idx names
    TensorView q, q_rotated;      // (batch, seqlen_q, heads_q, dim); may be the same tensor
    const void *rotary_cos, *rotary_sin;  // (seqlen_rotary, rotated columns / 2)
    int64 rotary_stride;          // elements from one row of a table to the next
    const int* seqused_new;       // (batch): new keys of each sequence; null: seqlen_new
    const int* cache_batch_idx;   // (batch): entry of the cache; null: the sequence's number
    int num_heads_q, seqlen_q;    // seqlen_q is 0 without queries
    int half;                     // accesses of half of the rotated columns
    int seqlen_rotary;
    int position_step_q;          // from one query's position to the next's: 1 or 0
    int writes_rows;              // 0: the launch writes lengths alone
};
static_assert(sizeof(KvAppendSlotsParams) == sizeof(KvAppendParams) + 2 * 32 + 5 * 8 + 6 * 4,
              "KvAppendSlotsParams differs from src/ops/kv_append/kernel.rs");
