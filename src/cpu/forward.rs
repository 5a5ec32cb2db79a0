//! The forward pass: one task per (batch, head, block of queries), which walks the keys with an
//! online softmax.
//!
//! Tiles have the queries contiguous (element (row, key) at `key * block_m + row`), and so has the
//! output accumulator: maxima, sums and rescaling run along the vector registers without a
//! horizontal step, and the GEMM reads the queries and the weights in place. Scores are base 2,
//! scaled by the product that makes them.
//!
//! Hidden scores are overwritten, so a NaN in a hidden key's K never spreads. A hidden key's V
//! meets a weight of 0 in the product of its tile: a NaN or inf there does spread, as in every
//! tiled implementation. Rows and keys that a sequence does not use are never read.

use super::block_map::{BlockMap, TileBlocks};
use super::dropout::Masks;
use super::element::{Element, Head, Tensor};
use super::matmul::{Into, Matrix, multiply};
use super::read_only::ReadOnly;
use super::scores::ScoreModifier;
use super::sequence::{Sequence, Sequences};
use super::tile::{Axis, BLOCK_STEP, BlockKind, Line, TileSize};
use super::vector::{LANES, Level, multiply_in_place, scale_rows, softmax_step};
use super::workers::{Workers, take};
use crate::call::Call;
use crate::error::Result;
use crate::family::cpu::scratch;
use std::f32::consts::LOG2_E;
use std::f64::consts::LN_2;
use std::ops::Range;

pub fn run<E: Element>(call: &Call, tile_size: TileSize, level: Level, workers: &Workers) -> Result<()> {
    let problem = &call.problem;
    let pass = Forward::<E> {
        tile_size,
        level,
        sequences: Sequences::new(call),
        block_map: BlockMap::new(call),
        modifier: ScoreModifier::new(call, level),
        masks: Masks::new(call, level),
        heads: problem.num_heads_q as usize,
        group_size: problem.group_size() as usize,
        dim: problem.head_dim as usize,
        dim_v: problem.head_dim_v as usize,
        q: Tensor::new(&call.q, problem.head_dim as usize),
        k: Tensor::new(&call.k, problem.head_dim as usize),
        v: Tensor::new(&call.v, problem.head_dim_v as usize),
        out: Tensor::new(&call.out, problem.head_dim_v as usize),
        lse: Lse(call.lse),
        sinks: problem.features.sinks.then_some(ReadOnly::new(call.features.sinks)),
    };
    let query_blocks = (problem.seqlen_q as usize).div_ceil(tile_size.m);
    let tasks = problem.batch_size as usize * pass.heads * query_blocks;
    workers.for_each(tasks, scratch::forward(problem, tile_size), |task, scratch| {
        let (head, block) = (task / query_blocks, task % query_blocks);
        pass.query_block(head / pass.heads, head % pass.heads, block * tile_size.m, scratch);
    })
}

/// The caller's array, or NULL.
#[derive(Clone, Copy)]
struct Lse(*mut f32);

// SAFETY: each task writes the rows of its own query block and nothing else.
unsafe impl Send for Lse {}
// SAFETY: as above.
unsafe impl Sync for Lse {}

/// The rows and keys of a tile of scores.
#[derive(Clone, Copy)]
struct Tile {
    first_row: usize,
    rows: usize,
    first_key: usize,
    keys: usize,
}

impl Tile {
    /// The rows of the tile that see its `key`; both count from the tile's first.
    fn rows_that_see(&self, key: usize, sequence: &Sequence) -> Range<usize> {
        let seen_by = sequence.mask.rows_of(self.first_key + key);
        let in_tile = |row: usize| row.saturating_sub(self.first_row).min(self.rows);
        in_tile(seen_by.start)..in_tile(seen_by.end)
    }
}

struct Forward<E> {
    tile_size: TileSize,
    level: Level,
    sequences: Sequences,
    block_map: BlockMap,
    modifier: ScoreModifier<E>,
    masks: Option<Masks>,
    heads: usize,
    group_size: usize,
    dim: usize,
    dim_v: usize,
    q: Tensor<E>,
    k: Tensor<E>,
    v: Tensor<E>,
    out: Tensor<E>,
    lse: Lse,
    /// The sinks: one more score for each query head, which belongs to no key.
    sinks: Option<ReadOnly<f32>>,
}

