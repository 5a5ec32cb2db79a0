//! The forward pass: one task per (batch, head, block of queries), which walks the keys with an
//! online softmax.
//!
//! A block is cut into strips of at most `STRIP` queries. A strip's scores for a tile of keys stay
//! in the caches near the core from the first product through the softmax to the second. Strips of
//! a block share the loaded keys, and each skips the keys that none of its rows sees.
//!
//! Tiles have the queries contiguous (element (row, key) at `key * pitch + row`): maxima and sums
//! run along the vector registers without a horizontal step, and the products read the queries and
//! the weights in place. The output accumulator has rows like the output's. Scores are base 2,
//! scaled by the product that makes them.
//!
//! On a processor that multiplies tiles of bf16, both products are made of pairs. Weights are then
//! two bf16 numbers each, and the accumulator's columns are contiguous. The softmax scales scores
//! that nothing modifies.
//!
//! Hidden scores are overwritten, so a NaN in a hidden key's K never spreads. A hidden key's V
//! meets a weight of 0 in the product of its tile: a NaN or inf there does spread, as in every
//! tiled implementation. Rows and keys that a sequence does not use are never read.

use super::amx::{Configured, TileUnit};
use super::block_map::{BlockMap, TileBlocks};
use super::dropout::Masks;
use super::eight::{Input, InputHead, round_weights};
use super::element::{Element, Head, Tensor};
use super::pairs::{self, CHUNK, multiply_pairs, split_weights, words};
use super::product::{Into, LANES, Matrix, STRIP, multiply};
use super::read_only::ReadOnly;
use super::scores::ScoreModifier;
use super::sequence::{Sequence, Sequences};
use super::simd::Level;
use super::softmax::{softmax_step, softmax_step_in_pairs};
use super::tile::{Axis, BLOCK_STEP, BlockKind, Line, MAX_BLOCK, TileSize};
use super::transpose;
use super::vector::multiply_in_place;
use super::workers::{Workers, take};
use crate::call::Call;
use crate::error::Result;
use crate::family::cpu::scratch::{self, pair_pitch};
use std::f32::consts::LOG2_E;
use std::f64::consts::LN_2;
use std::ops::Range;

pub fn run<E: Element>(
    call: &Call,
    tile_size: TileSize,
    level: Level,
    tile_unit: Option<TileUnit>,
    workers: &Workers,
) -> Result<()> {
    let problem = &call.problem;
    let pass = Forward::<E> {
        tile_size,
        level,
        tile_unit,
        sequences: Sequences::new(call),
        block_map: BlockMap::new(call),
        modifier: ScoreModifier::new(call, level),
        masks: Masks::new(call, level),
        heads: problem.num_heads_q as usize,
        group_size: problem.group_size() as usize,
        dim: problem.head_dim as usize,
        dim_v: problem.head_dim_v as usize,
        padded_dim_v: (problem.head_dim_v as usize).next_multiple_of(LANES),
        q: Input::q(call),
        k: Input::k(call),
        v: Input::v(call),
        rounds_weights: problem.features.has_fp8_queries(),
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
    /// Element (row, key) lies at `key * pitch + row`.
    pitch: usize,
}

/// Some query rows of a block and what they have gathered from the keys so far.
struct Strip<'a> {
    first_row: usize,
    rows: usize,
    /// The keys that any of the rows sees, from the begin of their first chunk on.
    keys: Range<usize>,
    seen_by_all: Range<usize>,
    /// Whether `acc_o` holds anything.
    is_begun: bool,
    /// (row, c) at `c * padded_rows + row`, or pairs of columns for a tile unit
    q: &'a mut [f32],
    /// (row, c) at `row * padded_dim_v + c`, or at `c * padded_rows + row` by a tile unit
    acc_o: &'a mut [f32],
    row_max: &'a mut [f32],
    row_sum: &'a mut [f32],
    rescale: &'a mut [f32],
}

