//! The K/V cache of a case, made from its seed: the block table and each page's place, or each
//! sequence's entry and padding. Values stay in the order of sequences, so the reference knows
//! nothing of pages and entries.

use super::case::{Case, Kind, Random, Shape};
use super::lengths::Side;

/// Fills table entries that must not be read. It names no page.
const NO_PAGE: i32 = i32::MIN;

impl Case {
    /// Pages of one sequence: the entries of its row in the block table.
    pub fn pages_of_a_sequence(&self) -> i64 {
        self.extras.page_size.map_or(0, |page_size| (self.seqlen_k + page_size - 1) / page_size)
    }

    /// One page more than the sequences need. The last page belongs to no sequence, so a kernel
    /// that maps a wrong entry to it reads NaN.
    pub fn num_pages(&self) -> i64 {
        self.batch_size * self.pages_of_a_sequence() + 2
    }

    /// Elements from one sequence's row of the block table to the next.
    pub fn block_table_stride(&self) -> i64 {
        self.pages_of_a_sequence() + self.seed as i64 % 3
    }

    /// Shuffled pages, with `NO_PAGE` after each sequence's used keys.
    pub fn block_table(&self) -> Vec<i32> {
        let mut pages: Vec<i32> = (0..self.num_pages() as i32 - 1).collect();
        let mut random = Random::new(self.seed ^ 0x9a6e);
        for at in (1..pages.len()).rev() {
            pages.swap(at, random.between(0, at as i64) as usize);
        }
        let page_size = self.extras.page_size.expect("a case with pages") as usize;
        let mut table = vec![NO_PAGE; (self.batch_size * self.block_table_stride()) as usize];
        let mut next = pages.into_iter();
        let rows = self.rows(Side::K);
        for (row, rows) in table.chunks_mut(self.block_table_stride().max(1) as usize).zip(rows) {
            row.iter_mut().zip(next.by_ref()).take(rows.used.div_ceil(page_size)).for_each(|(to, page)| *to = page);
        }
        table
    }

    /// Entries of a cache that `cache_batch_idx` names into: two that belong to no sequence are
    /// there to trap a wrong index.
    pub fn num_entries(&self) -> i64 {
        self.batch_size + 2
    }

    /// A shuffled choice of entries, without the last.
    pub fn cache_batch_idx(&self) -> Vec<i32> {
        let mut entries: Vec<i32> = (0..self.num_entries() as i32 - 1).collect();
        let mut random = Random::new(self.seed ^ 0xcac4e);
        for at in (1..entries.len()).rev() {
            entries.swap(at, random.between(0, at as i64) as usize);
        }
        entries.truncate(self.batch_size as usize);
        entries
    }

    /// The tensor's layout in memory; paged keys are (num_pages, page_size, heads, dim).
    pub fn shape_in_memory(&self, kind: Kind) -> Shape {
        match (self.extras.page_size, Side::of(kind)) {
            (Some(page_size), Side::K) => self.laid_out(kind, self.num_pages(), page_size),
            (None, Side::K) if self.extras.key_starts => self.laid_out(kind, self.num_entries(), self.seqlen_k),
            _ => self.shape(kind),
        }
    }

    /// Buffer index of each used row (batch, position, head) in order, and None for unused rows.
    pub fn rows_in_memory(&self, kind: Kind) -> Vec<Option<usize>> {
        let used = self.used(kind);
        let of_sequence = |b| (0..self.seqlen_k).flat_map(move |s| (0..self.num_heads_kv).map(move |h| (b, s, h)));
        let all = (0..self.batch_size).flat_map(of_sequence);
        if self.extras.key_starts && Side::of(kind) == Side::K {
            let (shape, entries, leftpads) = (self.shape_in_memory(kind), self.cache_batch_idx(), self.leftpads());
            let place = |b: i64, s: i64, h: i64| {
                let (entry, row) = (i64::from(entries[b as usize]), i64::from(leftpads[b as usize]) + s);
                shape.lead + entry * shape.stride_batch + row * shape.stride_seqlen + h * shape.stride_head
            };
            return all.zip(used).map(|((b, s, h), is_used)| is_used.then(|| place(b, s, h) as usize)).collect();
        }
        let (page_size, shape) = match (self.extras.page_size, Side::of(kind)) {
            (Some(page_size), Side::K) => (page_size, self.shape_in_memory(kind)),
            _ => return self.shape(kind).rows().zip(used).map(|(row, is_used)| is_used.then_some(row)).collect(),
        };
        let table = self.block_table();
        let place = |b: i64, s: i64, h: i64| {
            let page = i64::from(table[(b * self.block_table_stride() + s / page_size) as usize]);
            let in_page = s % page_size * shape.stride_seqlen + h * shape.stride_head;
            (shape.lead + page * shape.stride_batch + in_page) as usize
        };
        all.zip(used).map(|((b, s, h), is_used)| is_used.then(|| place(b, s, h))).collect()
    }
}