impl<E: Element> Forward<E> {
    fn query_block(&self, batch: usize, head: usize, first_row: usize, mut scratch: &mut [f32]) {
        let TileSize { m, n } = self.tile_size;
        let sequence = &self.sequences.of(batch);
        if first_row >= sequence.seqlen_q {
            return;
        }
        let rows = m.min(sequence.seqlen_q - first_row);
        // Rows up to the next multiple of LANES are computed from zeros and not stored.
        let padded_rows = rows.next_multiple_of(LANES);
        let q = take(&mut scratch, self.dim * m);
        let k = take(&mut scratch, n * self.dim);
        let v = take(&mut scratch, n * self.dim_v);
        let scores = take(&mut scratch, n * m);
        let acc_o = take(&mut scratch, self.dim_v * m);
        let row_max = &mut take(&mut scratch, m)[..padded_rows];
        let row_sum = &mut take(&mut scratch, m)[..padded_rows];
        let rescale = &mut take(&mut scratch, m)[..padded_rows];
        let keep = scratch;
        row_max.fill(f32::NEG_INFINITY);
        row_sum.fill(0.0);

        let kv_head = head / self.group_size;
        let (keys_k, keys_v) = (self.k.keys(sequence, kv_head), self.v.keys(sequence, kv_head));
        // SAFETY: the sequence has these rows, in a tensor that the caller keeps alive and
        // unwritten during a launch.
        unsafe { self.q.head(sequence.place_q, head).load_transposed(first_row, rows, padded_rows, q, m) };

        // Keys that no row of the block sees are not visited, except to complete a patch of the
        // dropout mask.
        let visible_keys = sequence.mask.keys_of_block(first_row..first_row + rows);
        let seen_by_all = sequence.mask.keys_of(first_row + rows - 1).start..sequence.mask.keys_of(first_row).end;
        let begin = visible_keys.start / BLOCK_STEP as usize * BLOCK_STEP as usize;
        let mut blocks = self.block_map.table();
        let mut into = Into::Overwrite;
        for first_key in (begin..visible_keys.end).step_by(n) {
            let keys = n.min(visible_keys.end - first_key);
            let (tile_rows, tile_keys) = (first_row..first_row + rows, first_key..first_key + keys);
            if !self.block_map.look_up(batch, head, tile_rows, tile_keys, &mut blocks) {
                continue;
            }
            // SAFETY: first_key + keys <= seqlen_k; as above.
            unsafe {
                keys_k.load(first_key, keys, k, self.dim);
                keys_v.load(first_key, keys, v, self.dim_v);
            }
            let (q, k) = (Matrix::columns(q, m), Matrix::columns(k, self.dim));
            multiply([padded_rows, keys, self.dim], scores, m, Into::Overwrite, q, k, self.modifier.factor);
            let tile = Tile { first_row, rows, first_key, keys };
            if self.modifier.is_needed() {
                self.modify(sequence, head, tile, &blocks, scores);
            }
            let is_seen_by_all = first_key >= seen_by_all.start && first_key + keys <= seen_by_all.end;
            if !is_seen_by_all || self.block_map.is_on() {
                self.hide(sequence, head, tile, &blocks, scores);
            }
            softmax_step(self.level, scores, m, keys, row_max, row_sum, rescale);
            if let Some(masks) = &self.masks {
                masks.fill(batch * self.heads + head, first_row, rows, first_key, keys, keep, 1, m);
                multiply_in_place(self.level, &mut scores[..keys * m], keep);
            }
            if into == Into::Add {
                scale_rows(self.level, acc_o, m, rescale);
            }
            let (weights, v) = (Matrix::columns(scores, m), Matrix::rows(v, self.dim_v));
            multiply([padded_rows, self.dim_v, keys], acc_o, m, into, weights, v, 1.0);
            into = Into::Add;
        }
        let out = self.out.head(sequence.place_q, head);
        let lse_row = self.sequences.lse_row(sequence, head) + first_row;
        self.finish(&out, head, lse_row, first_row..first_row + rows, acc_o, row_max, row_sum);
    }

