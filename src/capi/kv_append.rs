//! Writing new keys and values into a K/V cache: the checks of its arguments, and the C functions.

use super::accesses::Accesses;
use super::array::Array;
use super::context::flashtune_context;
use super::dtypes::dtype;
use super::kv_append_eight as eight;
use super::kv_append_params::{FLASHTUNE_APPEND_SLOTS, flashtune_kv_append_params};
use super::kv_append_slots as slots;
use super::memory::Memory;
use super::op;
use super::operand::{Access, Data, Operand, Rows};
use super::pages::PageInputs;
use super::params::Params;
use super::sized::address;
use crate::error::{Error, Result};
use crate::ops::kv_append::{CacheFormat, KvAppend, KvAppendClass, Rotary};
use crate::problem::{Layout, MAX_HEAD_DIM, MAX_SEQLEN, check_range};
use std::ffi::c_void;

/// Prepares the kernel that appends the keys and values of these params. This may take a second.
/// After OK, flashtune_kv_append only enqueues, for any sizes and for data, strides and rows of the
/// same alignment. FLASHTUNE_APPEND_SLOTS and rotations have kernels of their own: one for each
/// dtype, rotary_dtype and rotary_interleaved, which serves slots too. So have caches of 8 bits
/// and int4: one for each dtype and cache_dtype, which serves slots and rotations too.
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
/// call returns NOT_PREPARED instead. k_cache, v_cache, seqused and q_rotated must share no byte
/// with one another or with another tensor; seqused and q_rotated have one exception each.
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
    let eight = eight::class(params, dtype)?;
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
        let cache = Operand::new(name, Access::Written, tensor, [entries, rows, num_heads_kv, dim], dtype);
        cache.with_rows(kind).of_type(match eight.map(|eight| eight.keys) {
            None => dtype.into(),
            Some(CacheFormat::Eight(eight)) => eight.into(),
            Some(CacheFormat::Four(four)) => four.into(),
        })
    };
    let q_sizes = [batch_size, params.seqlen_q, params.num_heads_q, head_dim];
    let mut operands = [
        new("k_new", params.k_new, head_dim),
        new("v_new", params.v_new, head_dim_v),
        cache("k_cache", params.k_cache, head_dim),
        cache("v_cache", params.v_cache, head_dim_v),
        Operand::new("q", Access::Read, params.q, q_sizes, dtype),
        Operand::new("q_rotated", Access::Written, params.q_rotated, q_sizes, dtype),
    ];
    // A call without new keys reads neither the cache nor the table.
    let data_of_cache = if batch_size == 0 || seqlen_new == 0 { Data::Optional } else { data };
    let is_unread = batch_size == 0 || (seqlen_new == 0 && params.seqused.is_null() && params.seqlen_q == 0);
    let data_of_lengths = if is_unread { Data::Optional } else { data };
    let mut accesses = Accesses::default();
    let is_q_in_place = slots::is_q_in_place(params);
    for operand in &mut operands {
        let is_of_q = operand.name.starts_with('q');
        let footprint = operand.check(if is_of_q { data_of_lengths } else { data_of_cache })?;
        accesses.add(operand.access, footprint.filter(|_| !(is_q_in_place && operand.name == "q")));
    }
    let seqlens = Array::new("seqlens", params.seqlens, batch_size).check_required(data_of_lengths, None)?;
    accesses.add(Access::Read, seqlens.filter(|_| !slots::advances_in_place(params)));
    if page_size != 0 {
        let table = pages.table_of(batch_size, ("seqlen_cache", seqlen_cache), data_of_cache)?;
        accesses.add(Access::Read, table.check_required(data_of_cache, None)?);
    }
    accesses.add(Access::Written, Array::new("seqused", params.seqused.cast_const(), batch_size).check()?);
    let (rotary, tables) = slots::rotary(params, dtype, data_of_lengths)?;
    for array in slots::arrays(params, data_of_cache)?.into_iter().chain(tables.footprints) {
        accesses.add(Access::Read, array);
    }
    let has_scales = eight.is_some_and(|eight| matches!(eight.keys, CacheFormat::Eight(_)));
    let scales = eight::scales(params, [entries, rows], has_scales, data_of_cache, &mut accesses)?;
    accesses.check(data, memory)?;
    let layout = match memory {
        Memory::Host | Memory::Fallback => Layout::Vec1,
        Memory::Device { .. } => {
            let quantities = operands.iter().flat_map(Operand::layout_quantities);
            Layout::widest(dtype, quantities.chain(tables.layout_quantities))
        }
    };
    let element_bytes = dtype.bytes() as i64;
    let [k_new, v_new, k_cache, v_cache, q, q_rotated] = operands.map(|operand| operand.tensor);
    Ok(KvAppend {
        class: KvAppendClass {
            access_bytes: layout.elements() * element_bytes,
            // The kernel that rotates serves slots too.
            slots: params.features & FLASHTUNE_APPEND_SLOTS != 0 || params.rotary_dim != 0,
            rotary: slots::rotary_class(params, dtype)?,
            eight,
        },
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
        num_pages: params.num_pages + params.batch_size_cache,
        seqused_new: params.seqused_new,
        cache_batch_idx: params.cache_batch_idx,
        rotary: Rotary { q, q_rotated, ..rotary },
        scales,
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
    slots::check_sizes(params)?;
    let (entries, rows, _) = cache_rows(params);
    for (what, entries, rows) in [
        ("batch_size x seqlen_new", params.batch_size, params.seqlen_new),
        ("cache entries x keys of each", entries, rows),
    ] {
        refuse_too_many_rows(&format!("{what} x num_heads_kv"), [entries, rows, params.num_heads_kv])?;
    }
    refuse_too_many_rows(
        "batch_size x seqlen_q x num_heads_q",
        [params.batch_size, params.seqlen_q, params.num_heads_q],
    )
}

fn refuse_too_many_rows(what: &str, [entries, rows, heads]: [i64; 3]) -> Result<()> {
    match i128::from(entries) * i128::from(rows) * i128::from(heads) > MAX_ROWS {
        false => Ok(()),
        true => {
            Err(Error::invalid(format!("{what}, {entries} x {rows} x {heads}, overflows; it must be at most 2^50")))
        }
    }
}

/// Most rows of a tensor. Their bytes fit an i64 with the largest head dim and type.
const MAX_ROWS: i128 = 1 << 50;

/// Entries of the cache, rows of each entry, and their meaning.
fn cache_rows(params: &flashtune_kv_append_params) -> (i64, i64, Rows) {
    match params.page_size {
        0 => {
            let entries = if params.batch_size_cache == 0 { params.batch_size } else { params.batch_size_cache };
            (entries, params.seqlen_cache, Rows::OfBatch)
        }
        page_size => (params.num_pages, page_size, Rows::InPages),
    }
}
