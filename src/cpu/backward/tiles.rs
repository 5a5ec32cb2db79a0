//! The tile of one (query block, key block): weights recomputed from LSE, and the gradients of the
//! scores.
//!
//! Tiles have the keys contiguous. A row's LSE and delta are then one scalar for a vector of keys,
//! and the products read weights, score gradients, dO and K in place. A key block is worked on in
//! strips of at most `STRIP` keys. A strip's weights and gradients stay in the caches near the core
//! from the products that make them to those that read them.

use super::workspace::Workspace;
use crate::call::Call;
use crate::cpu::block_map::{BlockMap, TileBlocks};
use crate::cpu::dropout::Masks;
use crate::cpu::element::{Element, Tensor};
use crate::cpu::product::{Into, LANES, Matrix, STRIP, multiply};
use crate::cpu::scores::ScoreModifier;
use crate::cpu::sequence::{Sequence, Sequences};
use crate::cpu::simd::Level;
use crate::cpu::softmax::ScoreGradients;
use crate::cpu::tile::{Axis, BLOCK_STEP, BlockKind, Line, TileSize};
use crate::cpu::vector::{in_two_parts, multiply_in_place};
use crate::cpu::workers::take;
use crate::family::cpu::scratch::gradient_pitch;
use std::f64::consts::LOG2_E;
use std::ops::Range;
use std::slice::from_raw_parts;

/// K and V of a key block in the orientations that the products want.
pub struct KeyTile<'a> {
    pub first: usize,
    pub keys: usize,
    /// Its rows are whole registers, and so are those of Q and dO.
    pub k: Matrix<'a>,
    /// Strip by strip, element (key, c) at `c * padded_keys + key`.
    k_transposed: &'a [f32],
    v_transposed: &'a [f32],
    dim: usize,
    dim_v: usize,
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
    pub q: Matrix<'a>,
    pub dout: Matrix<'a>,
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
        let &KeyTile { keys, k_transposed, v_transposed, dim, dim_v, .. } = self;
        (0..keys).step_by(STRIP).map(move |at| KeyStrip {
            at,
            keys: STRIP.min(keys - at),
            padded_keys: STRIP.min(keys - at).next_multiple_of(LANES),
            k_transposed: &k_transposed[at * dim..],
            v_transposed: &v_transposed[at * dim_v..],
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
    pub fn new(call: &Call, tile_size: TileSize, level: Level) -> Self {
        let problem = &call.problem;
        let (dim, dim_v) = (problem.head_dim as usize, problem.head_dim_v as usize);
        Tiles {
            tile_size,
            level,
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

    pub fn load_keys<'a>(
        &self,
        sequence: &Sequence,
        kv_head: usize,
        first: usize,
        scratch: &mut &'a mut [f32],
    ) -> KeyTile<'a> {
        let n = self.tile_size.n;
        let keys = n.min(sequence.seqlen_k - first);
        let k = take(scratch, n * self.padded_dim);
        let k_transposed = take(scratch, self.dim * n);
        let v_transposed = take(scratch, self.dim_v * n);
        let (head_k, head_v) = (self.k.head(sequence.place_k, kv_head), self.v.head(sequence.place_k, kv_head));
        // SAFETY: the sequence has these rows, in tensors that the caller keeps alive and unwritten
        // during a launch.
        let k = unsafe {
            for at in (0..keys).step_by(STRIP) {
                let rows = STRIP.min(keys - at);
                let padded = rows.next_multiple_of(LANES);
                let (of_k, of_v) = (&mut k_transposed[at * self.dim..], &mut v_transposed[at * self.dim_v..]);
                head_k.load_transposed(first + at, rows, padded, of_k, padded);
                head_v.load_transposed(first + at, rows, padded, of_v, padded);
            }
            head_k.rows(first, keys, k, self.padded_dim)
        };
        KeyTile { first, keys, k, k_transposed, v_transposed, dim: self.dim, dim_v: self.dim_v }
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
        let q = take(&mut scratch, m * self.padded_dim);
        let dout = take(&mut scratch, m * self.padded_dim_v);
        let [high, low, delta] = [take(&mut scratch, m), take(&mut scratch, m), take(&mut scratch, m)];
        let in_workspace = self.sequences.workspace_row(sequence, head) + first;
        let (head_q, head_dout) = (self.q.head(sequence.place_q, head), self.dout.head(sequence.place_q, head));
        // SAFETY: the sequence has these rows, in tensors that the caller keeps alive and unwritten
        // during a launch. The workspace's were written by this task or in an earlier phase.
        let (q, dout) = unsafe {
            for row in first..first + rows {
                head_q.prefetch_in_place(row, self.padded_dim);
                head_dout.prefetch_in_place(row, self.padded_dim_v);
            }
            let lse = from_raw_parts(self.workspace.lse(in_workspace), rows);
            for (row, lse) in lse.iter().enumerate() {
                [high[row], low[row]] = in_two_parts(f64::from(*lse) * LOG2_E);
            }
            delta[..rows].copy_from_slice(from_raw_parts(self.workspace.delta(in_workspace), rows));
            let q = head_q.rows(first, rows, q, self.padded_dim);
            (q, head_dout.rows(first, rows, dout, self.padded_dim_v))
        };
        QueryTile {
            first,
            rows,
            q,
            dout,
            lse_log2: [high, low],
            delta,
            weights: take(&mut scratch, m * STRIP),
            gradients: take(&mut scratch, m * gradient_pitch(n)),
            slopes: take(&mut scratch, if self.modifier.has_softcap() { m * STRIP } else { 0 }),
            keep: scratch,
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
        let weights = &mut tile.weights[rows.start * width..];
        let gradients = &mut tile.gradients[rows.start * pitch + strip.at..];
        let k = Matrix::columns(strip.k_transposed, width);
        let q = tile.q.skip_rows(rows.start).transposed();
        let factor = Into::Overwrite(self.modifier.factor);
        multiply(self.level, [width, rows.len(), self.dim], weights, width, factor, k, q);
        let v = Matrix::columns(strip.v_transposed, width);
        let dout = tile.dout.skip_rows(rows.start).transposed();
        let factor = Into::Overwrite(self.keep_scale());
        multiply(self.level, [width, rows.len(), self.dim_v], gradients, pitch, factor, v, dout);
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

    /// The tile's rows that see any of the keys, in whole patches of the dropout mask; both count
    /// from the tile's first.
    fn rows_that_see(&self, sequence: &Sequence, tile: &QueryTile, keys: Range<usize>) -> Range<usize> {
        let seen_by = sequence.mask.rows_of_block(keys);
        let in_tile = |row: usize| row.saturating_sub(tile.first).min(tile.rows);
        let (begin, end) = (in_tile(seen_by.start), in_tile(seen_by.end));
        if begin >= end { 0..0 } else { begin / BLOCK_STEP as usize * BLOCK_STEP as usize..end }
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
