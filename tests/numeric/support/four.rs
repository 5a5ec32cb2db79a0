//! int4 rows of a case: the scale and zero of each group, and the bytes of a row.
//!
//! `Data` holds the numbers that the rows stand for, so the reference knows nothing of int4.

use super::case::{Case, Kind, Random};
use flashtune::problem::{ElementType, Four};
use half::f16;

impl Case {
    /// What multiplies the values of a row. In three quarters of the cases v is smaller or larger,
    /// or some of its rows are: a kernel multiplies weights by v's scales in fp16, which needs
    /// other powers of two then.
    fn power_of_four(&self, kind: Kind, row: usize) -> f32 {
        let power = match (kind, (self.seed as i64 + self.seqlen_k) % 4) {
            (Kind::V, 1) => -10,
            (Kind::V, 2) => 6,
            (Kind::V, 3) => (row as i32 / 16 % 3 - 1) * 5,
            _ => 0,
        };
        2f32.powi(power)
    }

    /// The scale and zero of a group of a row. Normal values use most of the 16 numbers.
    fn scale_and_zero(&self, kind: Kind, row: usize, group: usize) -> [f16; 2] {
        let place = ((row * 61 + group) * 4 + kind as usize) as u64;
        let mut random = Random::new(self.seed ^ 0x4b17 ^ place << 20);
        let mut between = |low: i64, high: i64| random.between(low, high) as f32 / 1000.0;
        [between(200, 450), between(-3000, -1800)].map(|x| f16::from_f32(x * self.power_of_four(kind, row)))
    }

    /// The bytes of a row: the numbers nearest to the values.
    pub fn row_of_four(&self, four: Four, kind: Kind, row: usize, values: &[f32]) -> Vec<u8> {
        let (dim, group) = (values.len(), four.group() as usize);
        // What lies behind the last zero may hold anything.
        let mut bytes = vec![0xff; four.row_bytes(dim as i64) as usize];
        bytes[..dim / 2].fill(0);
        for (at, x) in values.iter().enumerate() {
            let [scale, zero] = self.scale_and_zero(kind, row, at / group).map(f16::to_f32);
            let number = ((x - zero) / scale).round().clamp(0.0, 15.0) as u8;
            bytes[at / 2] |= number << (at % 2 * 4);
        }
        for group in 0..dim / group {
            let both = self.scale_and_zero(kind, row, group);
            let both: Vec<u8> = both.iter().flat_map(|half| half.to_le_bytes()).collect();
            bytes[dim / 2 + 4 * group..][..4].copy_from_slice(&both);
        }
        bytes
    }

    /// The numbers that int4 rows stand for, nearest to the values; other tensors stay as they are.
    pub fn hold_in_four(&self, kind: Kind, values: &mut [f32]) {
        let ElementType::Four(four) = self.element(kind) else { return };
        let dim = self.shape(kind).dim as usize;
        for (row, values) in values.chunks_mut(dim).enumerate() {
            let power = self.power_of_four(kind, row);
            values.iter_mut().for_each(|x| *x *= power);
            let bytes = self.row_of_four(four, kind, row, values);
            for (at, x) in values.iter_mut().enumerate() {
                let [scale, zero] = self.scale_and_zero(kind, row, at / four.group() as usize).map(f16::to_f64);
                let number = f64::from(bytes[at / 2] >> (at % 2 * 4) & 15);
                *x = (scale * number + zero) as f32;
            }
        }
    }
}
