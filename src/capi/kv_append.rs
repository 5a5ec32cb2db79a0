//! Writing new keys and values into a K/V cache: the C struct, its checks, and the C functions.

use super::accesses::Accesses;
use super::args::Memory;
use super::array::Array;
use super::context::flashtune_context;
use super::inputs::dtype;
use super::op;
use super::operand::{Access, Data, Operand, Rows};
use super::pages::PageInputs;
use super::params::Params;
use super::sized::{SizedStruct, address};
use super::types::*;
use crate::error::{Error, Result};
use crate::ops::kv_append::{KvAppend, KvAppendClass};
use crate::problem::{Layout, MAX_HEAD_DIM, MAX_SEQLEN, check_range};
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
    /// A FLASHTUNE_DTYPE_*: the type of k_new, v_new, k_cache and v_cache. Elements are copied bit
    /// by bit.
    pub dtype: i32,
    /// Must be 0.
    pub reserved: i32,
    /// Sequences, 0 to 2^31 - 1. With 0 the call does nothing. batch_size * seqlen_new *
    /// num_heads_kv is at most 2^50. So are the cache's rows: batch_size * seqlen_cache *
    /// num_heads_kv, with pages num_pages * page_size * num_heads_kv.
    pub batch_size: i64,
    /// Heads of the keys and values, at least 1.
    pub num_heads_kv: i64,
    /// New keys of each sequence, 0 to 2^31 - 4096. With 0 only seqused is written.
    pub seqlen_new: i64,
    /// Keys that each sequence has room for, 0 to 2^31 - 4096. With pages, the room is in the pages
    /// of its row of block_table.
    pub seqlen_cache: i64,
    /// Dim of k_new and k_cache, 1 to 512.
    pub head_dim: i64,
    /// Dim of v_new and v_cache, 1 to 512.
    pub head_dim_v: i64,
    /// (batch_size, seqlen_new, num_heads_kv, head_dim), read.
    pub k_new: flashtune_tensor,
    /// (batch_size, seqlen_new, num_heads_kv, head_dim_v), read.
    pub v_new: flashtune_tensor,
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
    /// seqlens[b] + seqlen_new. A sequence that got no keys keeps its length, clamped to the range
    /// from 0 to seqlen_cache. NULL if not wanted.
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
}

// SAFETY: repr(C), a u64 first, then integers and raw pointers, which have no invalid bytes.
unsafe impl SizedStruct for flashtune_kv_append_params {
    const NAME: &'static str = "flashtune_kv_append_params";
    const OLDEST: usize = 240;
}
// This number grows with the struct. OLDEST stays.
const _: () = assert!(size_of::<flashtune_kv_append_params>() == 240);

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

/// Prepares the kernel that appends the keys and values of these params. This may take a second.
/// After OK, flashtune_kv_append only enqueues, for any sizes and for data, strides and rows of the
/// same alignment.
///
/// Data pointers may be NULL, and then count as aligned to 16 bytes. May be called from any thread,
/// but not while a stream of this thread is capturing.
///
/// Statuses: OK, INVALID_ARGUMENT, NOT_PREPARED (the context is sealed), NO_COMPILER,
/// COMPILE_FAILED, CUDA, OUT_OF_MEMORY.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flashtune_kv_append_prepare(
    context: *mut flashtune_context,
    params: *const flashtune_kv_append_params,
) -> i32 {
    // SAFETY: the C caller promises what the header says. This holds for the function below too.
    unsafe { op::prepare(context, params) }
}

/// Writes new keys and values into a K/V cache. A decoding step calls it before its forward pass,
/// which takes seqused as its seqused_k.
///
/// The rules of flashtune_forward for stream, buffers, capture and threads apply. There is no
/// workspace. A missing kernel is prepared first; on a capturing stream and in a sealed context the
/// call returns NOT_PREPARED instead. k_cache, v_cache and seqused must share no byte with one
/// another or with another tensor.
///
/// Statuses: those of flashtune_kv_append_prepare.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flashtune_kv_append(
    context: *mut flashtune_context,
    params: *const flashtune_kv_append_params,
    stream: *mut c_void,
) -> i32 {
    // SAFETY: as above.
    unsafe { op::launch(context, params, stream) }
}

impl Params for flashtune_kv_append_params {
    type Checked = KvAppend;

    fn check(&self, data: Data, memory: Memory) -> Result<KvAppend> {
        check(self, data, memory)
    }
}

