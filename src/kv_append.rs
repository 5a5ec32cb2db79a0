//! KvAppend: new keys and values, to be written into a cache behind those that each sequence has, as a backend gets it. Built and
//! checked by `capi`; nothing below it checks pointers again. Lengths and tables are for the work itself to judge.

use crate::call::TensorRef;
use std::fmt;

/// What an executable is built for. Rows are copied bit by bit, so that their type does not matter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct KvAppendClass {
    /// Of the widest access that all addresses, strides and rows allow: 16, 8, 4 or 2.
    pub access_bytes: i64,
}

impl fmt::Display for KvAppendClass {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "kv_append by {} bytes", self.access_bytes)
    }
}

#[derive(Clone, Copy, Debug)]
pub struct KvAppend {
    pub class: KvAppendClass,
    pub element_bytes: i64,
    pub batch_size: i64,
    pub num_heads_kv: i64,
    /// Of each sequence.
    pub seqlen_new: i64,
    /// Keys that a sequence has room for.
    pub seqlen_cache: i64,
    pub head_dim: i64,
    pub head_dim_v: i64,
    /// (batch, seqlen_new, heads_kv, dim)
    pub k_new: TensorRef,
    pub v_new: TensorRef,
    /// (batch, seqlen_cache, heads_kv, dim), or (num_pages, page_size, heads_kv, dim).
    pub k_cache: TensorRef,
    pub v_cache: TensorRef,
    /// int32 (batch): keys that each sequence has before.
    pub seqlens: *const i32,
    /// int32 (batch): keys that it uses afterwards; may be NULL.
    pub seqused: *mut i32,
    /// int32 (batch, pages): which entries of the cache are a sequence's pages, in order.
    pub block_table: *const i32,
    pub block_table_stride: i64,
    /// 0: the cache has no pages.
    pub page_size: i64,
    pub num_pages: i64,
}

impl KvAppend {
    /// Whether there is neither a key nor a length to write.
    pub fn is_empty(&self) -> bool {
        self.batch_size == 0 || (self.seqlen_new == 0 && self.seqused.is_null())
    }
}

// SAFETY: a KvAppend only carries addresses; who dereferences them (a backend, inside launch) answers for the access.
unsafe impl Send for KvAppend {}
// SAFETY: as above; the fields are plain data.
unsafe impl Sync for KvAppend {}
