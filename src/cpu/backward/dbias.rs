//! The gradient of the bias: the score gradients of every tile, added to the caller's tensor.
//!
//! It is a phase of its own that computes each tile once more. If the bias is broadcast along a
//! dimension, tiles of many heads and blocks add to one element. One task has all tiles of its
//! elements, so no two tasks write one element, and the order of the sums does not depend on the
//! number of threads.

use super::tiles::{ScoresAre, Tiles};
use crate::call::Call;
use crate::cpu::element::Element;
use crate::cpu::scores::Scores;
use crate::cpu::sequence::Sequence;
use crate::cpu::tile::{Axis, Line};
use crate::cpu::workers::Workers;
use crate::error::Result;
use crate::family::cpu::scratch::{self, gradient_pitch};
use std::ops::Range;

/// A dimension of the bias in entries, heads or blocks.
#[derive(Clone, Copy)]
struct Dimension {
    size: usize,
    is_summed: bool,
}

impl Dimension {
    fn new(size: usize, stride: i64) -> Dimension {
        Dimension { size, is_summed: stride == 0 }
    }

    /// Tasks along this dimension.
    fn tasks(&self) -> usize {
        if self.is_summed { self.size.min(1) } else { self.size }
    }

    /// The task's part of this dimension.
    fn of_task(&self, task: usize) -> Range<usize> {
        if self.is_summed { 0..self.size } else { task..task + 1 }
    }
}

pub fn run<E: Element>(tiles: &Tiles<E>, call: &Call, workers: &Workers) -> Result<()> {
    let (problem, view) = (&call.problem, &call.features.dbias);
    let dbias = Scores::<f32>::new(view);
    let blocks = |length: i64, block: usize| (length as usize).div_ceil(block);
    let dimensions = [
        Dimension::new(problem.batch_size as usize, view.stride_batch),
        Dimension::new(problem.num_heads_q as usize, view.stride_head),
        Dimension::new(blocks(problem.seqlen_k, tiles.tile_size.n), view.stride_seqlen_k),
        Dimension::new(blocks(problem.seqlen_q, tiles.tile_size.m), view.stride_seqlen_q),
    ];
    let tasks = dimensions.iter().map(Dimension::tasks).product();
    workers.for_each(tasks, scratch::backward_tiles(problem, tiles.tile_size), |mut task, scratch| {
        let [batches, heads, key_blocks, query_blocks] = dimensions.map(|dimension| {
            let index = task % dimension.tasks();
            task /= dimension.tasks();
            dimension.of_task(index)
        });
        for batch in batches {
            let sequence = tiles.sequences.of(batch);
            for head in heads.clone() {
                for key_block in key_blocks.clone() {
                    add_tiles(tiles, &sequence, head, key_block, query_blocks.clone(), &dbias, scratch);
                }
            }
        }
    })
}

/// Adds the tiles of a key block with some query blocks.
fn add_tiles<E: Element>(
    tiles: &Tiles<E>,
    sequence: &Sequence,
    head: usize,
    key_block: usize,
    query_blocks: Range<usize>,
    dbias: &Scores<f32>,
    mut scratch: &mut [f32],
) {
    let (m, n) = (tiles.tile_size.m, tiles.tile_size.n);
    let first_key = key_block * n;
    if first_key >= sequence.seqlen_k {
        return;
    }
    let keys = tiles.load_keys(sequence, head / tiles.group_size, first_key, &mut scratch);
    let mut blocks = tiles.block_map.table();
    let seen_by = sequence.mask.rows_of_block(first_key..first_key + keys.keys);
    let begin = query_blocks.start.max(seen_by.start / m);
    for block in begin..query_blocks.end.min(seen_by.end.div_ceil(m)) {
        if !tiles.meets(sequence, head, block * m, first_key..first_key + keys.keys, &mut blocks) {
            continue;
        }
        let mut queries = tiles.load_queries(sequence, head, block * m, &mut *scratch);
        for strip in keys.strips() {
            tiles.fill(sequence, head, &keys, &strip, &mut queries, &blocks, ScoresAre::Modified);
        }
        for row in 0..queries.rows {
            let line = Line { head, row: queries.first + row, key: first_key, axis: Axis::Keys };
            let (first, stride) = dbias.line(sequence.batch, line);
            for (key, gradient) in queries.gradients[row * gradient_pitch(n)..][..keys.keys].iter().enumerate() {
                // SAFETY: an element of a row and key of this sequence, which no other task has.
                unsafe { *first.wrapping_offset(key as isize * stride) += gradient };
            }
        }
    }
}
