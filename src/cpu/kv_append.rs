//! Writing new keys and values into a cache on host memory: a task is some of a sequence's new keys.

use super::workers::Workers;
use crate::call::TensorRef;
use crate::error::Result;
use crate::kv_append::KvAppend;
use std::ops::Range;
use std::sync::Arc;

/// Keys of a task, at least: enough to be worth handing out.
const KEYS: i64 = 64;

pub struct KvAppender {
    pub(super) workers: Arc<Workers>,
}

impl KvAppender {
    /// Returns when the cache is written.
    pub fn launch(&self, append: &KvAppend) -> Result<()> {
        // No more tasks of a sequence than there are workers, since each looks at all of its pages.
        let keys = (append.seqlen_new + self.workers.count() as i64 - 1) / self.workers.count() as i64;
        let keys = keys.max(KEYS);
        let parts = ((append.seqlen_new + keys - 1) / keys).max(1);
        self.workers.for_each((append.batch_size * parts) as usize, 0, |task, _| {
            let (batch, part) = (task as i64 / parts, task as i64 % parts);
            let first = part * keys;
            write(append, batch, first..append.seqlen_new.min(first + keys));
        })
    }
}

/// These of a sequence's new keys and, with the first of them, how many it uses.
fn write(append: &KvAppend, batch: i64, new: Range<i64>) {
    // SAFETY: one of batch_size lengths (the caller checked them).
    let before = i64::from(unsafe { append.seqlens.offset(batch as isize).read() });
    let fits = has_room(append, batch, before);
    if new.start == 0 && !append.seqused.is_null() {
        let used = if fits { before + append.seqlen_new } else { before.clamp(0, append.seqlen_cache) };
        // SAFETY: as above; this task alone writes it.
        unsafe { append.seqused.offset(batch as isize).write(used as i32) };
    }
    if !fits {
        return;
    }
    for position in new {
        let (entry, row) = place(append, batch, before + position);
        for head in 0..append.num_heads_kv {
            let of_k = (&append.k_new, &append.k_cache, append.head_dim);
            let of_v = (&append.v_new, &append.v_cache, append.head_dim_v);
            for (from, to, dim) in [of_k, of_v] {
                let from = address(append, from, [batch, position, head]);
                let to = address(append, to, [entry, row, head]);
                // SAFETY: rows of tensors that share no byte (the caller checked them); the sequence has room for its new keys, and
                // a page for each.
                unsafe { std::ptr::copy_nonoverlapping(from, to, (dim * append.element_bytes) as usize) };
            }
        }
    }
}

/// Whether there is a place for each of its new keys.
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

/// The entry of the cache and the row there that a sequence's key goes to.
fn place(append: &KvAppend, batch: i64, key: i64) -> (i64, i64) {
    match append.page_size {
        0 => (batch, key),
        size => (page(append, batch, key / size), key % size),
    }
}

fn page(append: &KvAppend, batch: i64, index: i64) -> i64 {
    // SAFETY: of a key that the sequence has room for (the caller checked the table's size).
    i64::from(unsafe { append.block_table.offset((batch * append.block_table_stride + index) as isize).read() })
}

fn address(append: &KvAppend, tensor: &TensorRef, [entry, row, head]: [i64; 3]) -> *mut u8 {
    let elements = entry * tensor.stride_batch + row * tensor.stride_seqlen + head * tensor.stride_head;
    tensor.data.cast::<u8>().wrapping_offset((elements * append.element_bytes) as isize)
}
