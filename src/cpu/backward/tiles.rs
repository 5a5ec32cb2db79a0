//! The tile of one (query block, key block): weights recomputed from LSE, and the gradients of the
//! scores.
//!
//! Tiles have the keys contiguous (element (row, key) at `row * block_n + key`). A row's LSE and
//! delta are then one scalar for a vector of keys, and the GEMM reads weights, score gradients, dO
//! and K in place.

use super::workspace::Workspace;
use crate::call::Call;
use crate::cpu::block_map::{BlockMap, TileBlocks};
use crate::cpu::dropout::Masks;
use crate::cpu::element::{Element, Tensor};
use crate::cpu::matmul::{Into, Matrix, multiply};
use crate::cpu::scores::ScoreModifier;
use crate::cpu::sequence::{Sequence, Sequences};
use crate::cpu::tile::{Axis, BlockKind, Line, TileSize};
use crate::cpu::vector::{LANES, Level, in_two_parts, multiply_in_place, score_gradients};
use crate::cpu::workers::take;
use std::f64::consts::LOG2_E;
use std::ops::Range;
use std::slice::from_raw_parts;

/// K and V of a key block in the orientations that the products want.
pub struct KeyTile<'a> {
    pub first: usize,
    pub keys: usize,
    /// `keys` rounded up to whole registers; the columns between are 0.
    pub padded_keys: usize,
    /// (key, c) at `key * padded_dim + c`
    pub k: &'a [f32],
    /// (key, c) at `c * block_n + key`
    k_transposed: &'a [f32],
    v_transposed: &'a [f32],
}

