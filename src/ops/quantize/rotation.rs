//! The rotation of a row before it is quantised: y = H D x / sqrt(n), in fp32.
//!
//! H is the Walsh-Hadamard matrix of n, the largest power of two that divides the head dim, and
//! serves each block of n columns. D is a diagonal of signs that follow from a seed:
//!
//! ```text
//!     words   = Philox4x32-10(counter = (column / 128, 0, 0, 0), key = (seed low, seed high))
//!     D is -1 where bit (column mod 32) of word ((column mod 128) / 32) is set, else 1
//! ```
//!
//! Butterflies of distance 1, 2, 4 to n / 2 are one after the other, and the factor comes last.
//! `templates/device/hadamard.cuh` has the same order, so the bits are the same.

use crate::dropout::philox4x32_10;
use crate::problem::MAX_HEAD_DIM;

/// The head dim must be a multiple of this, so n is at least this. Fewer columns mix too little.
pub const LEAST_BLOCK: i64 = 8;

/// Words of 32 signs that the widest row has.
pub const SIGN_WORDS: usize = MAX_HEAD_DIM as usize / 32;

#[derive(Clone, Copy, Debug)]
pub struct Rotation {
    /// Bit c mod 32 of word c / 32 is set where D is -1.
    pub signs: [u32; SIGN_WORDS],
    /// 1 / sqrt(n).
    pub factor: f32,
    block: usize,
}

impl Rotation {
    pub fn new(seed: u64, head_dim: i64) -> Rotation {
        let key = [seed as u32, (seed >> 32) as u32];
        let mut signs = [0; SIGN_WORDS];
        for (draw, words) in signs.chunks_exact_mut(4).enumerate() {
            words.copy_from_slice(&philox4x32_10([draw as u32, 0, 0, 0], key));
        }
        let block = head_dim & -head_dim;
        Rotation { signs, factor: 1.0 / (block as f32).sqrt(), block: block as usize }
    }

    /// Rotates a row of the head dim.
    pub fn apply(&self, row: &mut [f32]) {
        for (column, x) in row.iter_mut().enumerate() {
            let is_negative = self.signs[column / 32] >> (column % 32) & 1;
            *x = f32::from_bits(x.to_bits() ^ is_negative << 31);
        }
        let mut distance = 1;
        while distance < self.block {
            for pair in row.chunks_exact_mut(2 * distance) {
                let (low, high) = pair.split_at_mut(distance);
                for (a, b) in low.iter_mut().zip(high) {
                    (*a, *b) = (*a + *b, *a - *b);
                }
            }
            distance *= 2;
        }
        row.iter_mut().for_each(|x| *x *= self.factor);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hadamard_alone(head_dim: i64) -> Rotation {
        Rotation { signs: [0; SIGN_WORDS], ..Rotation::new(0, head_dim) }
    }

    #[test]
    fn eight_columns_have_the_sums_of_the_walsh_hadamard_matrix() {
        let mut row = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0];
        hadamard_alone(8).apply(&mut row);
        let by_hand = [36.0, -4.0, -8.0, 0.0, -16.0, 0.0, 0.0, 0.0].map(|sum: f32| sum * (1.0 / 8.0f32.sqrt()));
        assert_eq!(row, by_hand);
    }

    #[test]
    fn blocks_of_a_row_do_not_mix() {
        let mut row = [0.0; 24];
        (row[3], row[17]) = (8.0, 8.0);
        hadamard_alone(24).apply(&mut row);
        assert!(row[..8].iter().all(|x| x.abs() == 8.0 * (1.0 / 8.0f32.sqrt())), "{row:?}");
        assert_eq!(row[8..16], [0.0; 8]);
        assert!(row[16..].iter().all(|x| x.abs() == row[0].abs()), "{row:?}");
    }

    /// D H / sqrt(n) undoes H D / sqrt(n).
    #[test]
    fn a_rotation_and_its_transpose_give_the_row_back() {
        for head_dim in [8, 40, 64, 96, 128, 192, 256, 512] {
            let rotation = Rotation::new(0x1234_5678_9abc_def0, head_dim);
            let row: Vec<f32> = (0..head_dim).map(|i| ((i * 37 + 11) % 64) as f32 - 31.5).collect();
            let mut turned = row.clone();
            rotation.apply(&mut turned);
            assert_ne!(turned, row);
            hadamard_alone(head_dim).apply(&mut turned);
            for (column, (back, x)) in turned.iter().zip(&row).enumerate() {
                let sign = 1.0 - 2.0 * (rotation.signs[column / 32] >> (column % 32) & 1) as f32;
                assert!((back * sign - x).abs() < 1e-4, "column {column} of {head_dim}: {back} for {x}");
            }
        }
    }

    #[test]
    fn signs_are_those_of_the_documented_draws() {
        let rotation = Rotation::new(0, 512);
        // The published vector of Philox4x32-10 for a counter and a key of zeros.
        assert_eq!(rotation.signs[..4], [0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8]);
        assert_eq!(rotation.signs[4..8], philox4x32_10([1, 0, 0, 0], [0, 0]));
        assert_eq!(Rotation::new(5 | 7 << 32, 64).signs[..4], philox4x32_10([0; 4], [5, 7]));
    }
}
