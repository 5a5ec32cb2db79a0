//! The products that add a tile's weights and score gradients to dK, dV and dQ.
//!
//! A tile unit multiplies pairs, and makes dK and dV of a strip with keys contiguous: the weights
//! then are pairs of rows where they lie.

use super::tiles::{KeyStrip, KeyTile, QueryTile, Tiles};
use crate::cpu::element::{Element, Head};
use crate::cpu::pairs::{self, multiply_pairs, split_neighbours, split_rows, split_weights, words};
use crate::cpu::product::{Into, LANES, Matrix, STRIP, multiply};
use crate::cpu::sequence::Sequence;
use crate::cpu::transpose;
use crate::family::cpu::scratch::gradient_pitch;
use std::ops::Range;

impl<E: Element> Tiles<E> {
    /// Adds a strip's part to its accumulators of dK and dV, which hold something if they are
    /// begun. The weights may be left in pieces.
    #[allow(clippy::too_many_arguments)] // the strip and its accumulators
    pub fn add_dk_and_dv(
        &self,
        keys: &KeyTile,
        strip: &KeyStrip,
        tile: &mut QueryTile,
        rows: Range<usize>,
        is_begun: bool,
        of_dk: &mut [f32],
        of_dv: &mut [f32],
    ) {
        let (width, pitch) = (strip.padded_keys, gradient_pitch(self.tile_size.n));
        let gradients = &tile.gradients[rows.start * pitch + strip.at..];
        let Some(unit) = &keys.tile_unit else {
            let into = if is_begun { Into::Add } else { Into::Overwrite(1.0) };
            let weights = Matrix::rows(&tile.weights[rows.start * width..], width);
            let [q, dout] = [tile.q_by_rows, tile.dout_by_rows].map(|x| x.skip_rows(rows.start).transposed());
            let [dim, dim_v] = [self.padded_dim, self.padded_dim_v];
            multiply(self.level, [dim_v, strip.keys, rows.len()], of_dv, dim_v, into, dout, weights);
            let gradients = Matrix::rows(gradients, pitch);
            return multiply(self.level, [dim, strip.keys, rows.len()], of_dk, dim, into, q, gradients);
        };
        let into = if is_begun { pairs::Into::Add } else { pairs::Into::Overwrite(1.0) };
        let [q, dout] = [tile.q_by_rows, tile.dout_by_rows].map(|x| x.skip_rows(rows.start / 2));
        let pairs = words(rows.len());
        let weights = &mut tile.weights[rows.start * width..][..2 * pairs * width];
        weights[rows.len() * width..].fill(0.0);
        split_weights(self.level, weights, width);
        let add = |weights: &[f32], of_keys: &mut [f32], columns, right| {
            let parts = [0, width].map(|at| Matrix::columns(&weights[at..], 2 * width));
            multiply_pairs(unit, self.level, [width, columns, pairs], of_keys, width, into, parts, [right]);
        };
        add(weights, of_dv, self.padded_dim_v, dout);
        const NO_ROW: [f32; STRIP] = [0.0; STRIP];
        for (pair, parts) in weights.chunks_exact_mut(2 * width).enumerate() {
            let of_row =
                |row: usize| if row < rows.len() { &gradients[row * pitch..][..width] } else { &NO_ROW[..width] };
            split_rows(self.level, [of_row(2 * pair), of_row(2 * pair + 1)], parts.split_at_mut(width).into());
        }
        add(weights, of_dk, self.padded_dim, q);
    }

    /// Adds the tile's part to a dQ accumulator. The first key block that any of its rows sees
    /// begins it. Under a block mask that block may be skipped, and the accumulator begins with
    /// zeros. The gradients may be left in pieces.
    pub fn add_dq(&self, sequence: &Sequence, keys: &KeyTile, tile: &mut QueryTile, acc_dq: &mut [f32]) {
        let (dim, n) = (self.padded_dim, self.tile_size.n);
        let begin = sequence.mask.keys_of(tile.first).start / n * n;
        let begins = keys.first == begin && !self.block_map.is_on();
        let (pitch, gradients) = (gradient_pitch(n), &mut *tile.gradients);
        let Some(unit) = &keys.tile_unit else {
            let into = if begins { Into::Overwrite(1.0) } else { Into::Add };
            let (k, gradients) = (keys.k.transposed(), Matrix::columns(gradients, pitch));
            return multiply(self.level, [dim, tile.rows, keys.keys], acc_dq, dim, into, k, gradients);
        };
        let into = if begins { pairs::Into::Overwrite(1.0) } else { pairs::Into::Add };
        let pairs = words(keys.keys);
        let gradients = &mut gradients[..tile.rows.next_multiple_of(LANES) * pitch];
        for row in gradients.chunks_exact_mut(pitch) {
            row[keys.keys.next_multiple_of(LANES)..2 * pairs].fill(0.0);
        }
        split_neighbours(self.level, gradients, pitch, 2 * pairs);
        let parts = [0, pairs].map(|at| Matrix::columns(&gradients[at..], pitch));
        multiply_pairs(unit, self.level, [dim, tile.rows, pairs], acc_dq, dim, into, [keys.k.transposed()], parts);
    }

    /// Stores `factor` times a strip's dK or dV into the rows from `first` on. `row` has room for
    /// 16 of them.
    ///
    /// # Safety
    /// The rows must lie in a live tensor that nobody else reads or writes meanwhile.
    #[allow(clippy::too_many_arguments)] // the strip and its place
    pub unsafe fn store_keys(
        &self,
        to: &Head<E>,
        first: usize,
        strip: &KeyStrip,
        factor: f32,
        of_keys: &mut [f32],
        [dim, padded_dim]: [usize; 2],
        row: &mut [f32],
    ) {
        for at in (0..strip.keys).step_by(LANES) {
            let keys = LANES.min(strip.keys - at);
            let rows = match self.has_tile_unit() {
                false => &mut of_keys[at * padded_dim..],
                true => {
                    transpose::into_rows(&of_keys[at..], strip.padded_keys, [keys, padded_dim], row);
                    &mut *row
                }
            };
            for (key, row) in rows.chunks_exact_mut(padded_dim).take(keys).enumerate() {
                // SAFETY: the caller's promise.
                unsafe { to.store_scaled(first + at + key, factor, &mut row[..dim]) };
            }
        }
    }
}
