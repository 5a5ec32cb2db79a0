//! The tile of one (query block, key block): weights recomputed from LSE, and the gradients of the
//! scores.
//!
//! Tiles have the keys contiguous. A row's LSE and delta are then one scalar for a vector of keys,
//! and the products read weights, score gradients, dO and K in place. A key block is worked on in
//! strips of at most `STRIP` keys. A strip's weights and gradients stay in the caches near the core
//! from the products that make them to those that read them.

use super::workspace::Workspace;
use crate::call::Call;
use crate::cpu::amx::{Configured, TileUnit};
use crate::cpu::block_map::{BlockMap, TileBlocks};
use crate::cpu::dropout::Masks;
use crate::cpu::element::{Element, Head, Tensor};
use crate::cpu::pairs::{self, CHUNK, multiply_pairs, words};
use crate::cpu::product::{Into, LANES, Matrix, STRIP, multiply};
use crate::cpu::scores::ScoreModifier;
use crate::cpu::sequence::{Sequence, Sequences};
use crate::cpu::simd::Level;
use crate::cpu::softmax::ScoreGradients;
use crate::cpu::tile::{Axis, BLOCK_STEP, BlockKind, Line, TileSize};
use crate::cpu::vector::{in_two_parts, multiply_in_place};
use crate::cpu::workers::take;
use crate::family::cpu::scratch::{gradient_pitch, pair_pitch};
use std::f64::consts::LOG2_E;
use std::ops::Range;
use std::slice::from_raw_parts;

/// K and V of a key block in the orientations that the products want.
pub struct KeyTile<'a> {
    pub first: usize,
    pub keys: usize,
    /// Its rows are whole registers, and so are those of Q and dO. For a tile unit, rows are pairs
    /// of keys.
    pub k: Matrix<'a>,
    /// Strip by strip, element (key, c) at `c * padded_keys + key`. For a tile unit, c is a pair of
    /// columns.
    k_transposed: &'a [f32],
    v_transposed: &'a [f32],
    /// Columns of these.
    columns: [usize; 2],
    pub tile_unit: Option<Configured>,
}

/// Some keys of a tile, which are worked on together.
pub struct KeyStrip<'a> {
    /// The first key, counted from the tile's first.
    pub at: usize,
    pub keys: usize,
    /// `keys` rounded up to whole registers; the columns between are 0.
    pub padded_keys: usize,
    k_transposed: &'a [f32],
    v_transposed: &'a [f32],
}

/// Q and dO of a query block, and the tiles of one (query block, key block).
pub struct QueryTile<'a> {
    pub first: usize,
    pub rows: usize,
    /// Rows of numbers or, for a tile unit, of pairs of columns.
    q: Matrix<'a>,
    dout: Matrix<'a>,
    /// Rows of numbers or, for a tile unit, of pairs of rows.
    pub q_by_rows: Matrix<'a>,
    pub dout_by_rows: Matrix<'a>,
    /// LSE in base 2, in two parts, and delta of each row.
    lse_log2: [&'a mut [f32]; 2],
    delta: &'a mut [f32],
    /// Scores of a strip, then weights, in the end without the dropped ones: (row, key) at `row *
    /// padded_keys + key`.
    pub weights: &'a mut [f32],
    /// Gradients of the weights of all strips, then of the scores: (row, key) at `row *
    /// gradient_pitch + key`.
    pub gradients: &'a mut [f32],
    /// 1 - tanh^2 of each score of a strip, with a softcap.
    slopes: &'a mut [f32],
    keep: &'a mut [f32],
}

impl<'a> KeyTile<'a> {
    pub fn strips(&self) -> impl Iterator<Item = KeyStrip<'a>> + use<'a> {
        let &KeyTile { keys, k_transposed, v_transposed, columns: [of_k, of_v], .. } = self;
        (0..keys).step_by(STRIP).map(move |at| KeyStrip {
            at,
            keys: STRIP.min(keys - at),
            padded_keys: STRIP.min(keys - at).next_multiple_of(LANES),
            k_transposed: &k_transposed[at * of_k..],
            v_transposed: &v_transposed[at * of_v..],
        })
    }
}

