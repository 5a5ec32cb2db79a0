//! The sizes and tensors of one write into a K/V cache, as a backend gets them.

use crate::call::TensorRef;
use crate::ops::class::KvAppendClass;
use std::ffi::c_void;

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
    /// Entries of the cache: its pages, or those that `cache_batch_idx` may name.
    pub num_pages: i64,
    /// int32 (batch): new keys of each sequence; NULL: `seqlen_new`. A number outside of 0 to
    /// `seqlen_new` counts as the nearest in it.
    pub seqused_new: *const i32,
    /// int32 (batch): the entry of the cache that is each sequence's; NULL: its own number.
    pub cache_batch_idx: *const i32,
    /// Set if the class has a rotation.
    pub rotary: Rotary,
    /// Set if the cache has 8 bits.
    pub scales: AppendScales,
}

/// The fp32 scales of a cache of 8 bits.
#[derive(Clone, Copy, Debug)]
pub struct AppendScales {
    /// (entries, rows, heads_kv) of the cache, or (batch, 1, heads_kv).
    pub k: TensorRef,
    pub v: TensorRef,
    /// Each key and head has a scale, else each sequence and head.
    pub of_keys: bool,
    /// Scales are written, else read.
    pub computes: bool,
}

impl AppendScales {
    pub const NONE: AppendScales =
        AppendScales { k: TensorRef::NULL, v: TensorRef::NULL, of_keys: false, computes: false };
}

/// The rotation of new keys and queries. A row's first `dim` columns are rotated by the row of the
/// tables that has its position, or by the nearest row there is.
#[derive(Clone, Copy, Debug)]
pub struct Rotary {
    /// (seqlen, dim / 2)
    pub cos: *const c_void,
    pub sin: *const c_void,
    /// Elements from one row to the next, of both tables.
    pub stride: i64,
    pub seqlen: i64,
    pub dim: i64,
    /// (batch, seqlen_q, heads_q, head_dim); may be the same tensor.
    pub q: TensorRef,
    pub q_rotated: TensorRef,
    pub num_heads_q: i64,
    /// 0: there are no queries.
    pub seqlen_q: i64,
    /// All queries of a sequence have the position of the first, else each has its own.
    pub q_at_one_position: bool,
}

impl Rotary {
    pub const NONE: Rotary = Rotary {
        cos: std::ptr::null(),
        sin: std::ptr::null(),
        stride: 0,
        seqlen: 0,
        dim: 0,
        q: TensorRef::NULL,
        q_rotated: TensorRef::NULL,
        num_heads_q: 0,
        seqlen_q: 0,
        q_at_one_position: false,
    };
}

impl KvAppend {
    /// Whether the lengths after the call replace those before.
    pub fn advances_in_place(&self) -> bool {
        !self.seqused.is_null() && std::ptr::eq(self.seqused, self.seqlens)
    }
}

// SAFETY: a KvAppend only carries addresses; the backend that dereferences them in a launch answers
// for the access.
unsafe impl Send for KvAppend {}
// SAFETY: as above; the fields are plain data.
unsafe impl Sync for KvAppend {}