/// Strips of the largest block.
const MOST_STRIPS: usize = MAX_BLOCK as usize / STRIP;

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
    tile_unit: Option<TileUnit>,
    sequences: Sequences,
    block_map: BlockMap,
    modifier: ScoreModifier<E>,
    masks: Option<Masks>,
    heads: usize,
    group_size: usize,
    dim: usize,
    dim_v: usize,
    /// `dim_v` rounded up to whole registers: the pitch of V and of the output accumulator.
    padded_dim_v: usize,
    q: Input<E>,
    k: Input<E>,
    v: Input<E>,
    /// As kernels with fp8 queries round them.
    rounds_weights: bool,
    out: Tensor<E>,
    lse: Lse,
    /// The sinks: one more score for each query head, which belongs to no key.
    sinks: Option<ReadOnly<f32>>,
}

impl<E: Element> Forward<E> {
    /// Columns of the tiles of Q and K: words of pairs for a tile unit.
    fn columns(&self) -> usize {
        if self.tile_unit.is_some() { words(self.dim) } else { self.dim }
    }

    /// The keys from the begin of a patch of the dropout mask on, or of a chunk of a tile unit.
    fn whole_chunks(&self, keys: Range<usize>) -> Range<usize> {
        let chunk = if self.tile_unit.is_some() { CHUNK } else { BLOCK_STEP as usize };
        keys.start / chunk * chunk..keys.end
    }

    fn query_block(&self, batch: usize, head: usize, first_row: usize, mut scratch: &mut [f32]) {
        let TileSize { m, n } = self.tile_size;
        let sequence = &self.sequences.of(batch);
        if first_row >= sequence.seqlen_q {
            return;
        }
        let rows = m.min(sequence.seqlen_q - first_row);
        let tile_unit = self.tile_unit.map(TileUnit::configure);
        let k = take(&mut scratch, n * self.columns());
        let v = take(&mut scratch, n * self.padded_dim_v);
        let scores = take(&mut scratch, n * STRIP);
        let keep = take(&mut scratch, if self.masks.is_some() { n * STRIP } else { 0 });
        let kv_head = head / self.group_size;
        let q = self.q.queries(sequence, head, kv_head);
        let mut strips: [Option<Strip>; MOST_STRIPS] = [const { None }; MOST_STRIPS];
        let starts = (first_row..first_row + rows).step_by(STRIP);
        for (strip, start) in strips.iter_mut().zip(starts) {
            *strip = Some(self.strip(sequence, &q, start, STRIP.min(first_row + rows - start), &mut scratch));
        }
        let (keys_k, keys_v) = (self.k.keys(sequence, kv_head), self.v.keys(sequence, kv_head));
        let mut blocks = self.block_map.table();
        let seen = sequence.mask.keys_of_block(first_row..first_row + rows);
        let of_block = self.whole_chunks(seen.clone());
        // Tiles begin at multiples of n wherever the block begins, so a row's sums have one order.
        for first_key in (of_block.start / n * n..of_block.end).step_by(n) {
            let of_tile = of_block.start.max(first_key)..of_block.end.min(first_key + n);
            if !self.block_map.look_up(batch, head, first_row..first_row + rows, of_tile.clone(), &mut blocks) {
                continue;
            }
            // SAFETY: the sequence has these keys, in tensors that the caller keeps alive and
            // unwritten during a launch.
            let (k, v) = unsafe { self.load_keys(&keys_k, &keys_v, of_tile.clone(), seen.start, k, v) };
            for strip in strips.iter_mut().map_while(Option::as_mut) {
                let keys = of_tile.start.max(strip.keys.start)..of_tile.end.min(strip.keys.end);
                if keys.is_empty() {
                    continue;
                }
                let skipped = keys.start - of_tile.start;
                let of_v = if tile_unit.is_some() { skipped / 2 } else { skipped };
                let of_strip = [k.skip_rows(skipped), v.skip_rows(of_v)];
                self.attend(sequence, head, strip, keys, &blocks, of_strip, scores, keep, tile_unit.as_ref());
            }
        }
        let out = self.out.head(sequence.place_q, head);
        let lse_row = self.sequences.lse_row(sequence, head);
        for strip in strips.iter_mut().map_while(Option::as_mut) {
            match tile_unit {
                None => {
                    let acc_o = std::mem::take(&mut strip.acc_o);
                    self.finish(&out, head, lse_row, strip, 0, acc_o);
                }
                Some(_) => self.finish_columns(&out, head, lse_row, strip, v),
            }
        }
    }