/// The scores whose gradients a tile holds.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum ScoresAre {
    /// The scores of the softmax, with the bias added.
    Modified,
    /// The scaled products of Q and K^T, before a softcap.
    Products,
}

pub struct Tiles<E> {
    pub tile_size: TileSize,
    pub level: Level,
    tile_unit: Option<TileUnit>,
    pub sequences: Sequences,
    pub block_map: BlockMap,
    modifier: ScoreModifier<E>,
    masks: Option<Masks>,
    heads: usize,
    pub group_size: usize,
    pub dim: usize,
    pub dim_v: usize,
    /// `head_dim` and `head_dim_v` rounded up to whole registers: the pitch of the tiles and of the
    /// accumulators.
    pub padded_dim: usize,
    pub padded_dim_v: usize,
    q: Tensor<E>,
    k: Tensor<E>,
    v: Tensor<E>,
    dout: Tensor<E>,
    pub workspace: Workspace,
}

impl<E: Element> Tiles<E> {
    pub fn new(call: &Call, tile_size: TileSize, level: Level, tile_unit: Option<TileUnit>) -> Self {
        let problem = &call.problem;
        let (dim, dim_v) = (problem.head_dim as usize, problem.head_dim_v as usize);
        Tiles {
            tile_size,
            level,
            tile_unit,
            sequences: Sequences::new(call),
            block_map: BlockMap::new(call),
            modifier: ScoreModifier::new(call, level),
            masks: Masks::new(call, level),
            heads: problem.num_heads_q as usize,
            group_size: problem.group_size() as usize,
            dim,
            dim_v,
            padded_dim: problem.workspace_cols() as usize,
            padded_dim_v: dim_v.next_multiple_of(LANES),
            q: Tensor::new(&call.q, dim),
            k: Tensor::new(&call.k, dim),
            v: Tensor::new(&call.v, dim_v),
            dout: Tensor::new(&call.dout, dim_v),
            workspace: Workspace::new(call),
        }
    }

    /// The factor of kept weights.
    pub fn keep_scale(&self) -> f32 {
        self.masks.map_or(1.0, |masks| masks.keep_scale)
    }

    pub fn has_tile_unit(&self) -> bool {
        self.tile_unit.is_some()
    }

