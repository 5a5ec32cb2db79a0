//! Block map: which blocks of scores count, from the lists of a launch's block mask. Both passes
//! ask it tile by tile.
//!
//! Scores are read by rows and by keys, and a list may be in any order. A tile therefore copies the
//! kinds of the blocks that it overlaps to a table of its own, one byte a block; a launch allocates
//! nothing. Without a block mask all scores lie in one partial block.

use super::read_only::ReadOnly;
use super::tile::{Axis, BlockKind, Line, MAX_BLOCK};
use crate::call::{BlockLists, Call};
use crate::problem::{BlockMask, MASK_BLOCK_STEP, Pass};
use std::ops::Range;

pub struct BlockMap(Option<Lists>);

/// The lists of a call, which the C face has checked.
struct Lists {
    pass: Pass,
    /// Queries and keys of a block.
    block: (usize, usize),
    partial: List,
    full: List,
    counts_strides: [usize; 2],
    /// The strides of batch entries, heads and rows.
    indices_strides: [usize; 3],
}

/// The number of listed blocks of each row, and the blocks; NULL where the call has no list of this
/// kind.
#[derive(Clone, Copy)]
struct List {
    counts: ReadOnly<i32>,
    indices: ReadOnly<i32>,
}

/// The blocks that a tile overlaps, and the kind of each.
pub struct TileBlocks {
    /// Queries and keys of a block; None without a block mask.
    block: Option<(usize, usize)>,
    /// The tile's first block, in blocks of queries and of keys.
    first: (usize, usize),
    /// Blocks of keys in a row of the table.
    cols: usize,
    kinds: [BlockKind; MOST_BLOCKS],
}

/// Blocks of the largest tile: tiles and the smallest blocks both begin at multiples of
/// `MASK_BLOCK_STEP`.
const MOST_BLOCKS: usize = (MAX_BLOCK as usize / MASK_BLOCK_STEP as usize).pow(2);

impl BlockMap {
    pub fn new(call: &Call) -> BlockMap {
        let problem = &call.problem;
        BlockMap(problem.features.block_mask.map(|mask| Lists::new(problem.pass, mask, &call.features.block_lists)))
    }

    pub fn is_on(&self) -> bool {
        self.0.is_some()
    }

    /// The table that `look_up` fills.
    pub fn table(&self) -> TileBlocks {
        let block = self.0.as_ref().map(|lists| lists.block);
        TileBlocks { block, first: (0, 0), cols: 0, kinds: [BlockKind::Empty; MOST_BLOCKS] }
    }

    /// Whether any score of a tile that is not empty may count. If so, fills the tile's table.
    pub fn look_up(
        &self,
        batch: usize,
        head: usize,
        rows: Range<usize>,
        keys: Range<usize>,
        table: &mut TileBlocks,
    ) -> bool {
        let Some(lists) = &self.0 else { return true };
        let of = |range: Range<usize>, size| range.start / size..range.end.div_ceil(size);
        let (of_rows, of_keys) = (of(rows, lists.block.0), of(keys, lists.block.1));
        (table.first, table.cols) = ((of_rows.start, of_keys.start), of_keys.len());
        table.kinds[..of_rows.len() * of_keys.len()].fill(BlockKind::Empty);
        // The forward pass has a list for each block of queries, the backward pass for each block
        // of keys.
        let (lists_of, listed, steps) = match lists.pass {
            Pass::Forward => (of_rows, of_keys, (table.cols, 1)),
            Pass::Backward => (of_keys, of_rows, (1, table.cols)),
        };
        let mut any_counts = false;
        for (at, row) in lists_of.enumerate() {
            lists.for_each(batch, head, row, |block, kind| {
                if listed.contains(&block) {
                    table.kinds[at * steps.0 + (block - listed.start) * steps.1] = kind;
                    any_counts = true;
                }
            });
        }
        any_counts
    }
}

impl TileBlocks {
    /// Cuts a line of `len` scores at the borders of blocks: each piece's place in the line, and
    /// its block's kind.
    pub fn pieces(&self, line: Line, len: usize) -> impl Iterator<Item = (Range<usize>, BlockKind)> {
        let mut at = 0;
        std::iter::from_fn(move || {
            if at >= len {
                return None;
            }
            let (end, kind) = match self.block {
                None => (len, BlockKind::Partial),
                Some((block_q, block_k)) => {
                    let (first, size) = match line.axis {
                        Axis::Rows => (line.row, block_q),
                        Axis::Keys => (line.key, block_k),
                    };
                    let Line { row, key, .. } = line.after(at);
                    let next_block = ((first + at) / size + 1) * size - first;
                    (len.min(next_block), self.kind(row / block_q, key / block_k))
                }
            };
            Some((std::mem::replace(&mut at, end)..end, kind))
        })
    }

    fn kind(&self, block_q: usize, block_k: usize) -> BlockKind {
        self.kinds[(block_q - self.first.0) * self.cols + block_k - self.first.1]
    }
}

impl Lists {
    fn new(pass: Pass, BlockMask { block_q, block_k }: BlockMask, lists: &BlockLists) -> Lists {
        let list = |counts, indices| List { counts: ReadOnly::new(counts), indices: ReadOnly::new(indices) };
        let strides = [lists.indices_stride_batch, lists.indices_stride_head, lists.indices_stride_row];
        Lists {
            pass,
            block: (block_q as usize, block_k as usize),
            partial: list(lists.num_blocks, lists.indices),
            full: list(lists.full_num_blocks, lists.full_indices),
            counts_strides: [lists.num_blocks_stride_batch, lists.num_blocks_stride_head].map(|s| s as usize),
            indices_strides: strides.map(|stride| stride as usize),
        }
    }

    fn for_each(&self, batch: usize, head: usize, row: usize, mut visit: impl FnMut(usize, BlockKind)) {
        let [batch_counts, head_counts] = self.counts_strides;
        let [batch_indices, head_indices, row_indices] = self.indices_strides;
        let first = batch * batch_indices + head * head_indices + row * row_indices;
        let both = [(self.partial, BlockKind::Partial), (self.full, BlockKind::Full)];
        for (list, kind) in both.into_iter().filter(|(list, _)| !list.counts.is_null()) {
            // SAFETY: the number of this row, in an array that the caller keeps alive and unwritten
            // during a launch.
            let count = unsafe { list.counts.at(batch * batch_counts + head * head_counts + row) } as usize;
            for entry in first..first + count {
                // SAFETY: an entry of this row, likewise.
                visit(unsafe { list.indices.at(entry) } as usize, kind);
            }
        }
    }
}
