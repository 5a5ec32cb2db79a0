//! Writing new keys and values into a K/V cache on host memory.
//!
//! A task is some of one sequence's new keys. Sequences may share pages or entries, so with pages
//! or entries by index a task is all that goes to one head's keys or values.

use super::call::KvAppend;
use super::rotary::{RotateRow, rotate_row};
use crate::call::TensorRef;
use crate::cpu::Workers;
use crate::error::{Error, Result};
use crate::ops::class::{CacheFormat, EightClass};
use crate::ops::rows::{largest, widen};
use crate::problem::MAX_HEAD_DIM;
use std::ops::Range;

/// Least number of keys of a task: enough to outweigh the cost of handing it to a worker.
const KEYS: usize = 64;

/// New keys or new values, and the cache they go to.
struct Side<'a> {
    from: &'a TensorRef,
    to: &'a TensorRef,
    scales: &'a TensorRef,
    dim: i64,
    rotate: Option<RotateRow>,
}

/// Returns when the cache is written.
pub fn run(append: &KvAppend, workers: &Workers) -> Result<()> {
    check_scales(append)?;
    // Sequences that name the same entry may write the same row, as those that share a page may.
    match append.page_size == 0 && append.cache_batch_idx.is_null() {
        true => write_by_sequence(append, workers)?,
        false => write_by_head(append, workers)?,
    }
    rotate_queries(append, workers)?;
    // Last, since these lengths may replace those before.
    (0..append.batch_size).for_each(|batch| write_seqused(append, &New::of(append, batch), batch));
    Ok(())
}

/// A sequence's new keys.
struct New {
    /// Keys before.
    before: i64,
    count: i64,
    /// Whether the sequence has a place for each of them.
    fits: bool,
}

impl New {
    fn of(append: &KvAppend, batch: i64) -> New {
        let before = length_before(append, batch);
        let count = match append.seqused_new.is_null() {
            true => append.seqlen_new,
            // SAFETY: one of batch_size numbers (the caller checked them).
            false => i64::from(unsafe { *append.seqused_new.offset(batch as isize) }).clamp(0, append.seqlen_new),
        };
        New { before, count, fits: has_room(append, batch, before, count) }
    }
}

fn write_by_sequence(append: &KvAppend, workers: &Workers) -> Result<()> {
    let seqlen_new = append.seqlen_new as usize;
    let keys = seqlen_new.div_ceil(workers.count()).max(KEYS);
    let (parts, keys) = (seqlen_new.div_ceil(keys).max(1) as i64, keys as i64);
    workers.for_each((append.batch_size * parts) as usize, 0, |task, _| {
        let (batch, part) = (task as i64 / parts, task as i64 % parts);
        let new = New::of(append, batch);
        if new.fits {
            for side in &sides(append) {
                let positions = part * keys..new.count.min((part + 1) * keys);
                write(append, side, batch, new.before, positions, 0..append.num_heads_kv);
            }
        }
    })
}

fn write_by_head(append: &KvAppend, workers: &Workers) -> Result<()> {
    let heads = append.num_heads_kv;
    workers.for_each(2 * heads as usize, 0, |task, _| {
        let (side, head) = (&sides(append)[task % 2], task as i64 / 2);
        for batch in 0..append.batch_size {
            let new = New::of(append, batch);
            if new.fits {
                write(append, side, batch, new.before, 0..new.count, head..head + 1);
            }
        }
    })
}

/// Rotates the queries of all sequences, also of those that get no keys.
fn rotate_queries(append: &KvAppend, workers: &Workers) -> Result<()> {
    let Some(rotate) = append.class.rotary.map(rotate_row) else { return Ok(()) };
    let seqlen_q = append.rotary.seqlen_q;
    workers.for_each((append.batch_size * seqlen_q) as usize, 0, |task, _| {
        let (batch, i) = (task as i64 / seqlen_q, task as i64 % seqlen_q);
        let rotary = &append.rotary;
        let position = length_before(append, batch) + if rotary.q_at_one_position { 0 } else { i };
        for head in 0..rotary.num_heads_q {
            let [from, to] = [&rotary.q, &rotary.q_rotated].map(|tensor| address(append, tensor, [batch, i, head]));
            // SAFETY: rows of checked tensors, which this task alone reads and writes. They are the
            // same tensor or share no byte.
            unsafe { rotate(rotary, from, to, append.head_dim, position) };
        }
    })
}