/// Q and dO of a query block, row by row, and the tiles of one (query block, key block).
pub struct QueryTile<'a> {
    pub first: usize,
    pub rows: usize,
    pub q: &'a mut [f32],
    pub dout: &'a mut [f32],
    /// Scores, then weights, in the end without the dropped ones.
    pub weights: &'a mut [f32],
    /// Gradients of the weights, then of the scores.
    pub gradients: &'a mut [f32],
    /// 1 - tanh^2 of each score, with a softcap.
    slopes: &'a mut [f32],
    keep: &'a mut [f32],
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
    level: Level,
    pub sequences: Sequences,
    pub block_map: BlockMap,
    modifier: ScoreModifier<E>,
    masks: Option<Masks>,
    heads: usize,
    pub group_size: usize,
    pub dim: usize,
    pub dim_v: usize,
    /// `head_dim` rounded up to whole registers: the pitch of K tiles and of dQ accumulators.
    pub padded_dim: usize,
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
        let padded_keys = keys.next_multiple_of(LANES);
        let k = take(scratch, n * self.padded_dim);
        let k_transposed = take(scratch, self.dim * n);
        let v_transposed = take(scratch, self.dim_v * n);
        let (head_k, head_v) = (self.k.head(sequence.place_k, kv_head), self.v.head(sequence.place_k, kv_head));
        // SAFETY: the sequence has these rows, in tensors that the caller keeps alive and unwritten
        // during a launch.
        unsafe {
            head_k.load(first, keys, k, self.padded_dim);
            head_k.load_transposed(first, keys, padded_keys, k_transposed, n);
            head_v.load_transposed(first, keys, padded_keys, v_transposed, n);
        }
        KeyTile { first, keys, padded_keys, k, k_transposed, v_transposed }
    }

    pub fn query_tile<'a>(&self, mut scratch: &'a mut [f32]) -> QueryTile<'a> {
        let TileSize { m, n } = self.tile_size;
        QueryTile {
            first: 0,
            rows: 0,
            q: take(&mut scratch, m * self.dim),
            dout: take(&mut scratch, m * self.dim_v),
            weights: take(&mut scratch, m * n),
            gradients: take(&mut scratch, m * n),
            slopes: take(&mut scratch, if self.modifier.has_softcap() { m * n } else { 0 }),
            keep: scratch,
        }
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

    pub fn load_queries(&self, sequence: &Sequence, head: usize, first: usize, tile: &mut QueryTile) {
        tile.first = first;
        tile.rows = self.tile_size.m.min(sequence.seqlen_q - first);
        // SAFETY: the sequence has these rows, in tensors that the caller keeps alive and unwritten
        // during a launch.
        unsafe {
            self.q.head(sequence.place_q, head).load(first, tile.rows, tile.q, self.dim);
            self.dout.head(sequence.place_q, head).load(first, tile.rows, tile.dout, self.dim_v);
        }
    }

    /// Computes the weights and the score gradients of a tile. Dropout is that of the forward pass:
    /// a dropped weight is 0 in dV and its gradient is 0, while the undropped weight stays in the
    /// score gradient.
    pub fn fill(
        &self,
        sequence: &Sequence,
        head: usize,
        keys: &KeyTile,
        tile: &mut QueryTile,
        blocks: &TileBlocks,
        scores_are: ScoresAre,
    ) {
        let n = self.tile_size.n;
        let rows = tile.rows;
        let k = Matrix::columns(keys.k_transposed, n);
        let q = Matrix::columns(tile.q, self.dim);
        let factor = self.modifier.factor;
        multiply([keys.padded_keys, rows, self.dim], tile.weights, n, Into::Overwrite, k, q, factor);
        let v = Matrix::columns(keys.v_transposed, n);
        let dout = Matrix::columns(tile.dout, self.dim_v);
        let keep_scale = self.keep_scale();
        multiply([keys.padded_keys, rows, self.dim_v], tile.gradients, n, Into::Overwrite, v, dout, keep_scale);
        if let Some(masks) = &self.masks {
            let mask_head = sequence.batch * self.heads + head;
            masks.fill(mask_head, tile.first, rows, keys.first, keys.keys, tile.keep, n, 1);
            multiply_in_place(self.level, &mut tile.gradients[..rows * n], tile.keep);
        }
        let first_row = self.sequences.workspace_row(sequence, head) + tile.first;
        // SAFETY: written in an earlier phase, only read in this one.
        let (lse, delta) = unsafe {
            (from_raw_parts(self.workspace.lse(first_row), rows), from_raw_parts(self.workspace.delta(first_row), rows))
        };
        for row in 0..rows {
            let lse_log2 = in_two_parts(f64::from(lse[row]) * LOG2_E);
            let weights = &mut tile.weights[row * n..][..keys.padded_keys];
            let gradients = &mut tile.gradients[row * n..][..keys.padded_keys];
            let seen = sequence.mask.keys_of(tile.first + row);
            let in_tile = |key: usize| key.saturating_sub(keys.first).min(keys.keys);
            let seen = in_tile(seen.start)..in_tile(seen.end);
            let line = Line { head, row: tile.first + row, key: keys.first + seen.start, axis: Axis::Keys };
            let hide = |hidden: Range<usize>, weights: &mut [f32], gradients: &mut [f32]| {
                weights[hidden.clone()].fill(0.0);
                gradients[hidden].fill(0.0);
            };
            for (piece, kind) in blocks.pieces(line, seen.len()) {
                let line = line.after(piece.start);
                let piece = seen.start + piece.start..seen.start + piece.end;
                if kind == BlockKind::Empty {
                    hide(piece, weights, gradients);
                    continue;
                }
                let mut slopes = self.modifier.has_softcap().then(|| &mut tile.slopes[row * n..][piece.clone()]);
                if self.modifier.is_needed() {
                    let scores = &mut weights[piece.clone()];
                    self.modifier.modify(sequence, line, kind, scores, slopes.as_deref_mut());
                }
                let of_scores = &mut gradients[piece.clone()];
                score_gradients(self.level, &mut weights[piece], of_scores, lse_log2, delta[row]);
                if let (Some(slopes), ScoresAre::Products) = (slopes, scores_are) {
                    multiply_in_place(self.level, of_scores, slopes);
                }
            }
            hide(0..seen.start, weights, gradients);
            hide(seen.end..keys.padded_keys, weights, gradients);
        }
        if self.masks.is_some() {
            multiply_in_place(self.level, &mut tile.weights[..rows * n], tile.keep);
        }
    }
}
