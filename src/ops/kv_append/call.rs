//! The sizes and tensors of one write into a K/V cache, as a backend gets them.

use crate::call::TensorRef;
use crate::ops::class::KvAppendClass;

#[derive(Clone, Copy, Debug)]
pub struct KvAppend {
    pub class: KvAppendClass,
    pub element_bytes: i64,
    pub batch_size: i64,
    pub num_heads_kv: i64,
    /// New keys of each sequence.
    pub seqlen_new: i64,
    /// Keys that each sequence has room for.
    pub seqlen_cache: i64,
    pub head_dim: i64,
    pub head_dim_v: i64,
    /// (batch, seqlen_new, heads_kv, dim)
    pub k_new: TensorRef,
    pub v_new: TensorRef,
    /// (batch, seqlen_cache, heads_kv, dim), or (num_pages, page_size, heads_kv, dim).
    pub k_cache: TensorRef,
    pub v_cache: TensorRef,
    /// int32 (batch): keys of each sequence before the call.
    pub seqlens: *const i32,
    /// int32 (batch): keys of each sequence after the call; may be NULL.
    pub seqused: *mut i32,
    /// int32 (batch, pages): the cache's entries that are a sequence's pages, in order.
    pub block_table: *const i32,
    pub block_table_stride: i64,
    /// 0: the cache has no pages.
    pub page_size: i64,
    pub num_pages: i64,
}

// SAFETY: a KvAppend only carries addresses; the backend that dereferences them in a launch answers
// for the access.
unsafe impl Send for KvAppend {}
// SAFETY: as above; the fields are plain data.
unsafe impl Sync for KvAppend {}
