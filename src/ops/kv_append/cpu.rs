//! Writing new keys and values into a K/V cache on host memory.
//!
//! Without pages a task is some of one sequence's new keys. Sequences may share pages, so with
//! pages a task is all that goes to one head's keys or values.

use super::call::KvAppend;
use crate::call::TensorRef;
use crate::cpu::Workers;
use crate::error::Result;
use std::ops::Range;

/// Least number of keys of a task: enough to outweigh the cost of handing it to a worker.
const KEYS: usize = 64;

/// New keys or new values, and the cache they go to.
struct Side<'a> {
    from: &'a TensorRef,
    to: &'a TensorRef,
    dim: i64,
}

/// Returns when the cache is written.
pub fn run(append: &KvAppend, workers: &Workers) -> Result<()> {
    match append.page_size {
        0 => write_by_sequence(append, workers),
        _ => write_by_head(append, workers),
    }
}

fn write_by_sequence(append: &KvAppend, workers: &Workers) -> Result<()> {
    let seqlen_new = append.seqlen_new as usize;
    let keys = seqlen_new.div_ceil(workers.count()).max(KEYS);
    let (parts, keys) = (seqlen_new.div_ceil(keys).max(1) as i64, keys as i64);
    workers.for_each((append.batch_size * parts) as usize, 0, |task, _| {
        let (batch, part) = (task as i64 / parts, task as i64 % parts);
        let first = part * keys;
        let before = length_before(append, batch);
        let fits = has_room(append, batch, before);
        if part == 0 {
            write_seqused(append, batch, before, fits);
        }
        if fits {
            for side in &sides(append) {
                let new = first..append.seqlen_new.min(first + keys);
                write(append, side, batch, before, new, 0..append.num_heads_kv);
            }
        }
    })
}

fn write_by_head(append: &KvAppend, workers: &Workers) -> Result<()> {
    let heads = append.num_heads_kv;
    workers.for_each(2 * heads as usize, 0, |task, _| {
        let (side, head) = (&sides(append)[task % 2], task as i64 / 2);
        for batch in 0..append.batch_size {
            let before = length_before(append, batch);
            let fits = has_room(append, batch, before);
            if task == 0 {
                write_seqused(append, batch, before, fits);
            }
            if fits {
                write(append, side, batch, before, 0..append.seqlen_new, head..head + 1);
            }
        }
    })
}

fn sides(append: &KvAppend) -> [Side<'_>; 2] {
    [
        Side { from: &append.k_new, to: &append.k_cache, dim: append.head_dim },
        Side { from: &append.v_new, to: &append.v_cache, dim: append.head_dim_v },
    ]
}

fn length_before(append: &KvAppend, batch: i64) -> i64 {
    // SAFETY: one of batch_size lengths (the caller checked them).
    i64::from(unsafe { append.seqlens.offset(batch as isize).read() })
}

/// Called by one task for each sequence.
fn write_seqused(append: &KvAppend, batch: i64, before: i64, fits: bool) {
    if append.seqused.is_null() {
        return;
    }
    let used = if fits { before + append.seqlen_new } else { before.clamp(0, append.seqlen_cache) };
    // SAFETY: one of batch_size lengths (the caller checked them), which this task alone writes.
    unsafe { append.seqused.offset(batch as isize).write(used as i32) };
}

/// Copies new keys `new` of a sequence, for `heads` alone.
fn write(append: &KvAppend, side: &Side, batch: i64, before: i64, new: Range<i64>, heads: Range<i64>) {
    for position in new {
        let (entry, row) = place(append, batch, before + position);
        for head in heads.clone() {
            let from = address(append, side.from, [batch, position, head]);
            let to = address(append, side.to, [entry, row, head]);
            // SAFETY: the two rows share no byte (the caller checked the tensors). No other task
            // writes this row: without pages it is this sequence's, with pages this head's. The
            // sequence has room and a page for each new key.
            unsafe { std::ptr::copy_nonoverlapping(from, to, (side.dim * append.element_bytes) as usize) };
        }
    }
}

/// Whether the sequence has a place for each of its new keys.
fn has_room(append: &KvAppend, batch: i64, before: i64) -> bool {
    if before < 0 || before > append.seqlen_cache - append.seqlen_new {
        return false;
    }
    let pages = match append.page_size {
        0 => 0..0,
        size => before / size..(before + append.seqlen_new + size - 1) / size,
    };
    append.seqlen_new == 0 || pages.into_iter().all(|i| (0..append.num_pages).contains(&page(append, batch, i)))
}

/// The entry of the cache that a sequence's key goes to, and the row in that entry.
fn place(append: &KvAppend, batch: i64, key: i64) -> (i64, i64) {
    match append.page_size {
        0 => (batch, key),
        size => (page(append, batch, key / size), key % size),
    }
}

fn page(append: &KvAppend, batch: i64, index: i64) -> i64 {
    // SAFETY: the page of a key that the sequence has room for (the caller checked the table's
    // size).
    i64::from(unsafe { append.block_table.offset((batch * append.block_table_stride + index) as isize).read() })
}

fn address(append: &KvAppend, tensor: &TensorRef, [entry, row, head]: [i64; 3]) -> *mut u8 {
    let elements = entry * tensor.stride_batch + row * tensor.stride_seqlen + head * tensor.stride_head;
    tensor.data.cast::<u8>().wrapping_offset((elements * append.element_bytes) as isize)
}
