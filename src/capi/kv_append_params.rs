//! The C struct of a write into a K/V cache. It holds data only: `kv_append` and `kv_append_slots`
//! check it. cbindgen copies the doc comments into include/flashtune.h.

use super::pages::PageInputs;
use super::sized::SizedStruct;
use super::types::{flashtune_const_tensor, flashtune_tensor};
use std::ffi::c_void;

/// New keys and values to write into a K/V cache behind those that each sequence has there. k_new
/// and v_new become rows seqlens[b] to seqlens[b] + seqlen_new of sequence b.
///
/// A sequence gets none of its new keys in three cases: its length is negative, the new keys do not
/// all fit, or one of them has no page. The other sequences get theirs. Elements that are not
/// written keep their bits.
///
/// Set the whole struct to zero, then struct_size, then the fields that apply.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct flashtune_kv_append_params {
    /// sizeof(flashtune_kv_append_params).
    pub struct_size: u64,
    /// A FLASHTUNE_DTYPE_*: the type of k_new and v_new, and of k_cache and v_cache unless
    /// cache_dtype gives theirs. Elements are copied bit by bit, except those that are rotated or
    /// quantised.
    pub dtype: i32,
    /// Must be 0.
    pub reserved: i32,
    /// Sequences, 0 to 2^31 - 1. With 0 the call does nothing. batch_size * seqlen_new *
    /// num_heads_kv is at most 2^50. So are the cache's rows: batch_size * seqlen_cache *
    /// num_heads_kv, with pages num_pages * page_size * num_heads_kv.
    pub batch_size: i64,
    /// Heads of the keys and values, at least 1.
    pub num_heads_kv: i64,
    /// New keys of each sequence, 0 to 2^31 - 4096. With 0 only seqused and q_rotated are written.
    pub seqlen_new: i64,
    /// Keys that each sequence has room for, 0 to 2^31 - 4096. With pages, the room is in the pages
    /// of its row of block_table.
    pub seqlen_cache: i64,
    /// Dim of k_new and k_cache, 1 to 512.
    pub head_dim: i64,
    /// Dim of v_new and v_cache, 1 to 512.
    pub head_dim_v: i64,
    /// (batch_size, seqlen_new, num_heads_kv, head_dim), read.
    pub k_new: flashtune_const_tensor,
    /// (batch_size, seqlen_new, num_heads_kv, head_dim_v), read.
    pub v_new: flashtune_const_tensor,
    /// (batch_size, seqlen_cache, num_heads_kv, head_dim), written. With block_table it is
    /// (num_pages, page_size, num_heads_kv, head_dim), and stride_batch leads from one page to the
    /// next.
    pub k_cache: flashtune_tensor,
    /// The same with head_dim_v.
    pub v_cache: flashtune_tensor,
    /// int32 (batch_size), read: how many keys each sequence has before the call. Device memory on
    /// a CUDA context and host memory on a CPU context. No length is refused on either.
    pub seqlens: *const i32,
    /// int32 (batch_size), written: how many keys each sequence has after the call. That is
    /// seqlens[b] plus the number of new keys. A sequence that got no keys keeps its length,
    /// clamped to the range from 0 to seqlen_cache. NULL if not wanted. With FLASHTUNE_APPEND_SLOTS
    /// it may be seqlens itself.
    pub seqused: *mut i32,
    /// int32 (batch_size, ceil(seqlen_cache / page_size)), read: as in flashtune_forward_params.
    /// NULL if page_size is 0.
    ///
    /// Only entries of pages that receive new keys are read. An entry that is negative, or
    /// num_pages or more, names no page. Two sequences that share a page may write the same row.
    /// That row may then hold parts of both.
    pub block_table: *const i32,
    /// Elements from one sequence's row of block_table to the next. With several sequences it is at
    /// least ceil(seqlen_cache / page_size).
    pub block_table_stride: i64,
    /// Keys of a page, at least 1; 0 if the cache has no pages. One kernel serves all sizes.
    pub page_size: i64,
    /// With block_table: pages that k_cache and v_cache hold, 1 to 2^31 - 1. Otherwise 0.
    pub num_pages: i64,
    /// 0 or FLASHTUNE_APPEND_SLOTS.
    pub features: u64,
    /// With FLASHTUNE_APPEND_SLOTS: int32 (batch_size), read: how many of its seqlen_new new keys
    /// each sequence has, from its first. The others are not written. NULL: all have seqlen_new.
    ///
    /// With 0 the sequence is idle: its cache and its length stay as they are. A captured graph may
    /// therefore replay while some of its slots serve no request. A number below 0 counts as 0, and
    /// one above seqlen_new as seqlen_new.
    pub seqused_new: *const i32,
    /// With FLASHTUNE_APPEND_SLOTS and batch_size_cache: int32 (batch_size), read: the entry of
    /// k_cache and v_cache that belongs to each sequence. A sequence whose entry does not exist
    /// gets no keys. If two sequences name one entry, a row that both write may hold parts of both.
    /// Excludes block_table.
    pub cache_batch_idx: *const i32,
    /// With cache_batch_idx: entries of k_cache and v_cache, 1 to 2^31 - 1. Otherwise 0: there are
    /// batch_size entries.
    pub batch_size_cache: i64,
    /// Columns of the new keys and of q that are rotated by their position, from the first: even, 2
    /// to head_dim. Half of a multiple of 16 keeps accesses wide. 0: nothing is rotated, and the
    /// fields below must be 0.
    ///
    /// The new key at row r of its sequence in the cache has position r. With the cosine c and the
    /// sine s of its position, a pair of columns (x, y) becomes (x c - y s, x s + y c), computed in
    /// fp32 and rounded to dtype. Values are never rotated.
    pub rotary_dim: i64,
    /// A FLASHTUNE_DTYPE_*: the type of rotary_cos and rotary_sin. It is dtype or fp32.
    pub rotary_dtype: i32,
    /// 1: pair i is columns 2i and 2i + 1. 0: it is columns i and i + rotary_dim / 2.
    pub rotary_interleaved: i32,
    /// 0: query i of sequence b has position seqlens[b] + i, as causal and windowed passes need. 1:
    /// all of its queries have position seqlens[b].
    pub rotary_q_at_one_position: i32,
    /// Must be 0.
    pub rotary_reserved: i32,
    /// (seqlen_rotary, rotary_dim / 2), read: the cosines of pair i at each position. The last
    /// dimension is contiguous.
    pub rotary_cos: *const c_void,
    /// The same with the sines. Both may be halves of one table with rows of rotary_dim elements.
    pub rotary_sin: *const c_void,
    /// Elements from one row of rotary_cos to the next, and of rotary_sin: at least rotary_dim / 2.
    pub rotary_stride: i64,
    /// Rows of rotary_cos and of rotary_sin: at least 1 and seqlen_cache, at most 2^31 - 4096. A
    /// position outside takes the nearest row.
    pub seqlen_rotary: i64,
    /// Queries of each sequence, 0 to 2^31 - 4096. With 0 no query is rotated. batch_size *
    /// seqlen_q * num_heads_q is at most 2^50.
    pub seqlen_q: i64,
    /// Heads of q, at least 1; 0 if seqlen_q is 0.
    pub num_heads_q: i64,
    /// (batch_size, seqlen_q, num_heads_q, head_dim) of dtype, read. All queries are rotated, also
    /// those of sequences that get no keys.
    pub q: flashtune_const_tensor,
    /// The same sizes, written: the rotated queries. It may be q itself, with the same strides.
    pub q_rotated: flashtune_tensor,
    /// A FLASHTUNE_DTYPE_*: the type of k_cache and v_cache; 0 means dtype. With dtype FP16 or BF16
    /// it may be E4M3, E5M2 or INT8. New rows are then rotated, divided by their scales and
    /// rounded, as FLASHTUNE_DTYPE_E4M3 says. The division is x * (1 / scale) in fp32. It may be
    /// INT4_GROUP32 or INT4_GROUP64 too, with k_descale and v_descale NULL: new rows are then
    /// rotated and quantised as FLASHTUNE_DTYPE_INT4_GROUP32 says, with their scales and zeros.
    pub cache_dtype: i32,
    /// With a cache of 8 bits, 0: k_descale and v_descale are read. 1: each new key and head gets
    /// its own scale, its largest magnitude over the largest number of cache_dtype, and the scales
    /// are written. A row of zeros gets the scale 1.
    pub computes_descale: i32,
    /// fp32: the scales of k_cache, as flashtune_forward_params takes them. With keys_per_descale 1
    /// they are (batch_size, seqlen_cache, num_heads_kv), with pages (num_pages, page_size,
    /// num_heads_kv), with cache_batch_idx (batch_size_cache, seqlen_cache, num_heads_kv). With 0
    /// they are (batch_size, 1, num_heads_kv). A stride of 0 shares a scale that is read.
    ///
    /// On a CPU context a launch refuses given scales that are not finite or not above 0. On a CUDA
    /// context nothing checks them, and the rows that use such a scale hold anything.
    pub k_descale: flashtune_tensor,
    /// The same for v_cache.
    pub v_descale: flashtune_tensor,
    /// 0 or 1: see k_descale. It must be 1 with computes_descale.
    pub keys_per_descale: i64,
}

/// Sequences are slots of a server: seqused_new and cache_batch_idx are used, and seqused may be
/// the array seqlens itself. The lengths then advance in place, so a captured graph needs no copy.
pub const FLASHTUNE_APPEND_SLOTS: u64 = 1;

// SAFETY: repr(C), a u64 first, then integers and raw pointers, which have no invalid bytes.
unsafe impl SizedStruct for flashtune_kv_append_params {
    const NAME: &'static str = "flashtune_kv_append_params";
    const OLDEST: usize = 240;
}
// This number grows with the struct. OLDEST stays.
const _: () = assert!(size_of::<flashtune_kv_append_params>() == 488);

impl From<&flashtune_kv_append_params> for PageInputs {
    fn from(params: &flashtune_kv_append_params) -> PageInputs {
        PageInputs {
            block_table: params.block_table,
            block_table_stride: params.block_table_stride,
            page_size: params.page_size,
            num_pages: params.num_pages,
        }
    }
}
