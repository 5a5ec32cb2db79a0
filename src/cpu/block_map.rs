//! Which blocks of scores count: the lists of a launch's block mask, which either pass asks tile by tile.
//!
//! A tile copies what the lists say of the blocks that it touches to a table of its own, a byte for each, since scores are
//! looked at by rows and by keys and a list may be in any order. So nothing is allocated, however many blocks there are.
//! Without a block mask all scores are of one block, in which everything else decides.

use super::MAX_BLOCK;
use super::read_only::ReadOnly;
use super::scores::{Along, Line};
use crate::call::{BlockLists, Call};
use crate::problem::{BlockMask, MASK_BLOCK_STEP, Pass};
use std::ops::Range;

/// What of a block counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shows {
    Nothing,
    /// What else there is lets be seen.
    Part,
    /// The same, without a look at the mask.
    Full,
}

pub struct BlockMap(Option<Lists>);

/// Lists that the caller has checked.
struct Lists {
    pass: Pass,
    /// Queries and keys of a block.
    block: (usize, usize),
    partial: List,
    full: List,
    counts_strides: [usize; 2],
    /// Of batch entries, heads and rows.
    indices_strides: [usize; 3],
}

/// The numbers of a row's blocks, and the blocks; NULL where none is of this kind.
#[derive(Clone, Copy)]
struct List {
    counts: ReadOnly<i32>,
    indices: ReadOnly<i32>,
}

/// The blocks that a tile touches, and what of each counts.
pub struct TileBlocks {
    /// Queries and keys of a block; None without a block mask.
    block: Option<(usize, usize)>,
    /// The first of the tile, in queries and in keys.
    first: (usize, usize),
    /// How many beside each other, in keys.
    cols: usize,
    shows: [Shows; MOST_BLOCKS],
}

/// The largest tile has no more of the smallest blocks: both begin at multiples of `MASK_BLOCK_STEP`.
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
        TileBlocks { block, first: (0, 0), cols: 0, shows: [Shows::Nothing; MOST_BLOCKS] }
    }

    /// Whether any score of the tile may count, of which there is at least one; then the table is its own.
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
        table.shows[..of_rows.len() * of_keys.len()].fill(Shows::Nothing);
        // Lists are of the blocks of queries forward, of keys backward.
        let (lists_of, listed, steps) = match lists.pass {
            Pass::Forward => (of_rows, of_keys, (table.cols, 1)),
            Pass::Backward => (of_keys, of_rows, (1, table.cols)),
        };
        let mut shows_any = false;
        for (at, row) in lists_of.enumerate() {
            lists.for_each(batch, head, row, |block, shows| {
                if listed.contains(&block) {
                    table.shows[at * steps.0 + (block - listed.start) * steps.1] = shows;
                    shows_any = true;
                }
            });
        }
        shows_any
    }
}

impl TileBlocks {
    /// A line of `len` scores of the tile in the pieces that lie in one block each: their place in the line, and what counts.
    pub fn pieces(&self, line: Line, len: usize) -> impl Iterator<Item = (Range<usize>, Shows)> {
        let mut at = 0;
        std::iter::from_fn(move || {
            if at >= len {
                return None;
            }
            let (end, shows) = match self.block {
                None => (len, Shows::Part),
                Some((block_q, block_k)) => {
                    let (first, size) = match line.along {
                        Along::Rows => (line.row, block_q),
                        Along::Keys => (line.key, block_k),
                    };
                    let Line { row, key, .. } = line.after(at);
                    let next_block = ((first + at) / size + 1) * size - first;
                    (len.min(next_block), self.shows(row / block_q, key / block_k))
                }
            };
            Some((std::mem::replace(&mut at, end)..end, shows))
        })
    }

    fn shows(&self, block_q: usize, block_k: usize) -> Shows {
        self.shows[(block_q - self.first.0) * self.cols + block_k - self.first.1]
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

    fn for_each(&self, batch: usize, head: usize, row: usize, mut visit: impl FnMut(usize, Shows)) {
        let [batch_counts, head_counts] = self.counts_strides;
        let [batch_indices, head_indices, row_indices] = self.indices_strides;
        let first = batch * batch_indices + head * head_indices + row * row_indices;
        let both = [(self.partial, Shows::Part), (self.full, Shows::Full)];
        for (list, shows) in both.into_iter().filter(|(list, _)| !list.counts.is_null()) {
            // SAFETY: the number of this row, in an array that the caller keeps alive and unwritten during a launch.
            let count = unsafe { list.counts.at(batch * batch_counts + head * head_counts + row) } as usize;
            for entry in first..first + count {
                // SAFETY: an entry of this row, likewise.
                visit(unsafe { list.indices.at(entry) } as usize, shows);
            }
        }
    }
}