    pub fn load_keys<'a>(
        &self,
        sequence: &Sequence,
        kv_head: usize,
        first: usize,
        scratch: &mut &'a mut [f32],
    ) -> KeyTile<'a> {
        let n = self.tile_size.n;
        let keys = n.min(sequence.seqlen_k - first);
        let columns = [self.dim, self.dim_v].map(|dim| if self.tile_unit.is_some() { words(dim) } else { dim });
        let [of_k, of_v] = columns;
        let k = take(scratch, n * self.padded_dim);
        let (k_transposed, v_transposed) = (take(scratch, n * of_k), take(scratch, n * of_v));
        let (head_k, head_v) = (self.k.head(sequence.place_k, kv_head), self.v.head(sequence.place_k, kv_head));
        // SAFETY: the sequence has these rows, in tensors that the caller keeps alive and unwritten
        // during a launch.
        let k = unsafe {
            for at in (0..keys).step_by(STRIP) {
                let rows = STRIP.min(keys - at);
                let padded = rows.next_multiple_of(LANES);
                let tiles =
                    [(&head_k, &mut k_transposed[at * of_k..], of_k), (&head_v, &mut v_transposed[at * of_v..], of_v)];
                for (head, tile, columns) in tiles {
                    match self.tile_unit {
                        None => head.load_transposed(first + at, rows, padded, tile, padded),
                        Some(_) => head.load_pairs_transposed(first + at, rows, padded, tile, columns),
                    }
                }
            }
            match self.tile_unit {
                None => head_k.rows(first, keys, k, self.padded_dim),
                Some(_) => head_k.pairs_of_rows(first, keys, k, self.padded_dim),
            }
        };
        let tile_unit = self.tile_unit.map(TileUnit::configure);
        KeyTile { first, keys, k, k_transposed, v_transposed, columns, tile_unit }
    }

    /// Whether the tile of the rows from `first_row` on and these keys has a score that may count.
    /// If so, fills the tile's table.
    pub fn meets(
        &self,
        sequence: &Sequence,
        head: usize,
        first_row: usize,
        keys: Range<usize>,
        blocks: &mut TileBlocks,
    ) -> bool {
        let end = (first_row + self.tile_size.m).min(sequence.seqlen_q);
        self.block_map.look_up(sequence.batch, head, first_row..end, keys, blocks)
    }

    /// The tile of a query block, with nothing computed yet.
    pub fn load_queries<'a>(
        &self,
        sequence: &Sequence,
        head: usize,
        first: usize,
        mut scratch: &'a mut [f32],
    ) -> QueryTile<'a> {
        let TileSize { m, n } = self.tile_size;
        let rows = m.min(sequence.seqlen_q - first);
        let [high, low, delta] = [take(&mut scratch, m), take(&mut scratch, m), take(&mut scratch, m)];
        let in_workspace = self.sequences.workspace_row(sequence, head) + first;
        let (head_q, head_dout) = (self.q.head(sequence.place_q, head), self.dout.head(sequence.place_q, head));
        // SAFETY: the sequence has these rows, in tensors that the caller keeps alive and unwritten
        // during a launch. The workspace's were written by this task or in an earlier phase.
        let ([q, q_by_rows], [dout, dout_by_rows]) = unsafe {
            for row in first..first + rows {
                head_q.prefetch_in_place(row, self.padded_dim);
                head_dout.prefetch_in_place(row, self.padded_dim_v);
            }
            let lse = from_raw_parts(self.workspace.lse(in_workspace), rows);
            for (row, lse) in lse.iter().enumerate() {
                [high[row], low[row]] = in_two_parts(f64::from(*lse) * LOG2_E);
            }
            delta[..rows].copy_from_slice(from_raw_parts(self.workspace.delta(in_workspace), rows));
            let q = self.load_rows(&head_q, first, rows, [self.dim, self.padded_dim], &mut scratch);
            (q, self.load_rows(&head_dout, first, rows, [self.dim_v, self.padded_dim_v], &mut scratch))
        };
        let rows_of_weights = if self.has_tile_unit() { m.next_multiple_of(CHUNK) } else { m };
        QueryTile {
            first,
            rows,
            q,
            dout,
            q_by_rows,
            dout_by_rows,
            lse_log2: [high, low],
            delta,
            weights: take(&mut scratch, rows_of_weights * STRIP),
            gradients: take(&mut scratch, m * gradient_pitch(n)),
            slopes: take(&mut scratch, if self.modifier.has_softcap() { m * STRIP } else { 0 }),
            keep: scratch,
        }
    }

    /// Rows of Q or dO, as numbers or as pairs of columns; and by rows, as numbers or as pairs of
    /// rows.
    ///
    /// # Safety
    /// The rows must lie in a live tensor that nobody writes during `'a`.
    unsafe fn load_rows<'a>(
        &self,
        head: &Head<E>,
        first: usize,
        rows: usize,
        [dim, padded_dim]: [usize; 2],
        scratch: &mut &'a mut [f32],
    ) -> [Matrix<'a>; 2] {
        let m = self.tile_size.m;
        // SAFETY: the caller's promise.
        unsafe {
            if self.tile_unit.is_none() {
                return [head.rows(first, rows, take(scratch, m * padded_dim), padded_dim); 2];
            }
            let pairs = head.pairs(first, rows, take(scratch, m * words(dim)), words(dim));
            let tile = take(scratch, padded_dim * pair_pitch(m));
            [pairs, head.pairs_of_rows_transposed(first, 0..rows, tile, padded_dim, pair_pitch(m))]
        }
    }

    /// Computes the weights and the score gradients of a tile's strip, and returns the rows whose
    /// weights are not all 0; only their weights are written.
    ///
    /// Dropout is that of the forward pass: a dropped weight is 0 in dV and its gradient is 0,
    /// while the undropped weight stays in the score gradient.
    #[allow(clippy::too_many_arguments)] // the tile and its place
    pub fn fill(
        &self,
        sequence: &Sequence,
        head: usize,
        keys: &KeyTile,
        strip: &KeyStrip,
        tile: &mut QueryTile,
        blocks: &TileBlocks,
        scores_are: ScoresAre,
    ) -> Range<usize> {
        let (width, pitch) = (strip.padded_keys, gradient_pitch(self.tile_size.n));
        let first_key = keys.first + strip.at;
        let rows = self.rows_that_see(sequence, tile, first_key..first_key + strip.keys);
        for row in (0..rows.start).chain(rows.end..tile.rows) {
            tile.gradients[row * pitch + strip.at..][..width].fill(0.0);
        }
        if rows.is_empty() {
            return rows;
        }
        self.multiply_scores(keys, strip, tile, rows.clone());
        let gradients = &mut tile.gradients[rows.start * pitch + strip.at..];
        if let Some(masks) = &self.masks {
            let mask_head = sequence.batch * self.heads + head;
            masks.fill(mask_head, tile.first + rows.start, rows.len(), first_key, strip.keys, tile.keep, width, 1);
            for (row, keep) in tile.keep.chunks_exact(width).take(rows.len()).enumerate() {
                multiply_in_place(self.level, &mut gradients[row * pitch..][..width], keep);
            }
        }
        let first = sequence.mask.keys_of(tile.first + rows.start);
        let last = sequence.mask.keys_of(tile.first + rows.end - 1);
        let all_see_all = last.start <= first_key && first.end >= first_key + width;
        if all_see_all && !self.modifier.is_needed() && !self.block_map.is_on() {
            self.score_gradients(tile, rows.clone(), strip.at..strip.at + width, width, strip.at);
        } else {
            for row in rows.clone() {
                self.fill_row(sequence, head, first_key, strip, tile, row, blocks, scores_are);
            }
        }
        if self.masks.is_some() {
            let weights = &mut tile.weights[rows.start * width..][..rows.len() * width];
            multiply_in_place(self.level, weights, tile.keep);
        }
        rows
    }

    /// Q K^T and dO V^T of a strip, in the places of its weights and gradients.
    fn multiply_scores(&self, keys: &KeyTile, strip: &KeyStrip, tile: &mut QueryTile, rows: Range<usize>) {
        let (width, pitch) = (strip.padded_keys, gradient_pitch(self.tile_size.n));
        let [k, v] = [strip.k_transposed, strip.v_transposed].map(|tile| Matrix::columns(tile, width));
        let [q, dout] = [tile.q, tile.dout].map(|tile| tile.skip_rows(rows.start).transposed());
        let weights = &mut tile.weights[rows.start * width..];
        let gradients = &mut tile.gradients[rows.start * pitch + strip.at..];
        let (level, [of_k, of_v]) = (self.level, keys.columns);
        let [factor, keep_scale] = [self.modifier.factor, self.keep_scale()];
        let shape = |columns| [width, rows.len(), columns];
        match &keys.tile_unit {
            None => {
                multiply(level, shape(of_k), weights, width, Into::Overwrite(factor), k, q);
                multiply(level, shape(of_v), gradients, pitch, Into::Overwrite(keep_scale), v, dout);
            }
            Some(unit) => {
                let [factor, keep_scale] = [factor, keep_scale].map(pairs::Into::Overwrite);
                multiply_pairs(unit, level, shape(of_k), weights, width, factor, [k], [q]);
                multiply_pairs(unit, level, shape(of_v), gradients, pitch, keep_scale, [v], [dout]);
            }
        }
    }

    /// The tile's rows that see any of the keys, in whole patches of the dropout mask or chunks of
    /// a tile unit; both count from the tile's first.
    fn rows_that_see(&self, sequence: &Sequence, tile: &QueryTile, keys: Range<usize>) -> Range<usize> {
        let seen_by = sequence.mask.rows_of_block(keys);
        let in_tile = |row: usize| row.saturating_sub(tile.first).min(tile.rows);
        let (begin, end) = (in_tile(seen_by.start), in_tile(seen_by.end));
        let chunk = if self.has_tile_unit() { CHUNK } else { BLOCK_STEP as usize };
        if begin >= end { 0..0 } else { begin / chunk * chunk..end }
    }

    /// One row of a strip, of which causal, window, block mask or the strip's end hide a part or
    /// whose scores are modified.
    #[allow(clippy::too_many_arguments)] // the row and its place
    fn fill_row(
        &self,
        sequence: &Sequence,
        head: usize,
        first_key: usize,
        strip: &KeyStrip,
        tile: &mut QueryTile,
        row: usize,
        blocks: &TileBlocks,
        scores_are: ScoresAre,
    ) {
        let (width, pitch) = (strip.padded_keys, gradient_pitch(self.tile_size.n));
        let seen = sequence.mask.keys_of(tile.first + row);
        let in_strip = |key: usize| key.saturating_sub(first_key).min(strip.keys);
        let seen = in_strip(seen.start)..in_strip(seen.end);
        let seen = seen.start..seen.end.max(seen.start);
        let line = Line { head, row: tile.first + row, key: first_key + seen.start, axis: Axis::Keys };
        let hide = |hidden: Range<usize>, tile: &mut QueryTile| {
            tile.weights[row * width..][hidden.clone()].fill(0.0);
            tile.gradients[row * pitch + strip.at..][hidden].fill(0.0);
        };
        for (piece, kind) in blocks.pieces(line, seen.len()) {
            let line = line.after(piece.start);
            let piece = seen.start + piece.start..seen.start + piece.end;
            if kind == BlockKind::Empty {
                hide(piece, tile);
                continue;
            }
            if self.modifier.is_needed() {
                let scores = &mut tile.weights[row * width..][piece.clone()];
                let slopes = self.modifier.has_softcap().then(|| &mut tile.slopes[..piece.len()]);
                self.modifier.modify(sequence, line, kind, scores, slopes);
            }
            self.score_gradients(tile, row..row + 1, strip.at + piece.start..strip.at + piece.end, width, strip.at);
            if self.modifier.has_softcap() && scores_are == ScoresAre::Products {
                let gradients = &mut tile.gradients[row * pitch + strip.at..][piece.clone()];
                multiply_in_place(self.level, gradients, &tile.slopes[..piece.len()]);
            }
        }
        hide(0..seen.start, tile);
        hide(seen.end..width, tile);
    }

    /// The exponentials of some rows and keys of the tile; the weights hold a strip from key `at`
    /// on.
    fn score_gradients(&self, tile: &mut QueryTile, rows: Range<usize>, keys: Range<usize>, width: usize, at: usize) {
        let pitch = gradient_pitch(self.tile_size.n);
        let scores = &mut tile.weights[rows.start * width + keys.start - at..];
        let gradients = &mut tile.gradients[rows.start * pitch + keys.start..];
        let [high, low] = &tile.lse_log2;
        let lse_log2 = [&high[rows.clone()], &low[rows.clone()]];
        let delta = &tile.delta[rows];
        let tile = ScoreGradients { scores, gradients, pitch: [width, pitch], keys: keys.len(), lse_log2, delta };
        tile.run(self.level);
    }
}
