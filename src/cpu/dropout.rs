//! The dropout mask of a tile, as multipliers 1 (kept) and 0 (dropped).
//!
//! `crate::dropout` defines the mask; this file draws it by patches, once per eight elements. The
//! scale of kept weights is applied elsewhere, as one factor of a whole product.

use super::simd::Level;
use super::vector::vectorized;
use crate::call::Call;
use crate::dropout::DropoutMask;

/// The masks of a launch, seed and offset read once.
#[derive(Clone, Copy)]
pub struct Masks {
    seed: u64,
    offset: u64,
    threshold: u32,
    level: Level,
    pub keep_scale: f32,
}

impl Masks {
    /// None if the problem has no dropout.
    pub fn new(call: &Call, level: Level) -> Option<Masks> {
        let read = |pointer: *const u64, value: u64| match pointer.is_null() {
            true => value,
            // SAFETY: on this backend the pointers, where set, are host memory with one u64 (the
            // header says so).
            false => unsafe { pointer.read_unaligned() },
        };
        call.problem.dropout.then(|| Masks {
            seed: read(call.dropout.seed_ptr, call.dropout.seed),
            offset: read(call.dropout.offset_ptr, call.dropout.offset),
            threshold: call.dropout.threshold(),
            level,
            keep_scale: call.dropout.keep_scale(),
        })
    }

    /// Fills the tile of rows `row..row + rows` and keys `key..key + keys`, element (i, j) at `i *
    /// row_stride + j * key_stride`. `row` and `key` are multiples of 16, and the tile has room for
    /// `rows` and `keys` rounded up to 16.
    #[allow(clippy::too_many_arguments)] // two ranges, two strides
    pub fn fill(
        &self,
        head: usize,
        row: usize,
        rows: usize,
        key: usize,
        keys: usize,
        tile: &mut [f32],
        row_stride: usize,
        key_stride: usize,
    ) {
        debug_assert!(row.is_multiple_of(16) && key.is_multiple_of(16));
        let mask = DropoutMask::new(self.seed, self.offset, head as u32, self.threshold);
        let mut patch = [[0.0; 16]; 16];
        for j in (0..keys).step_by(16) {
            for i in (0..rows).step_by(16) {
                draw_patch(self.level, &mask, self.threshold, (row + i) as u32, (key + j) as u32, &mut patch);
                let corner = &mut tile[i * row_stride + j * key_stride..];
                for (c, column) in patch.iter().enumerate() {
                    if row_stride == 1 {
                        corner[c * key_stride..][..16].copy_from_slice(column);
                        continue;
                    }
                    for (r, keep) in column.iter().enumerate() {
                        corner[r * row_stride + c * key_stride] = *keep;
                    }
                }
            }
        }
    }
}

/// An aligned 16 x 16 block, `[key][row]`.
type Patch = [[f32; 16]; 16];

vectorized! {
    /// The multipliers of the block at (row, key).
    pub fn draw_patch(mask: &DropoutMask, threshold: u32, row: u32, key: u32, patch: &mut Patch) {
        for pair in 0..4 {
            let mut words = [[0u32; 8]; 4];
            #[allow(clippy::needless_range_loop)] // one lane of a vector, across the four words
            for r in 0..8 {
                let draw = mask.draw(row + r as u32, key + 2 * pair as u32);
                (0..4).for_each(|index| words[index][r] = draw[index]);
            }
            for (index, words) in words.iter().enumerate() {
                let (first_row, c) = (8 * (index % 2), 2 * pair + 8 * (index / 2));
                for (r, word) in words.iter().enumerate() {
                    patch[c][first_row + r] = if word & 0xffff >= threshold { 1.0 } else { 0.0 };
                    patch[c + 1][first_row + r] = if word >> 16 >= threshold { 1.0 } else { 0.0 };
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tile_holds_the_documented_mask_in_both_orientations() {
        let masks = Masks { seed: 3, offset: 1 << 35, threshold: 20000, level: Level::detect(), keep_scale: 1.0 };
        let reference = DropoutMask::new(3, 1 << 35, 5, 20000);
        let (mut by_key, mut by_row) = (vec![f32::NAN; 48 * 32], vec![f32::NAN; 48 * 32]);
        masks.fill(5, 64, 33, 160, 20, &mut by_key, 1, 48);
        masks.fill(5, 64, 33, 160, 20, &mut by_row, 32, 1);
        for i in 0..33 {
            for j in 0..20 {
                let keep = f32::from(u8::from(reference.keeps(64 + i as u32, 160 + j as u32)));
                assert_eq!((by_key[j * 48 + i], by_row[i * 32 + j]), (keep, keep), "row {i} key {j}");
            }
        }
    }
}