fn sides(append: &KvAppend) -> [Side<'_>; 2] {
    let rotate = append.class.rotary.map(rotate_row);
    [
        Side { from: &append.k_new, to: &append.k_cache, scales: &append.scales.k, dim: append.head_dim, rotate },
        Side {
            from: &append.v_new,
            to: &append.v_cache,
            scales: &append.scales.v,
            dim: append.head_dim_v,
            rotate: None,
        },
    ]
}

fn length_before(append: &KvAppend, batch: i64) -> i64 {
    // SAFETY: one of batch_size lengths (the caller checked them).
    i64::from(unsafe { append.seqlens.offset(batch as isize).read() })
}

fn write_seqused(append: &KvAppend, new: &New, batch: i64) {
    if append.seqused.is_null() {
        return;
    }
    let used = if new.fits { new.before + new.count } else { new.before.clamp(0, append.seqlen_cache) };
    // SAFETY: one of batch_size lengths (the caller checked them), which no task uses any more.
    unsafe { append.seqused.offset(batch as isize).write(used as i32) };
}

/// Copies new keys `new` of a sequence, for `heads` alone.
fn write(append: &KvAppend, side: &Side, batch: i64, before: i64, new: Range<i64>, heads: Range<i64>) {
    for position in new {
        let (entry, row) = place(append, batch, before + position);
        for head in heads.clone() {
            let from = address(append, side.from, [batch, position, head]);
            let to = cache_address(append, side.to, [entry, row, head]);
            // SAFETY: the two rows share no byte (the caller checked the tensors). No other task
            // writes this row: it is this sequence's or, with pages or entries by index, this
            // head's. The sequence has room and a page for each new key.
            if let Some(eight) = append.class.eight {
                let place = [entry, row, head];
                // SAFETY: as below; the scale is this row's element, or one that is only read.
                unsafe { quantise(append, side, eight, [from, to], before + position, (batch, place)) };
                continue;
            }
            match side.rotate {
                Some(rotate) => unsafe { rotate(&append.rotary, from, to, side.dim, before + position) },
                None => unsafe { std::ptr::copy_nonoverlapping(from, to, (side.dim * append.element_bytes) as usize) },
            }
        }
    }
}

/// The scale of a row of the cache.
fn scale_place(append: &KvAppend, side: &Side, batch: i64, [entry, row, head]: [i64; 3]) -> *mut f32 {
    let (view, [entry, row]) = (side.scales, if append.scales.of_keys { [entry, row] } else { [batch, 0] });
    let elements = view.offset_of(entry, row, head);
    view.data.cast::<f32>().wrapping_offset(elements as isize)
}

/// Rotates a row if the side does, and quantises it.
///
/// # Safety
/// `from` is a row of new elements and `to` one of the cache, which this task alone writes and
/// which has this place and sequence. Its scale is this task's alone too, if it is computed.
unsafe fn quantise(
    append: &KvAppend,
    side: &Side,
    eight: EightClass,
    [from, to]: [*mut u8; 2],
    position: i64,
    (batch, place): (i64, [i64; 3]),
) {
    let dim = side.dim as usize;
    let (mut rotated, mut wide) = ([0u16; MAX_HEAD_DIM as usize], [0.0f32; MAX_HEAD_DIM as usize]);
    let row: *const u8 = match side.rotate {
        None => from,
        Some(rotate) => {
            let into = rotated.as_mut_ptr().cast::<u8>();
            // SAFETY: by the caller's promise; the copy has room for a row of 16-bit elements.
            unsafe { rotate(&append.rotary, from, into, side.dim, position) };
            into
        }
    };
    let wide = &mut wide[..dim];
    // SAFETY: by the caller's promise.
    unsafe { widen(eight.dtype, row, wide) };
    let keys = match eight.keys {
        CacheFormat::Eight(keys) => keys,
        CacheFormat::Four(four) => {
            // SAFETY: by the caller's promise; a row of the cache has so many bytes.
            let to = unsafe { std::slice::from_raw_parts_mut(to, four.row_bytes(side.dim) as usize) };
            return four.encode_row(wide, to);
        }
    };
    let scale = scale_place(append, side, batch, place);
    if append.scales.computes {
        // SAFETY: by the caller's promise.
        unsafe { scale.write(keys.scale_of(largest(wide))) };
    }
    // SAFETY: by the caller's promise.
    let (scale, encoded) = unsafe { (scale.read(), std::slice::from_raw_parts_mut(to, dim)) };
    keys.encode_row(wide, scale, encoded);
}