fn check(params: &flashtune_kv_append_params, data: Data, memory: Memory) -> Result<KvAppend> {
    let dtype = dtype("dtype", params.dtype)?;
    if params.reserved != 0 {
        return Err(Error::invalid(format!("reserved is {}; it must be 0", params.reserved)));
    }
    let pages = PageInputs::from(params);
    check_sizes(params, &pages)?;
    let flashtune_kv_append_params {
        batch_size,
        num_heads_kv,
        seqlen_new,
        seqlen_cache,
        head_dim,
        head_dim_v,
        page_size,
        ..
    } = *params;

    let new = |name, tensor, dim| {
        Operand::new(name, Access::Read, tensor, [batch_size, seqlen_new, num_heads_kv, dim], dtype)
    };
    let (entries, rows, kind) = cache_rows(params);
    let cache = |name, tensor, dim| {
        Operand::new(name, Access::Written, tensor, [entries, rows, num_heads_kv, dim], dtype).with_rows(kind)
    };
    let mut operands = [
        new("k_new", &params.k_new, head_dim),
        new("v_new", &params.v_new, head_dim_v),
        cache("k_cache", &params.k_cache, head_dim),
        cache("v_cache", &params.v_cache, head_dim_v),
    ];
    // A call without new keys reads neither the cache nor the table.
    let data_of_cache = if batch_size == 0 || seqlen_new == 0 { Data::Optional } else { data };
    let is_unread = batch_size == 0 || (seqlen_new == 0 && params.seqused.is_null());
    let data_of_lengths = if is_unread { Data::Optional } else { data };
    let mut accesses = Accesses::default();
    for operand in &mut operands {
        let footprint = operand.check(data_of_cache)?;
        accesses.add(operand.access, footprint);
    }
    accesses
        .add(Access::Read, Array::new("seqlens", params.seqlens, batch_size).check_required(data_of_lengths, None)?);
    if page_size != 0 {
        let table = pages.table_of(batch_size, ("seqlen_cache", seqlen_cache), data_of_cache)?;
        accesses.add(Access::Read, table.check_required(data_of_cache, None)?);
    }
    accesses.add(Access::Written, Array::new("seqused", params.seqused.cast_const(), batch_size).check()?);
    accesses.refuse_overlaps()?;
    let layout = match memory {
        Memory::Host => Layout::Vec1,
        Memory::Device => Layout::widest(dtype, operands.iter().flat_map(Operand::layout_quantities)),
    };
    let element_bytes = dtype.bytes() as i64;
    let [k_new, v_new, k_cache, v_cache] = operands.map(|operand| operand.tensor);
    Ok(KvAppend {
        class: KvAppendClass { access_bytes: layout.elements() * element_bytes },
        element_bytes,
        batch_size,
        num_heads_kv,
        seqlen_new,
        seqlen_cache,
        head_dim,
        head_dim_v,
        k_new,
        v_new,
        k_cache,
        v_cache,
        seqlens: params.seqlens,
        seqused: params.seqused,
        block_table: params.block_table,
        block_table_stride: params.block_table_stride,
        page_size,
        num_pages: params.num_pages,
    })
}

fn check_sizes(params: &flashtune_kv_append_params, pages: &PageInputs) -> Result<()> {
    for (name, value, low, high) in [
        ("batch_size", params.batch_size, 0, i64::from(i32::MAX)),
        ("num_heads_kv", params.num_heads_kv, 1, i64::from(i32::MAX)),
        ("seqlen_new", params.seqlen_new, 0, MAX_SEQLEN),
        ("seqlen_cache", params.seqlen_cache, 0, MAX_SEQLEN),
        ("head_dim", params.head_dim, 1, MAX_HEAD_DIM),
        ("head_dim_v", params.head_dim_v, 1, MAX_HEAD_DIM),
    ] {
        check_range(name, value, low, high)?;
    }
    if params.page_size != 0 {
        pages.page_size("or page_size 0 for a cache without pages")?;
    } else if !params.block_table.is_null() {
        let table = address(params.block_table.cast());
        return Err(Error::invalid(format!("block_table is {table}; it must be NULL, since page_size is 0")));
    } else if params.num_pages != 0 {
        let num_pages = params.num_pages;
        return Err(Error::invalid(format!("num_pages is {num_pages}; it must be 0, since page_size is 0")));
    }
    let (entries, rows, _) = cache_rows(params);
    let heads = i128::from(params.num_heads_kv);
    for (what, entries, rows) in [
        ("batch_size x seqlen_new", params.batch_size, params.seqlen_new),
        ("cache entries x keys of each", entries, rows),
    ] {
        let all = i128::from(entries) * i128::from(rows) * heads;
        if all > MAX_ROWS {
            return Err(Error::invalid(format!(
                "{what} x num_heads_kv, {entries} x {rows} x {heads}, overflows; it must be at most 2^50"
            )));
        }
    }
    Ok(())
}

/// Most rows of a tensor. Their bytes fit an i64 with the largest head dim and type.
const MAX_ROWS: i128 = 1 << 50;

/// Entries of the cache, rows of each entry, and their meaning.
fn cache_rows(params: &flashtune_kv_append_params) -> (i64, i64, Rows) {
    match params.page_size {
        0 => (params.batch_size, params.seqlen_cache, Rows::OfBatch),
        page_size => (params.num_pages, page_size, Rows::InPages),
    }
}
