//! Four: rows of 4-bit numbers with their scales, and their conversions from and to fp32.
//!
//! A row has two numbers of 0 to 15 in each byte, the first in the low half. Behind them each group
//! of neighbouring columns has a scale and a zero in fp16, four bytes together. The row ends at the
//! next multiple of 16 bytes. A number n stands for scale * n + zero, not rounded to fp16. The
//! templates repeat the rules in `device/products/keys_four.cuh` and `kv_append/warp_row.cuh`.

use half::f16;
use serde::{Deserialize, Serialize};

/// The columns of a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Four {
    Int4g32,
    Int4g64,
}

/// Magnitudes beyond this one become this one: then no scale * 15 + zero rounds to an infinity.
const LARGEST: f32 = 65408.0;

impl Four {
    pub const ALL: [Four; 2] = [Four::Int4g32, Four::Int4g64];

    pub const fn name(self) -> &'static str {
        match self {
            Four::Int4g32 => "int4g32",
            Four::Int4g64 => "int4g64",
        }
    }

    /// The number of the formats in kernels, after those of `Eight`.
    pub const NUMBER: u32 = 4;

    pub const fn group(self) -> i64 {
        match self {
            Four::Int4g32 => 32,
            Four::Int4g64 => 64,
        }
    }

    /// Bytes of a row of `dim` columns, a multiple of the group.
    pub const fn row_bytes(self, dim: i64) -> i64 {
        (dim / 2 + dim / self.group() * 4 + 15) / 16 * 16
    }

    /// The scale and the zero of a group in a row of `dim` columns.
    pub fn scale_and_zero(self, row: &[u8], dim: usize, group: usize) -> [f16; 2] {
        let at = dim / 2 + 4 * group;
        [at, at + 2].map(|at| f16::from_le_bytes([row[at], row[at + 1]]))
    }

    pub fn decode_row(self, row: &[u8], wide: &mut [f32]) {
        let dim = wide.len();
        for (group, wide) in wide.chunks_mut(self.group() as usize).enumerate() {
            let [scale, zero] = self.scale_and_zero(row, dim, group).map(f16::to_f64);
            // In fp64 the sum is exact. Its rounding to fp32 is far below that of a product.
            let numbers: [f32; 16] = std::array::from_fn(|n| (scale * n as f64 + zero) as f32);
            let bytes = &row[group * self.group() as usize / 2..];
            for (pair, byte) in wide.chunks_mut(2).zip(bytes) {
                pair[0] = numbers[usize::from(byte & 15)];
                pair[1] = numbers[usize::from(byte >> 4)];
            }
        }
    }

    /// Zeros are the least numbers of their groups, and scales a fifteenth of the distance to the
    /// largest; 1 where that is 0 in fp16. NaN becomes the group's zero.
    pub fn encode_row(self, wide: &[f32], row: &mut [u8]) {
        let dim = wide.len();
        for (group, wide) in wide.chunks(self.group() as usize).enumerate() {
            let held = |x: &f32| x.clamp(-LARGEST, LARGEST);
            let [low, high] = [f32::min, f32::max].map(|least| wide.iter().map(held).fold(f32::NAN, least));
            // The sum makes 0 of -0, of which a minimum may be either.
            let zero = f16::from_f32(if low.is_nan() { 0.0 } else { low + 0.0 });
            let distance = if high.is_nan() { 0.0 } else { high - zero.to_f32() };
            let scale = f16::from_f32(distance / 15.0);
            let scale = if scale.to_f32() > 0.0 { scale } else { f16::ONE };
            let factor = 1.0 / scale.to_f32();
            // A NaN casts to 0.
            let number = |x: &f32| ((held(x) - zero.to_f32()) * factor).round_ties_even().clamp(0.0, 15.0) as u8;
            let bytes = &mut row[group * self.group() as usize / 2..];
            for (byte, pair) in bytes.iter_mut().zip(wide.chunks(2)) {
                *byte = number(&pair[0]) | number(&pair[1]) << 4;
            }
            let at = dim / 2 + 4 * group;
            row[at..at + 2].copy_from_slice(&scale.to_le_bytes());
            row[at + 2..at + 4].copy_from_slice(&zero.to_le_bytes());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_whole_sixteens_of_bytes_and_wide_enough_to_tell_their_columns() {
        let of = |four: Four, dims: [i64; 4]| dims.map(|dim| four.row_bytes(dim));
        assert_eq!(of(Four::Int4g32, [32, 64, 128, 256]), [32, 48, 80, 160]);
        assert_eq!(of(Four::Int4g64, [64, 128, 192, 256]), [48, 80, 112, 144]);
        for four in Four::ALL {
            let dims = (1..=512 / four.group()).map(|groups| groups * four.group());
            let bytes: Vec<i64> = dims.map(|dim| four.row_bytes(dim)).collect();
            assert!(bytes.windows(2).all(|pair| pair[0] < pair[1]), "{}", four.name());
        }
    }

    #[test]
    fn numbers_lie_low_half_first_and_are_not_rounded() {
        let four = Four::Int4g32;
        let mut row = vec![0u8; 48];
        (row[0], row[16]) = (0x4f, 0x12);
        let (scale, zero) = (f16::from_f32(0.1), f16::from_f32(-0.75));
        for group in 0..2 {
            row[32 + 4 * group..][..2].copy_from_slice(&scale.to_le_bytes());
            row[34 + 4 * group..][..2].copy_from_slice(&(if group == 0 { zero } else { f16::ONE }).to_le_bytes());
        }
        let mut wide = [0.0; 64];
        four.decode_row(&row, &mut wide);
        // fp16's 0.1 is 1638 / 2^14.
        let of = |n: f32, zero: f32| n * 1638.0 / 16384.0 + zero;
        assert_eq!([wide[0], wide[1], wide[2]], [of(15.0, -0.75), of(4.0, -0.75), -0.75]);
        assert_eq!([wide[32], wide[33], wide[34]], [of(2.0, 1.0), of(1.0, 1.0), 1.0]);
    }

    #[test]
    fn encoding_keeps_within_half_a_step_and_survives_what_fp16_does_not_hold() {
        for four in Four::ALL {
            let dim = 128;
            let wide: Vec<f32> = (0..dim).map(|i| ((i * 37 % 101) as f32 - 40.0) * 0.03).collect();
            let (mut row, mut back) = (vec![0xffu8; four.row_bytes(dim as i64) as usize], vec![0.0; dim]);
            four.encode_row(&wide, &mut row);
            four.decode_row(&row, &mut back);
            for (at, (x, back)) in wide.iter().zip(&back).enumerate() {
                let scale = four.scale_and_zero(&row, dim, at / four.group() as usize)[0].to_f32();
                assert!((x - back).abs() <= 0.51 * scale, "{x} {back} {scale}");
            }
            // What a row holds already is kept.
            let before = row.clone();
            four.encode_row(&back, &mut row);
            let mut again = vec![0.0; dim];
            four.decode_row(&row, &mut again);
            assert!(back.iter().zip(&again).all(|(x, y)| (x - y).abs() <= 2e-3), "{before:?}");
            for odd in [f32::INFINITY, f32::NEG_INFINITY, f32::NAN, 1e30, 3e-9] {
                for fill in [0.0, 7.0, -odd, odd] {
                    let mut wide = vec![fill; dim];
                    (wide[0], wide[dim - 1]) = (odd, 0.5);
                    four.encode_row(&wide, &mut row);
                    four.decode_row(&row, &mut back);
                    assert!(back.iter().all(|x| x.is_finite()), "{odd} {fill} {back:?}");
                    let scales = (0..dim / four.group() as usize).map(|group| four.scale_and_zero(&row, dim, group)[0]);
                    assert!(scales.into_iter().all(|scale| scale > f16::ZERO && scale.is_finite()));
                }
            }
        }
    }
}