/// Refuses given scales that are not finite or not above 0.
fn check_scales(append: &KvAppend) -> Result<()> {
    let has_scales = append.class.eight.is_some_and(|eight| matches!(eight.keys, CacheFormat::Eight(_)));
    if !has_scales || append.scales.computes {
        return Ok(());
    }
    for (name, side) in ["k_descale", "v_descale"].into_iter().zip(&sides(append)) {
        for batch in 0..append.batch_size {
            let new = New::of(append, batch);
            let count = if new.fits { new.count } else { 0 };
            for (position, head) in
                (0..count).flat_map(|position| (0..append.num_heads_kv).map(move |head| (position, head)))
            {
                let (entry, row) = place(append, batch, new.before + position);
                // SAFETY: an element of the checked array.
                let scale = unsafe { scale_place(append, side, batch, [entry, row, head]).read() };
                if !(scale.is_finite() && scale > 0.0) {
                    return Err(Error::invalid(format!(
                        "{name} of sequence {batch}, key {} and head {head} is {scale}; a scale must be finite and above 0",
                        new.before + position
                    )));
                }
            }
        }
    }
    Ok(())
}

/// Whether the sequence has a place for each of its new keys.
fn has_room(append: &KvAppend, batch: i64, before: i64, count: i64) -> bool {
    if before < 0 || before > append.seqlen_cache - count {
        return false;
    }
    if !append.cache_batch_idx.is_null() && !(0..append.num_pages).contains(&entry(append, batch)) {
        return false;
    }
    let pages = match append.page_size {
        0 => 0..0,
        size => before / size..(before + count + size - 1) / size,
    };
    count == 0 || pages.into_iter().all(|i| (0..append.num_pages).contains(&page(append, batch, i)))
}

/// The entry of the cache that a sequence's key goes to, and the row in that entry.
fn place(append: &KvAppend, batch: i64, key: i64) -> (i64, i64) {
    match append.page_size {
        0 => (entry(append, batch), key),
        size => (page(append, batch, key / size), key % size),
    }
}

/// The sequence's entry of a cache without pages.
fn entry(append: &KvAppend, batch: i64) -> i64 {
    match append.cache_batch_idx.is_null() {
        true => batch,
        // SAFETY: one of batch_size numbers (the caller checked them).
        false => i64::from(unsafe { *append.cache_batch_idx.offset(batch as isize) }),
    }
}

fn page(append: &KvAppend, batch: i64, index: i64) -> i64 {
    // SAFETY: the page of a key that the sequence has room for (the caller checked the table's
    // size).
    i64::from(unsafe { append.block_table.offset((batch * append.block_table_stride + index) as isize).read() })
}

fn address(append: &KvAppend, tensor: &TensorRef, [entry, row, head]: [i64; 3]) -> *mut u8 {
    let elements = tensor.offset_of(entry, row, head);
    tensor.data.cast::<u8>().wrapping_offset((elements * append.element_bytes) as isize)
}

/// The same in the cache.
fn cache_address(append: &KvAppend, tensor: &TensorRef, [entry, row, head]: [i64; 3]) -> *mut u8 {
    let elements = tensor.offset_of(entry, row, head);
    let bytes = if append.class.eight.is_some() { 1 } else { append.element_bytes };
    tensor.data.cast::<u8>().wrapping_offset((elements * bytes) as isize)
}