    /// Applies softcap, ALiBi, bias and mask to the scores that causal and window leave.
    fn modify(&self, sequence: &Sequence, head: usize, tile: Tile, blocks: &TileBlocks, scores: &mut [f32]) {
        for key in 0..tile.keys {
            let rows = tile.rows_that_see(key, sequence);
            let line = Line { head, row: tile.first_row + rows.start, key: tile.first_key + key, axis: Axis::Rows };
            let scores = &mut scores[key * self.tile_size.m..][rows];
            let pieces = blocks.pieces(line, scores.len());
            for (piece, kind) in pieces.filter(|(_, kind)| *kind != BlockKind::Empty) {
                self.modifier.modify(sequence, line.after(piece.start), kind, &mut scores[piece], None);
            }
        }
    }

    /// Writes -inf where a row does not see a key.
    fn hide(&self, sequence: &Sequence, head: usize, tile: Tile, blocks: &TileBlocks, scores: &mut [f32]) {
        for key in 0..tile.keys {
            let rows = tile.rows_that_see(key, sequence);
            let scores = &mut scores[key * self.tile_size.m..][..tile.rows];
            scores[..rows.start].fill(f32::NEG_INFINITY);
            scores[rows.end..].fill(f32::NEG_INFINITY);
            let line = Line { head, row: tile.first_row, key: tile.first_key + key, axis: Axis::Rows };
            for (piece, _) in blocks.pieces(line, tile.rows).filter(|(_, kind)| *kind == BlockKind::Empty) {
                scores[piece].fill(f32::NEG_INFINITY);
            }
        }
    }

    /// Divides by the sums and stores the block's rows and their LSE.
    ///
    /// A row that sees nothing, or only scores of -inf, has a sum of 0; any other row has a weight
    /// of 1. Its O is 0 and its LSE -inf, whatever the accumulator holds. A NaN among its scores
    /// makes the sum NaN.
    #[allow(clippy::too_many_arguments)] // where to, which rows, and the three results of the key loop
    fn finish(
        &self,
        out: &Head<E>,
        head: usize,
        lse_row: usize,
        rows: Range<usize>,
        acc_o: &mut [f32],
        row_max: &mut [f32],
        row_sum: &mut [f32],
    ) {
        let m = self.tile_size.m;
        let keep_scale = self.masks.map_or(1.0, |masks| masks.keep_scale);
        // SAFETY: one of heads_q floats.
        let sink_log2 = self.sinks.map(|sinks| unsafe { sinks.at(head) } * LOG2_E);
        for row in 0..rows.len() {
            if row_sum[row] == 0.0 {
                acc_o.iter_mut().skip(row).step_by(m).for_each(|x| *x = 0.0);
            }
            let end = RowEnd::new(row_max[row], row_sum[row], sink_log2);
            if !self.lse.0.is_null() {
                // SAFETY: lse has an element for each row, and this row is this task's alone.
                unsafe { self.lse.0.add(lse_row + row).write(end.lse) };
            }
            row_sum[row] = keep_scale * end.factor;
        }
        scale_rows(self.level, acc_o, m, row_sum);
        // SAFETY: the sequence has these rows, in an output that this launch alone writes, and they
        // are of this task's block.
        unsafe { out.store_transposed(rows.start, rows.len(), acc_o, m, 1.0) };
    }
}

/// The end of a row's softmax.
struct RowEnd {
    /// The factor of its accumulator; finite for a row that sees nothing, whose accumulator is 0.
    factor: f32,
    lse: f32,
}

impl RowEnd {
    /// A sink is one more score, which adds nothing to the accumulator.
    fn new(max: f32, sum: f32, sink_log2: Option<f32>) -> RowEnd {
        let (max, sum, share) = match sink_log2 {
            None => (max, sum, 1.0),
            Some(sink) => {
                let top = if sink > max { sink } else { max };
                // A row with neither scores nor a sink: any finite reference will do.
                let reference = if top == f32::NEG_INFINITY { 0.0 } else { top };
                let share = (max - reference).exp2();
                (top, sum * share + (sink - reference).exp2(), share)
            }
        };
        match sum == 0.0 {
            true => RowEnd { factor: 1.0, lse: f32::NEG_INFINITY },
            // In fp64: an error of rounding in the LSE would be in all of the row's weights in the
            // backward pass.
            false => RowEnd { factor: share / sum, lse: (f64::from(max) * LN_2 + f64::from(sum).ln()) as f32 },
        }
    }
}
