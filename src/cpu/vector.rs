//! The element-wise loops of a tile but the exponentials, which are `softmax`'s.
//!
//! Written as plain loops that LLVM vectorises and compiled once for each instruction set; `Level`
//! picks at run time. They know tiles and rows of scores, not sequences, heads or masks beyond "how
//! many of this row".

use super::product::{LANES, Matrix};
use super::simd::EXP2;
use std::f32::consts::LOG2_E;

/// Defines `fn name(level, arguments…)` whose body is compiled once per level. In the body the
/// constant `FMA` says whether a fused multiply-add is one instruction.
macro_rules! vectorized {
    ($($(#[$doc:meta])* pub fn $name:ident($($arg:ident: $type:ty),* $(,)?) $body:block)*) => {$(
        $(#[$doc])*
        pub fn $name(level: $crate::cpu::simd::Level, $($arg: $type),*) {
            use $crate::cpu::simd::Level;

            #[inline(always)]
            fn body<const FMA: bool>($($arg: $type),*) $body

            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx2,fma")]
            fn avx512($($arg: $type),*) {
                body::<true>($($arg),*)
            }

            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma")]
            fn avx2($($arg: $type),*) {
                body::<true>($($arg),*)
            }

            match level {
                Level::Baseline => body::<{ cfg!(target_arch = "aarch64") }>($($arg),*),
                // SAFETY: `Level::detect` has seen these features.
                #[cfg(target_arch = "x86_64")]
                Level::Avx2 => unsafe { avx2($($arg),*) },
                // SAFETY: as above.
                #[cfg(target_arch = "x86_64")]
                Level::Avx512 => unsafe { avx512($($arg),*) },
            }
        }
    )*};
}
pub(super) use vectorized;

/// An fp32 number and its rounding error. One rounding of a row's LSE would be in all of the row's
/// weights alike.
pub fn in_two_parts(x: f64) -> [f32; 2] {
    let high = x as f32;
    [high, if high.is_finite() { (x - f64::from(high)) as f32 } else { 0.0 }]
}

#[inline(always)]
fn multiply_add<const FMA: bool>(a: f32, b: f32, c: f32) -> f32 {
    if FMA { a.mul_add(b, c) } else { a * b + c }
}

/// 2^f - 1 = f times this, for f in [-1/2, 1/2].
#[inline(always)]
fn exp2_slope<const FMA: bool>(f: f32) -> f32 {
    EXP2[1..6].iter().fold(EXP2[0], |p, coefficient| multiply_add::<FMA>(p, f, *coefficient))
}

/// Adding 1.5 * 2^23 rounds to the nearest integer, which then stands in the low mantissa bits.
const ROUND: f32 = 12_582_912.0;

/// tanh within 3 ulp, also near 0, where 1 - 2 / (e^2x + 1) would cancel: e / (e + 2) with e =
/// e^2|x| - 1.
#[inline(always)]
fn tanh<const FMA: bool>(x: f32) -> f32 {
    // From 10 on it is 1 in fp32. A select keeps a NaN.
    let magnitude = x.abs();
    let magnitude = if magnitude > 10.0 { 10.0 } else { magnitude };
    let exponent = magnitude * (2.0 * LOG2_E);
    let rounded = exponent + ROUND;
    let f = exponent - (rounded - ROUND);
    let power = f32::from_bits(
        ((rounded.to_bits() as i32).wrapping_sub(ROUND.to_bits() as i32).wrapping_add(127) << 23) as u32,
    );
    let e = multiply_add::<FMA>(power * f, exp2_slope::<FMA>(f), power - 1.0);
    (e / (e + 2.0)).copysign(x)
}

vectorized! {
    /// x becomes factor * x.
    pub fn scale(x: &mut [f32], factor: f32) {
        x.iter_mut().for_each(|x| *x *= factor);
    }

    /// y becomes factor * x.
    pub fn scale_into(x: &[f32], factor: f32, y: &mut [f32]) {
        y.iter_mut().zip(x).for_each(|(y, x)| *y = factor * x);
    }

    /// Element-wise product, for the dropout multipliers.
    pub fn multiply_in_place(x: &mut [f32], factors: &[f32]) {
        x.iter_mut().zip(factors).for_each(|(x, factor)| *x *= factor);
    }

    /// x becomes cap * tanh(x).
    pub fn cap(x: &mut [f32], cap: f32) {
        x.iter_mut().for_each(|x| *x = cap * tanh::<FMA>(*x));
    }

    /// The same, and `slopes` becomes 1 - tanh(x)^2.
    pub fn cap_with_slopes(x: &mut [f32], cap: f32, slopes: &mut [f32]) {
        for (x, slope) in x.iter_mut().zip(slopes) {
            let tanh = tanh::<FMA>(*x);
            *x = cap * tanh;
            *slope = 1.0 - tanh * tanh;
        }
    }

    /// Adds `slope * |first + i * step|` to element i; `step` is 1 or -1.
    pub fn add_distances(x: &mut [f32], slope: f32, first: i32, step: i32) {
        for (i, x) in x.iter_mut().enumerate() {
            let distance = first.wrapping_add(step.wrapping_mul(i as i32)) as f32;
            *x = multiply_add::<FMA>(slope, distance.abs(), *x);
        }
    }

    /// x += factor * y
    pub fn add_scaled(x: &mut [f32], factor: f32, y: &[f32]) {
        x.iter_mut().zip(y).for_each(|(x, y)| *x += factor * *y);
    }

    /// `sums[i] = a[i, :] . b[i, :]` for rows of `columns` elements.
    pub fn row_dots(a: Matrix, b: Matrix, columns: usize, sums: &mut [f32]) {
        for (row, sum) in sums.iter_mut().enumerate() {
            let mut lanes = [0.0; LANES];
            let (whole_a, rest_a) = a.row(row, columns).as_chunks::<LANES>();
            let (whole_b, rest_b) = b.row(row, columns).as_chunks::<LANES>();
            for (a, b) in whole_a.iter().zip(whole_b) {
                (0..LANES).for_each(|l| lanes[l] = multiply_add::<FMA>(a[l], b[l], lanes[l]));
            }
            let rest: f32 = rest_a.iter().zip(rest_b).map(|(a, b)| a * b).sum();
            *sum = lanes.iter().sum::<f32>() + rest;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::simd::Level;
    use super::*;

    /// Units in the last place of the fp32 nearest to `exact`.
    fn ulps(got: f32, exact: f64) -> f64 {
        let exponent = (exact.log2().floor() as i32).max(-126);
        (f64::from(got) - exact).abs() / 2f64.powi(exponent - 23)
    }

    #[test]
    fn tanh_is_within_a_few_ulp_and_keeps_nan() {
        for level in Level::all() {
            let of_any_size = (0..400_000).map(|i| 2f32.powf(i as f32 / 20_000.0 - 16.0));
            let arguments: Vec<f32> = of_any_size.flat_map(|x| [x, -x]).collect();
            let mut results = arguments.clone();
            cap(level, &mut results, 1.0);
            let exact = |x: &f32| f64::from(*x).tanh();
            let worst = arguments.iter().zip(&results).map(|(x, y)| ulps(y.abs(), exact(x).abs())).fold(0.0, f64::max);
            assert!(worst <= 4.0, "{level:?}: {worst} ulp");
            let mut ends = [0.0, f32::INFINITY, f32::NEG_INFINITY, f32::NAN];
            let mut slopes = [f32::NAN; 4];
            cap_with_slopes(level, &mut ends, 3.0, &mut slopes);
            assert_eq!((ends[..3].to_vec(), slopes[..3].to_vec()), (vec![0.0, 3.0, -3.0], vec![1.0, 0.0, 0.0]));
            assert!(ends[3].is_nan() && slopes[3].is_nan());
        }
    }
}