    /// K and V of some keys. For a tile unit a row of K has pairs of columns, and a row of V is a
    /// pair of keys, with 0 for those before the first one that a query of the block sees.
    ///
    /// # Safety
    /// The keys must lie in live tensors that nobody writes during `'a`.
    unsafe fn load_keys<'a>(
        &self,
        keys_k: &InputHead<E>,
        keys_v: &InputHead<E>,
        keys: Range<usize>,
        first_seen: usize,
        k: &'a mut [f32],
        v: &'a mut [f32],
    ) -> (Matrix<'a>, Matrix<'a>) {
        let (first, rows) = (keys.start, keys.len());
        // SAFETY: the caller's promise.
        unsafe {
            if self.tile_unit.is_none() {
                return (keys_k.rows(first, rows, k, self.dim), keys_v.rows(first, rows, v, self.padded_dim_v));
            }
            let pitch = pair_pitch(self.tile_size.n);
            let k = keys_k.plain().pairs(first, rows, k, words(self.dim));
            let seen = first_seen.saturating_sub(first)..rows;
            (k, keys_v.plain().pairs_of_rows_transposed(first, seen, v, self.padded_dim_v, pitch))
        }
    }

    /// Loads some queries, which have seen no key yet.
    fn strip<'a>(
        &self,
        sequence: &Sequence,
        q: &InputHead<E>,
        first_row: usize,
        rows: usize,
        scratch: &mut &'a mut [f32],
    ) -> Strip<'a> {
        // Rows up to the next multiple of LANES are computed from zeros and not stored.
        let padded_rows = rows.next_multiple_of(LANES);
        let of_q = take(scratch, self.columns() * padded_rows);
        // SAFETY: the sequence has these rows, in a tensor that the caller keeps alive and
        // unwritten during a launch.
        unsafe {
            match self.tile_unit {
                None => q.load_transposed(first_row, rows, padded_rows, of_q, padded_rows),
                Some(_) => q.plain().load_pairs_transposed(first_row, rows, padded_rows, of_q, self.columns()),
            }
        }
        let strip = Strip {
            first_row,
            rows,
            keys: self.whole_chunks(sequence.mask.keys_of_block(first_row..first_row + rows)),
            seen_by_all: sequence.mask.keys_of(first_row + rows - 1).start..sequence.mask.keys_of(first_row).end,
            is_begun: false,
            q: of_q,
            acc_o: take(scratch, padded_rows * self.padded_dim_v),
            row_max: take(scratch, padded_rows),
            row_sum: take(scratch, padded_rows),
            rescale: take(scratch, padded_rows),
        };
        strip.row_max.fill(f32::NEG_INFINITY);
        strip.row_sum.fill(0.0);
        strip
    }

    /// Adds a tile of keys to a strip. `k` and `v` begin with the first of the keys. `all` has room
    /// for the scores of the keys in whole chunks.
    #[allow(clippy::too_many_arguments)] // the tile, its place and its scratch
    fn attend(
        &self,
        sequence: &Sequence,
        head: usize,
        strip: &mut Strip,
        keys: Range<usize>,
        blocks: &TileBlocks,
        [k, v]: [Matrix; 2],
        all: &mut [f32],
        keep: &mut [f32],
        tile_unit: Option<&Configured>,
    ) {
        let pitch = strip.rows.next_multiple_of(LANES);
        let tile =
            Tile { first_row: strip.first_row, rows: strip.rows, first_key: keys.start, keys: keys.len(), pitch };
        self.multiply_scores(strip, tile, k, all, tile_unit);
        let scores = &mut all[..tile.keys * pitch];
        if self.modifier.is_needed() {
            self.modify(sequence, head, tile, blocks, scores);
        }
        let is_seen_by_all = keys.start >= strip.seen_by_all.start && keys.end <= strip.seen_by_all.end;
        if !is_seen_by_all || self.block_map.is_on() {
            self.hide(sequence, head, tile, blocks, scores);
        }
        let (row_max, row_sum, rescale) = (&mut *strip.row_max, &mut *strip.row_sum, &mut *strip.rescale);
        if self.softmax_makes_pairs() {
            let [_, factor] = self.factors();
            softmax_step_in_pairs(self.level, all, factor, pitch, tile.keys, row_max, row_sum, rescale);
            return self.add_values(strip, tile, v, all, tile_unit);
        }
        softmax_step(self.level, scores, pitch, tile.keys, row_max, row_sum, rescale);
        if self.rounds_weights {
            round_weights(scores);
        }
        if let Some(masks) = &self.masks {
            let mask_head = sequence.batch * self.heads + head;
            masks.fill(mask_head, tile.first_row, tile.rows, tile.first_key, tile.keys, keep, 1, pitch);
            multiply_in_place(self.level, scores, keep);
        }
        self.add_values(strip, tile, v, all, tile_unit);
    }

    /// The factors of Q K^T, in the product and in the softmax. A tile unit stores products without
    /// a factor as they are. With a factor in the softmax, a row's maximum is of scores without it.
    fn factors(&self) -> [f32; 2] {
        let factor = self.modifier.factor;
        let is_late = self.softmax_makes_pairs() && !self.modifier.is_needed() && factor > 0.0;
        if is_late { [1.0, factor] } else { [factor, 1.0] }
    }

    /// Whether nothing changes the weights between the softmax and the product with V by pairs.
    fn softmax_makes_pairs(&self) -> bool {
        self.tile_unit.is_some() && self.masks.is_none()
    }

    /// Q K^T, scaled.
    fn multiply_scores(&self, strip: &Strip, tile: Tile, k: Matrix, scores: &mut [f32], unit: Option<&Configured>) {
        let (level, pitch, columns, [factor, _]) = (self.level, tile.pitch, self.columns(), self.factors());
        let (q, k) = (Matrix::columns(strip.q, pitch), k.transposed());
        match unit {
            None => multiply(level, [pitch, tile.keys, columns], scores, pitch, Into::Overwrite(factor), q, k),
            Some(unit) => {
                let shape = [pitch, tile.keys.next_multiple_of(LANES), columns];
                multiply_pairs(unit, level, shape, scores, pitch, pairs::Into::Overwrite(factor), [q], [k]);
            }
        }
    }

    /// O += P V. The weights may be left in pieces.
    fn add_values(&self, strip: &mut Strip, tile: Tile, v: Matrix, weights: &mut [f32], unit: Option<&Configured>) {
        let (pitch, width) = (tile.pitch, self.padded_dim_v);
        let is_begun = std::mem::replace(&mut strip.is_begun, true);
        let Some(unit) = unit else {
            let into = if is_begun { Into::Rescale(strip.rescale) } else { Into::Overwrite(1.0) };
            let (v, weights) = (v.transposed(), Matrix::rows(weights, pitch));
            return multiply(self.level, [width, tile.rows, tile.keys], strip.acc_o, width, into, v, weights);
        };
        let into = if is_begun { pairs::Into::Rescale(strip.rescale) } else { pairs::Into::Overwrite(1.0) };
        let weights = &mut weights[..2 * words(tile.keys) * pitch];
        if self.softmax_makes_pairs() {
            weights[tile.keys.next_multiple_of(2) * pitch..].fill(0.0);
        } else {
            weights[tile.keys * pitch..].fill(0.0);
            split_weights(self.level, weights, pitch);
        }
        let parts = [0, pitch].map(|at| Matrix::columns(&weights[at..], 2 * pitch));
        let shape = [pitch, width, words(tile.keys)];
        multiply_pairs(unit, self.level, shape, strip.acc_o, pitch, into, parts, [v]);
    }

    /// Applies softcap, ALiBi, bias and mask to the scores that causal and window leave.
    fn modify(&self, sequence: &Sequence, head: usize, tile: Tile, blocks: &TileBlocks, scores: &mut [f32]) {
        for key in 0..tile.keys {
            let rows = tile.rows_that_see(key, sequence);
            let line = Line { head, row: tile.first_row + rows.start, key: tile.first_key + key, axis: Axis::Rows };
            let scores = &mut scores[key * tile.pitch..][rows];
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
            let scores = &mut scores[key * tile.pitch..][..tile.rows];
            scores[..rows.start].fill(f32::NEG_INFINITY);
            scores[rows.end..].fill(f32::NEG_INFINITY);
            let line = Line { head, row: tile.first_row, key: tile.first_key + key, axis: Axis::Rows };
            for (piece, _) in blocks.pieces(line, tile.rows).filter(|(_, kind)| *kind == BlockKind::Empty) {
                scores[piece].fill(f32::NEG_INFINITY);
            }
        }
    }

    /// `finish` of a strip whose accumulator has columns, 16 rows at a time.
    fn finish_columns(&self, out: &Head<E>, head: usize, lse_row: usize, strip: &mut Strip, tile: &mut [f32]) {
        let (width, pitch) = (self.padded_dim_v, strip.rows.next_multiple_of(LANES));
        for row in (0..strip.rows).step_by(LANES) {
            let rows = LANES.min(strip.rows - row);
            transpose::into_rows(&strip.acc_o[row..], pitch, [rows, width], tile);
            self.finish(out, head, lse_row, strip, row, &mut tile[..rows * width]);
        }
    }

    /// Divides by the sums and stores rows and their LSE, from the strip's row `first` on.
    ///
    /// A row that sees nothing, or only scores of -inf, has a sum of 0; any other row has a weight
    /// of 1. Its O is 0 and its LSE -inf, whatever the accumulator holds. A NaN among its scores
    /// makes the sum NaN.
    fn finish(&self, out: &Head<E>, head: usize, lse_row: usize, strip: &Strip, first: usize, acc_o: &mut [f32]) {
        let keep_scale = self.masks.map_or(1.0, |masks| masks.keep_scale);
        let [_, factor] = self.factors();
        // SAFETY: one of heads_q floats.
        let sink_log2 = self.sinks.map(|sinks| unsafe { sinks.at(head) } * LOG2_E);
        for (row, acc_o) in (first..strip.rows).zip(acc_o.chunks_exact_mut(self.padded_dim_v)) {
            let position = strip.first_row + row;
            if strip.row_sum[row] == 0.0 {
                acc_o.fill(0.0);
            }
            let max = f64::from(strip.row_max[row]) * f64::from(factor);
            let end = RowEnd::new(max, strip.row_sum[row], sink_log2);
            // SAFETY: the sequence has this row, in an output and an LSE that this launch alone
            // writes, and it is of this task's block.
            unsafe {
                if !self.lse.0.is_null() {
                    self.lse.0.add(lse_row + position).write(end.lse);
                }
                out.store_scaled(position, keep_scale * end.factor, &mut acc_o[..self.dim_v]);
            }
        }
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
    fn new(max: f64, sum: f32, sink_log2: Option<f32>) -> RowEnd {
        let (max, sum, share) = match sink_log2 {
            None => (max, sum, 1.0),
            Some(sink) => {
                let max = max as f32;
                let top = if sink > max { sink } else { max };
                // A row with neither scores nor a sink: any finite reference will do.
                let reference = if top == f32::NEG_INFINITY { 0.0 } else { top };
                let share = (max - reference).exp2();
                (f64::from(top), sum * share + (sink - reference).exp2(), share)
            }
        };
        match sum == 0.0 {
            true => RowEnd { factor: 1.0, lse: f32::NEG_INFINITY },
            // In fp64: an error of rounding in the LSE would be in all of the row's weights in the
            // backward pass.
            false => RowEnd { factor: share / sum, lse: (max * LN_2 + f64::from(sum).ln()) as f32 },
        }
    }
}
