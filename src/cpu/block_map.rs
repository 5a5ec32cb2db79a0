//! Which blocks of scores count: the lists of a launch's block mask as a map, which either pass asks from either side.
//!
//! A byte for each block, where the lists have room for four. Without a block mask all scores are of one block, in which
//! everything else decides.

use super::read_only::ReadOnly;
use super::scores::{Along, Line};
use crate::call::Call;
use crate::problem::{BlockMask, Pass};
use std::ops::Range;

/// What of a block counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shows {
    Nothing,
    /// What else there is lets be seen.
    Part,
    /// The same, without a look at the mask of bytes.
    Full,
}

pub struct BlockMap(Option<Map>);

struct Map {
    /// Queries and keys of a block.
    block: (usize, usize),
    /// Blocks of queries and of keys.
    blocks: (usize, usize),
    /// Blocks from one batch entry, and from one head, to the next; 0 where they are the same.
    strides: (usize, usize),
    shows: Vec<Shows>,
}

impl BlockMap {
    pub fn new(call: &Call) -> BlockMap {
        let problem = &call.problem;
        BlockMap(problem.features.block_mask.map(|mask| Map::new(call, mask)))
    }

    pub fn is_on(&self) -> bool {
        self.0.is_some()
    }

    /// Whether any of these scores may count; there is at least one.
    pub fn shows_any(&self, batch: usize, head: usize, rows: Range<usize>, keys: Range<usize>) -> bool {
        self.0.as_ref().is_none_or(|map| {
            let of = |range: Range<usize>, size| range.start / size..=(range.end - 1) / size;
            let mut rows = of(rows, map.block.0);
            rows.any(|row| of(keys.clone(), map.block.1).any(|key| map.shows(batch, head, row, key) != Shows::Nothing))
        })
    }

    /// A line of `len` scores in the pieces that lie in one block each: their place in the line, and what counts.
    pub fn pieces(&self, batch: usize, line: Line, len: usize) -> impl Iterator<Item = (Range<usize>, Shows)> {
        let mut at = 0;
        std::iter::from_fn(move || {
            if at >= len {
                return None;
            }
            let (end, shows) = match &self.0 {
                None => (len, Shows::Part),
                Some(map) => {
                    let (first, size) = match line.along {
                        Along::Rows => (line.row, map.block.0),
                        Along::Keys => (line.key, map.block.1),
                    };
                    let (row, key) = match line.along {
                        Along::Rows => (line.row + at, line.key),
                        Along::Keys => (line.row, line.key + at),
                    };
                    let next_block = ((first + at) / size + 1) * size - first;
                    (len.min(next_block), map.shows(batch, line.head, row / map.block.0, key / map.block.1))
                }
            };
            Some((std::mem::replace(&mut at, end)..end, shows))
        })
    }
}

impl Map {
    /// Of lists that the caller has checked.
    fn new(call: &Call, BlockMask { block_q, block_k }: BlockMask) -> Map {
        let (problem, lists) = (&call.problem, &call.features.block_lists);
        let blocks = (
            (problem.seqlen_q as usize).div_ceil(block_q as usize),
            (problem.seqlen_k as usize).div_ceil(block_k as usize),
        );
        let area = blocks.0 * blocks.1;
        let own = |count: i64, strides: [i64; 2]| if strides == [0, 0] { 1 } else { count as usize };
        let batches = own(problem.batch_size, [lists.num_blocks_stride_batch, lists.indices_stride_batch]);
        let heads = own(problem.num_heads_q, [lists.num_blocks_stride_head, lists.indices_stride_head]);
        let strides = (if batches > 1 { heads * area } else { 0 }, if heads > 1 { area } else { 0 });
        let mut shows = vec![Shows::Nothing; batches * heads * area];
        let is_forward = problem.pass == Pass::Forward;
        let rows = if is_forward { blocks.0 } else { blocks.1 };
        for (batch, head, row) in
            (0..batches).flat_map(|b| (0..heads).flat_map(move |h| (0..rows).map(move |row| (b, h, row))))
        {
            let of_head =
                |batch_stride: i64, head_stride: i64| batch * batch_stride as usize + head * head_stride as usize;
            let count_at = of_head(lists.num_blocks_stride_batch, lists.num_blocks_stride_head) + row;
            let first = of_head(lists.indices_stride_batch, lists.indices_stride_head)
                + row * lists.indices_stride_row as usize;
            let both = [
                (lists.num_blocks, lists.indices, Shows::Part),
                (lists.full_num_blocks, lists.full_indices, Shows::Full),
            ];
            for (counts, indices, what) in both.into_iter().filter(|(counts, ..)| !counts.is_null()) {
                // SAFETY: the number of this row, in an array that the caller keeps alive and unwritten during a launch.
                let count = unsafe { ReadOnly::new(counts).at(count_at) } as usize;
                for entry in first..first + count {
                    // SAFETY: an entry of this row, likewise.
                    let block = unsafe { ReadOnly::new(indices).at(entry) } as usize;
                    let (q, k) = if is_forward { (row, block) } else { (block, row) };
                    shows[batch * strides.0 + head * strides.1 + q * blocks.1 + k] = what;
                }
            }
        }
        Map { block: (block_q as usize, block_k as usize), blocks, strides, shows }
    }

    fn shows(&self, batch: usize, head: usize, block_q: usize, block_k: usize) -> Shows {
        self.shows[batch * self.strides.0 + head * self.strides.1 + block_q * self.blocks.1 + block_k]
    }
}
