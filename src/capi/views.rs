//! Views of tensors and lists as C sees them: addresses and strides. cbindgen copies the doc
//! comments into include/flashtune.h.

use std::ffi::c_void;

/// Lists of the blocks of scores that count. Forward, each block of queries lists the blocks of
/// keys that it sees. Backward, each block of keys lists the blocks of queries that see it (the
/// transpose).
///
/// A score counts if its block is listed and causal, the window, mask and the other features allow
/// it. In a full block, mask is not applied; causal, the window and the other features are. A query
/// whose block lists nothing sees no key. The run time is proportional to the number of listed
/// blocks.
///
/// FlexAttention's BlockMask holds the same lists:
///
/// - Forward: kv_num_blocks, kv_indices, full_kv_num_blocks, full_kv_indices.
/// - Backward: q_num_blocks, q_indices, full_q_num_blocks, full_q_indices.
///
/// Below, rows is ceil(seqlen_q / block_q) forward and ceil(seqlen_k / block_k) backward. The
/// entries of a list may have any order. A row must not name a block twice, neither in one list nor
/// across both.
///
/// On a CPU context the lists are host memory, and a launch refuses wrong entries. On a CUDA
/// context they are device memory, and nothing checks them:
///
/// - A count above max_blocks uses the first max_blocks entries.
/// - An entry that names no block is skipped.
/// - A block listed twice counts twice.
///
/// Strides are in elements and at least 0. A stride of 0 shares the lists along that dimension.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct flashtune_block_mask {
    /// Queries of a block, a multiple of 16 up to 2048. Multiples of 128 run fastest. Each size has
    /// its own kernel.
    pub block_q: i64,
    /// Keys of a block, under the same rule.
    pub block_k: i64,
    /// int32 (batch_size, num_heads_q, rows), read: the number of used entries of indices. The rows
    /// dimension is contiguous.
    pub num_blocks: *const i32,
    /// int32 (batch_size, num_heads_q, rows, max_blocks), read: block numbers. The max_blocks
    /// dimension is contiguous.
    pub indices: *const i32,
    /// The same for full blocks, with the same strides. Both are NULL if no block is full.
    pub full_num_blocks: *const i32,
    /// See full_num_blocks.
    pub full_indices: *const i32,
    pub num_blocks_stride_batch: i64,
    pub num_blocks_stride_head: i64,
    pub indices_stride_batch: i64,
    pub indices_stride_head: i64,
    pub indices_stride_row: i64,
    /// Entries that a row of indices has room for, 0 to 2^31 - 1.
    pub max_blocks: i64,
}

/// A view of a (batch_size, num_heads_q, seqlen_q, seqlen_k) tensor that is written: one element
/// for each score. Lifetime, memory and NULL rules are those of flashtune_tensor.
///
/// Strides are in elements, not bytes, and at least 0. A stride of 0 shares the element along that
/// dimension. The stride of a dimension of size 1 is ignored. data is aligned to its element. With
/// varlen, elements past a sequence's last query or key are neither read nor written.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct flashtune_scores_tensor {
    pub data: *mut c_void,
    pub stride_batch: i64,
    pub stride_head: i64,
    pub stride_seqlen_q: i64,
    pub stride_seqlen_k: i64,
}

/// The same for a tensor that is only read. The layout is that of flashtune_scores_tensor.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct flashtune_const_scores_tensor {
    pub data: *const c_void,
    pub stride_batch: i64,
    pub stride_head: i64,
    pub stride_seqlen_q: i64,
    pub stride_seqlen_k: i64,
}

/// A view of a (batch, seqlen, heads, dim) tensor that is written. Its last dimension is
/// contiguous. The data is borrowed for the call, on a GPU until the enqueued work is done. It is
/// never freed.
///
/// Strides are in elements, not bytes, and at least 0. The stride of a dimension of size 1 is
/// ignored. No two elements may overlap. With the dimensions sorted by stride, each stride must be
/// larger than the distance to the last element of the dimensions before it.
///
/// data is device memory on a CUDA context and host memory on a CPU context, aligned to its
/// element. A pass runs fastest if addresses and strides are multiples of 16 bytes and head dims
/// are multiples of 8.
///
/// data may be NULL if the tensor has no element. It may also be NULL in the calls that do not
/// touch data: supported, workspace_size, prepare, plan_info and autotune. In those calls, NULL
/// with all strides 0 stands for a packed tensor.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct flashtune_tensor {
    pub data: *mut c_void,
    pub stride_batch: i64,
    pub stride_seqlen: i64,
    pub stride_head: i64,
}

/// The same for a tensor that is only read. The layout and the rules are those of flashtune_tensor,
/// but elements may overlap: a stride of 0 broadcasts, and views into one packed buffer are
/// allowed.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct flashtune_const_tensor {
    pub data: *const c_void,
    pub stride_batch: i64,
    pub stride_seqlen: i64,
    pub stride_head: i64,
}

impl From<flashtune_tensor> for flashtune_const_tensor {
    fn from(written: flashtune_tensor) -> Self {
        let flashtune_tensor { data, stride_batch, stride_seqlen, stride_head } = written;
        flashtune_const_tensor { data, stride_batch, stride_seqlen, stride_head }
    }
}

impl From<flashtune_scores_tensor> for flashtune_const_scores_tensor {
    fn from(written: flashtune_scores_tensor) -> Self {
        let flashtune_scores_tensor { data, stride_batch, stride_head, stride_seqlen_q, stride_seqlen_k } = written;
        flashtune_const_scores_tensor { data, stride_batch, stride_head, stride_seqlen_q, stride_seqlen_k }
    }
}
