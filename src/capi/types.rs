//! The parameter structs of the two passes, as C sees them. Data alone: `args` checks it.

use std::ffi::c_void;

/// IEEE half precision (CUDA backend and CPU backend).
pub const FLASHTUNE_DTYPE_FP16: i32 = 1;
/// bfloat16 (CUDA backend and CPU backend).
pub const FLASHTUNE_DTYPE_BF16: i32 = 2;
/// IEEE single precision (CPU backend only).
pub const FLASHTUNE_DTYPE_FP32: i32 = 3;

/// Every query sees every key.
pub const FLASHTUNE_CAUSAL_NONE: i32 = 0;
/// Query i sees key j if and only if j <= i + seqlen_k - seqlen_q: the last query sees the last key.
pub const FLASHTUNE_CAUSAL_BOTTOM_RIGHT: i32 = 1;
/// Query i sees key j if and only if j <= i: the first query sees the first key.
pub const FLASHTUNE_CAUSAL_TOP_LEFT: i32 = 2;

/// A view of a (batch, seqlen, heads, dim) tensor whose last dimension is contiguous. Borrowed for the call (on a GPU
/// until the work enqueued on the stream is done), never freed.
///
/// Strides are in elements, not bytes, and at least 0. The stride of a dimension of size 1 is ignored. Inputs may
/// have any stride, also 0 (broadcast) and views into one packed buffer. An output must hold each element once: with
/// the dimensions sorted by stride, each stride must reach past everything below it.
///
/// data is device memory on a CUDA context, host memory on a CPU context, and aligned to its element. 16-byte aligned
/// data with strides and head dims that are multiples of 8 run fastest. data may be NULL where the tensor has no
/// element, and in the calls that do not touch data (supported, workspace_size, prepare, plan_info, autotune); in
/// those, NULL with all strides 0 stands for a packed tensor.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct flashtune_tensor {
    pub data: *mut c_void,
    pub stride_batch: i64,
    pub stride_seqlen: i64,
    pub stride_head: i64,
}

/// One forward pass: out = dropout(softmax(mask(softmax_scale * q k^T))) v. Set all of it to zero first, then
/// struct_size = sizeof(flashtune_forward_params), then what applies; zero is the default of every later field.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct flashtune_forward_params {
    /// sizeof(flashtune_forward_params).
    pub struct_size: u64,
    /// FLASHTUNE_DTYPE_*: the type of q, k, v and out. Sums are fp32 throughout.
    pub dtype: i32,
    /// FLASHTUNE_CAUSAL_*.
    pub causal: i32,
    /// 0 or more. With 0 there is nothing to do.
    pub batch_size: i64,
    /// A multiple of num_heads_kv; query head h reads key-value head h / (num_heads_q / num_heads_kv).
    pub num_heads_q: i64,
    /// At least 1.
    pub num_heads_kv: i64,
    /// 0 or more.
    pub seqlen_q: i64,
    /// 0 or more. A query that sees no key has out = 0 and lse = -infinity.
    pub seqlen_k: i64,
    /// Dim of q and k, 1 to 512.
    pub head_dim: i64,
    /// Dim of v and out, 1 to 512.
    pub head_dim_v: i64,
    /// What scores are multiplied with; finite. 0 means 1/sqrt(head_dim).
    pub softmax_scale: f32,
    /// Probability of dropping (not of keeping) an attention weight, 0 <= dropout_p < 1.
    pub dropout_p: f32,
    /// The dropout mask is a pure function of (seed, offset, batch, head, query, key): equal on every backend and in
    /// both passes. Ignored where dropout_p is 0.
    pub dropout_seed: u64,
    pub dropout_offset: u64,
    /// NULL, or the address of 8 bytes (device memory on a CUDA context, host memory on a CPU context) read by the
    /// work itself instead of dropout_seed, so that each replay of a captured graph may have its own mask.
    pub dropout_seed_ptr: *const u64,
    pub dropout_offset_ptr: *const u64,
    /// (batch_size, seqlen_q, num_heads_q, head_dim), read.
    pub q: flashtune_tensor,
    /// (batch_size, seqlen_k, num_heads_kv, head_dim), read.
    pub k: flashtune_tensor,
    /// (batch_size, seqlen_k, num_heads_kv, head_dim_v), read.
    pub v: flashtune_tensor,
    /// (batch_size, seqlen_q, num_heads_q, head_dim_v), written.
    pub out: flashtune_tensor,
    /// fp32 (batch_size, num_heads_q, seqlen_q), contiguous, written: the natural logarithm of the sum of the
    /// exponentials of the scaled scores. NULL: not wanted. The backward pass needs it.
    pub lse: *mut f32,
}

/// One backward pass. Fields with the names of the forward pass's mean the same and must have the values that it ran
/// with; out and lse are what it wrote. Zero it first, as flashtune_forward_params.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct flashtune_backward_params {
    /// sizeof(flashtune_backward_params).
    pub struct_size: u64,
    pub dtype: i32,
    pub causal: i32,
    pub batch_size: i64,
    pub num_heads_q: i64,
    pub num_heads_kv: i64,
    pub seqlen_q: i64,
    pub seqlen_k: i64,
    pub head_dim: i64,
    pub head_dim_v: i64,
    pub softmax_scale: f32,
    pub dropout_p: f32,
    pub dropout_seed: u64,
    pub dropout_offset: u64,
    pub dropout_seed_ptr: *const u64,
    pub dropout_offset_ptr: *const u64,
    pub q: flashtune_tensor,
    pub k: flashtune_tensor,
    pub v: flashtune_tensor,
    /// (batch_size, seqlen_q, num_heads_q, head_dim_v), read: the forward pass's output.
    pub out: flashtune_tensor,
    /// fp32 (batch_size, num_heads_q, seqlen_q), contiguous, read: the forward pass's lse. Not NULL.
    pub lse: *const f32,
    /// (batch_size, seqlen_q, num_heads_q, head_dim_v), read: the gradient of out.
    pub dout: flashtune_tensor,
    /// (batch_size, seqlen_q, num_heads_q, head_dim), written: the gradient of q. dq, dk and dv may be views into one
    /// packed buffer, as long as no two of them share an element.
    pub dq: flashtune_tensor,
    /// (batch_size, seqlen_k, num_heads_kv, head_dim), written: the gradient of k.
    pub dk: flashtune_tensor,
    /// (batch_size, seqlen_k, num_heads_kv, head_dim_v), written: the gradient of v.
    pub dv: flashtune_tensor,
    /// 0, or 1: dq, dk and dv have the same bits at every run. Tiles then take turns at dq, which costs time and a little
    /// more workspace, and the config follows from the problem, the device's architecture and the library's version
    /// alone, never from records: flashtune_autotune refuses such a problem. With 0, on a GPU, dq may differ from run to
    /// run by the order of fp32 sums; out, lse, dk and dv do not.
    pub deterministic: i32,
    /// 0.
    pub reserved: i32,
}
