//! Eight: the 8-bit number formats of q, k and v, and their conversions from and to fp32.
//!
//! A quantised tensor holds x / scale, rounded to nearest with ties to even. Numbers beyond the
//! largest become the largest, infinities too, and NaN stays NaN (0 in int8, which has none). The
//! templates repeat the rules in `device/eight.cuh`.

use serde::{Deserialize, Serialize};

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Eight {
    /// Sign, 4 bits of exponent with a bias of 7, 3 of mantissa. No infinities; NaN is 0x7f and
    /// 0xff.
    E4m3,
    /// The upper byte of an fp16 number.
    E5m2,
    /// -127 to 127; -128 is read and never written.
    Int8,
}

impl Eight {
    pub const ALL: [Eight; 3] = [Eight::E4m3, Eight::E5m2, Eight::Int8];

    pub const fn name(self) -> &'static str {
        match self {
            Eight::E4m3 => "e4m3",
            Eight::E5m2 => "e5m2",
            Eight::Int8 => "int8",
        }
    }

    /// The number of the format in kernels.
    pub const fn number(self) -> u32 {
        match self {
            Eight::E4m3 => 1,
            Eight::E5m2 => 2,
            Eight::Int8 => 3,
        }
    }

    /// The largest finite number.
    pub const fn largest(self) -> f32 {
        match self {
            Eight::E4m3 => 448.0,
            Eight::E5m2 => 57344.0,
            Eight::Int8 => 127.0,
        }
    }

    pub fn decode(self, bits: u8) -> f32 {
        match self {
            Eight::E4m3 => of_float_bits(bits, 3),
            Eight::E5m2 => of_float_bits(bits, 2),
            Eight::Int8 => f32::from(bits as i8),
        }
    }

    /// The nearest number, ties to even, clamped to the largest.
    pub fn encode(self, x: f32) -> u8 {
        match self {
            Eight::E4m3 => to_float_bits(x, 3, self.largest()),
            Eight::E5m2 => to_float_bits(x, 2, self.largest()),
            // A NaN casts to 0.
            Eight::Int8 => x.clamp(-127.0, 127.0).round_ties_even() as i8 as u8,
        }
    }

    /// The scale of numbers whose largest magnitude is this. All zeros get 1, as do numbers too
    /// small for fp32 to divide by. An infinity counts as the largest fp32 number.
    pub fn scale_of(self, largest: f32) -> f32 {
        const LEAST: f32 = 7.888609e-31; // 2^-100
        if largest >= LEAST { largest.min(f32::MAX) / self.largest() } else { 1.0 }
    }

    /// The nearest numbers to x / scale, by one rounded reciprocal as kernels compute it.
    pub fn encode_row(self, row: &[f32], scale: f32, encoded: &mut [u8]) {
        let factor = 1.0 / scale;
        encoded.iter_mut().zip(row).for_each(|(encoded, x)| *encoded = self.encode(x * factor));
    }

    /// The 256 numbers by their bits.
    pub fn table(self) -> [f32; 256] {
        std::array::from_fn(|bits| self.decode(bits as u8))
    }
}

/// A float of so many mantissa bits, in one byte with its sign. Only e5m2 (2) has infinities.
fn of_float_bits(bits: u8, mantissa_bits: u32) -> f32 {
    let magnitude = u32::from(bits & 0x7f);
    let exponent_bits = 7 - mantissa_bits;
    let bias = (1 << (exponent_bits - 1)) - 1;
    let (exponent, mantissa) = (magnitude >> mantissa_bits, magnitude & ((1 << mantissa_bits) - 1));
    let unsigned = match (mantissa_bits, magnitude) {
        (3, 0x7f) | (2, 0x7d..) => f32::NAN,
        (2, 0x7c) => f32::INFINITY,
        _ if exponent == 0 => mantissa as f32 * (1.0 - bias as f32 - mantissa_bits as f32).exp2(),
        _ => f32::from_bits((exponent + 127 - bias) << 23 | mantissa << (23 - mantissa_bits)),
    };
    if bits & 0x80 != 0 { -unsigned } else { unsigned }
}

fn to_float_bits(x: f32, mantissa_bits: u32, largest: f32) -> u8 {
    let sign = (x.to_bits() >> 24) as u8 & 0x80;
    if x.is_nan() {
        return 0x7f;
    }
    let magnitude = x.abs().min(largest);
    let bias = (1 << (6 - mantissa_bits)) - 1;
    let smallest_normal = f32::from_bits((127 + 1 - bias) << 23);
    let bits = if magnitude < smallest_normal {
        // Adding a number whose last bit is the smallest denormal rounds to it.
        let anchor = smallest_normal * f32::from_bits((127 + 23 - mantissa_bits) << 23);
        (magnitude + anchor).to_bits() - anchor.to_bits()
    } else {
        let dropped = 23 - mantissa_bits;
        let bits = magnitude.to_bits();
        let rounded = bits + (1 << (dropped - 1)) - 1 + (bits >> dropped & 1);
        (rounded >> dropped) - ((127 - bias) << mantissa_bits)
    };
    sign | bits as u8
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::f16;

    #[test]
    fn every_number_comes_back_and_those_between_round_to_the_nearest() {
        for format in Eight::ALL {
            let mut numbers: Vec<(f32, u8)> =
                (0..=255).map(|bits| (format.decode(bits), bits)).filter(|(x, _)| x.is_finite()).collect();
            numbers.sort_by(|a, b| a.0.total_cmp(&b.0));
            for (x, bits) in &numbers {
                let expected = if *x < -format.largest() { format.encode(-format.largest()) } else { *bits };
                assert_eq!(format.encode(*x), expected, "{format:?} {x}");
            }
            for pair in numbers.windows(2) {
                let [(low, low_bits), (high, high_bits)] = [pair[0], pair[1]];
                if low == high || low < -format.largest() {
                    continue;
                }
                let middle = low / 2.0 + high / 2.0;
                let even = if low_bits & 1 == 0 { low } else { high };
                assert!(format == Eight::Int8 || low_bits & 1 != high_bits & 1);
                let even = if format == Eight::Int8 && low as i32 % 2 != 0 { high } else { even };
                assert_eq!(format.decode(format.encode(middle)), even, "{format:?} {low} {high}");
                let step = (high - low) / 8.0;
                assert_eq!(format.decode(format.encode(middle - step)), low, "{format:?}");
                assert_eq!(format.decode(format.encode(middle + step)), high, "{format:?}");
            }
        }
    }

    #[test]
    fn numbers_past_the_largest_are_clamped_and_nan_stays() {
        for format in Eight::ALL {
            let top = format.largest();
            for x in [top * 1.001, top * 1e6, f32::INFINITY] {
                assert_eq!(format.decode(format.encode(x)), top);
                assert_eq!(format.decode(format.encode(-x)), -top);
            }
            let nan = format.decode(format.encode(f32::NAN));
            assert!(nan.is_nan() || format == Eight::Int8 && nan == 0.0);
        }
    }

    #[test]
    fn e5m2_is_the_upper_byte_of_fp16() {
        for bits in 0..=255u8 {
            let (half, here) = (f16::from_bits(u16::from(bits) << 8).to_f32(), Eight::E5m2.decode(bits));
            assert!(half == here || half.is_nan() && here.is_nan(), "{bits:#x}");
        }
        assert_eq!(Eight::E4m3.decode(0x7e), 448.0);
        assert_eq!(Eight::E4m3.decode(0x01), 2f32.powi(-9));
        assert_eq!(Eight::E4m3.decode(0x08), 2f32.powi(-6));
    }
}
