// The one parameter struct of every kernel, the twin of src/kernel/params.rs. Strides are in elements and 64-bit;
// the last dim is contiguous. Kernels take it as `const __grid_constant__ KernelParams params`.

#include "device/types.cuh"

// A (batch, seqlen, heads, dim) view.
struct TensorView {
    void* data;
    int64 stride_batch, stride_seqlen, stride_head;
};

struct KernelParams {
    TensorView q, k, v, out, dout, dq, dk, dv;
    float* lse;          // (batch, heads_q, seqlen_q), natural log; may be null forward
    float* lse_log2;     // workspace (batch, heads_q, workspace_rows); +inf for rows without keys and past seqlen_q
    float* delta;        // workspace (batch, heads_q, workspace_rows): rowsum(dO * O), 0 past seqlen_q
    float* dq_accum;     // workspace, fp32 in the order of device/dq_accum.cuh
    uint32* turns;       // workspace, what device/turns.cuh counts; null where the pass is not deterministic
    const uint64* dropout_seed_ptr;
    const uint64* dropout_offset_ptr;
    uint64 dropout_seed, dropout_offset;
    int batch_size, num_heads_q, num_heads_kv, group_size;
    int seqlen_q, seqlen_k;
    int causal_shift;    // row i sees keys j <= i + causal_shift
    int workspace_rows;  // no block of a multiple of 16 rows up to 128 reaches past them
    float softmax_scale;
    float softmax_scale_log2;  // softmax_scale * log2(e)
    uint32 dropout_threshold;  // 16-bit draws below it are dropped
    float dropout_keep_scale;  // 1 / probability of keeping
};
static_assert(sizeof(KernelParams) == 376, "KernelParams differs from src/kernel/params.rs");
