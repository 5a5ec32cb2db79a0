//! The element-wise loops of a tile: exponentials, running maxima and sums, score gradients.
//!
//! Written as plain loops that LLVM vectorises and compiled once for each instruction set; `Level`
//! picks at run time. They know tiles and rows of scores, not sequences, heads or masks beyond "how
//! many of this row".

use std::f32::consts::{LN_2, LOG2_E};

/// The widest instruction set that this machine has of those the loops are compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    /// What the target always has (SSE2 on x86-64, NEON on AArch64).
    Baseline,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    #[cfg(target_arch = "x86_64")]
    Avx512,
}

impl Level {
    pub fn detect() -> Level {
        #[cfg(target_arch = "x86_64")]
        {
            if is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("fma") {
                return Level::Avx512;
            }
            if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
                return Level::Avx2;
            }
        }
        Level::Baseline
    }
}

/// Defines `fn name(level, arguments…)` whose body is compiled once per level. In the body the
/// constant `FMA` says whether a fused multiply-add is one instruction.
macro_rules! vectorized {
    ($($(#[$doc:meta])* pub fn $name:ident($($arg:ident: $type:ty),* $(,)?) $body:block)*) => {$(
        $(#[$doc])*
        pub fn $name(level: $crate::cpu::vector::Level, $($arg: $type),*) {
            use $crate::cpu::vector::Level;

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

/// 2^f - 1 = f times this, for f in [-1/2, 1/2]: a minimax polynomial, relative error of 2^f 2e-9
/// before rounding.
#[inline(always)]
fn exp2_slope<const FMA: bool>(f: f32) -> f32 {
    let mut p = 0.000_153_533_62;
    p = multiply_add::<FMA>(p, f, 0.001_339_887_4);
    p = multiply_add::<FMA>(p, f, 0.009_618_437);
    p = multiply_add::<FMA>(p, f, 0.055_503_325);
    p = multiply_add::<FMA>(p, f, 0.240_226_48);
    multiply_add::<FMA>(p, f, LN_2)
}

/// Adding 1.5 * 2^23 rounds to the nearest integer, which then stands in the low mantissa bits.
const ROUND: f32 = 12_582_912.0;

/// 2^x within 1 ulp (1.25 without FMA), down to the denormals; 2^-inf = 0, 2^NaN = NaN, too large
/// an x gives inf.
#[inline(always)]
fn exp2<const FMA: bool>(x: f32) -> f32 {
    // Beyond these the result is 0 or inf anyway. Written as selects, which keep a NaN, unlike
    // f32::clamp's min/max.
    let x = if x < -151.0 { -151.0 } else { x };
    let x = if x > 129.0 { 129.0 } else { x };
    let rounded = x + ROUND;
    let n = (rounded.to_bits() as i32).wrapping_sub(ROUND.to_bits() as i32);
    let f = x - (rounded - ROUND);
    let p = multiply_add::<FMA>(exp2_slope::<FMA>(f), f, 1.0);
    // 2^n in two factors, since neither 2^-151 nor 2^129 is a float: p * 2^(n/2) is exact, the last
    // product rounds.
    let half = n >> 1;
    let power = |n: i32| f32::from_bits((n.wrapping_add(127) << 23) as u32);
    p * power(half) * power(n.wrapping_sub(half))
}

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

/// Rows of a tile that are worked on together: one AVX-512 register.
pub const LANES: usize = 16;

vectorized! {
    /// One step of the online softmax over `keys` columns of base-2 scores, element (row, key) at
    /// `key * pitch + row`.
    ///
    /// Scores become weights 2^(score - row_max). `row_max` and `row_sum` are updated, and
    /// `rescale` receives the factor of the sums and products of earlier tiles. All lengths are
    /// multiples of `LANES`.
    pub fn softmax_step(
        scores: &mut [f32],
        pitch: usize,
        keys: usize,
        row_max: &mut [f32],
        row_sum: &mut [f32],
        rescale: &mut [f32],
    ) {
        for row in (0..row_max.len()).step_by(LANES) {
            let lanes = |values: &[f32]| -> [f32; LANES] { values[row..row + LANES].try_into().expect("LANES long") };
            let old_max = lanes(row_max);
            let mut max = old_max;
            for key in 0..keys {
                let scores = &scores[key * pitch + row..][..LANES];
                // A NaN score is no maximum; it reaches the sum through its own weight.
                (0..LANES).for_each(|l| max[l] = if scores[l] > max[l] { scores[l] } else { max[l] });
            }
            // In a row that has seen only -inf, any finite reference makes the weights 0 and not
            // NaN.
            let reference = max.map(|max| if max == f32::NEG_INFINITY { 0.0 } else { max });
            let mut sum = [0.0; LANES];
            for key in 0..keys {
                let scores = &mut scores[key * pitch + row..][..LANES];
                for l in 0..LANES {
                    let weight = exp2::<FMA>(scores[l] - reference[l]);
                    scores[l] = weight;
                    sum[l] += weight;
                }
            }
            let old_sum = lanes(row_sum);
            for l in 0..LANES {
                let factor = exp2::<FMA>(old_max[l] - reference[l]);
                rescale[row + l] = factor;
                row_sum[row + l] = multiply_add::<FMA>(old_sum[l], factor, sum[l]);
                row_max[row + l] = max[l];
            }
        }
    }

    /// Multiplies every column of `pitch` elements of `tile` with `factors`, element by element.
    pub fn scale_rows(tile: &mut [f32], pitch: usize, factors: &[f32]) {
        for column in tile.chunks_exact_mut(pitch) {
            column.iter_mut().zip(factors).for_each(|(x, factor)| *x *= factor);
        }
    }

    /// Element-wise product, for the dropout multipliers.
    pub fn multiply_in_place(x: &mut [f32], factors: &[f32]) {
        x.iter_mut().zip(factors).for_each(|(x, factor)| *x *= factor);
    }

    /// One row of the backward pass: base-2 scores become weights 2^(score - lse_log2), and the
    /// gradients of the weights become those of the scores, weight * (gradient - delta). `lse_log2`
    /// is `in_two_parts`.
    pub fn score_gradients(scores: &mut [f32], gradients: &mut [f32], lse_log2: [f32; 2], delta: f32) {
        let [lse, lse_rest] = lse_log2;
        for (score, gradient) in scores.iter_mut().zip(gradients) {
            let weight = exp2::<FMA>(*score - lse - lse_rest);
            *score = weight;
            *gradient = weight * (*gradient - delta);
        }
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

    /// `sums[i] = a[i, :] . b[i, :]` for rows of `pitch` elements.
    pub fn row_dots(a: &[f32], b: &[f32], pitch: usize, sums: &mut [f32]) {
        for ((a, b), sum) in a.chunks_exact(pitch).zip(b.chunks_exact(pitch)).zip(sums) {
            let mut lanes = [0.0; LANES];
            let (whole_a, rest_a) = a.as_chunks::<LANES>();
            let (whole_b, rest_b) = b.as_chunks::<LANES>();
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
    use super::*;

    vectorized! {
        pub fn exp2_in_place(x: &mut [f32]) {
            x.iter_mut().for_each(|x| *x = exp2::<FMA>(*x));
        }
    }

    fn levels() -> Vec<Level> {
        let all = [
            Level::Baseline,
            #[cfg(target_arch = "x86_64")]
            Level::Avx2,
            #[cfg(target_arch = "x86_64")]
            Level::Avx512,
        ];
        all.into_iter().filter(|level| *level <= Level::detect()).collect()
    }

    /// Units in the last place of the fp32 nearest to `exact`.
    fn ulps(got: f32, exact: f64) -> f64 {
        let exponent = (exact.log2().floor() as i32).max(-126);
        (f64::from(got) - exact).abs() / 2f64.powi(exponent - 23)
    }

    #[test]
    fn exp2_is_within_about_one_ulp_at_every_level() {
        for level in levels() {
            // 4 million arguments over the whole range, denormal results included, evenly and
            // around zero.
            let arguments: Vec<f32> = (0..2_000_000)
                .map(|i| -149.0 + i as f32 * (276.9 / 2_000_000.0))
                .chain((0..2_000_000).map(|i| (i as f32 - 1e6) * 1e-6))
                .collect();
            let mut results = arguments.clone();
            exp2_in_place(level, &mut results);
            let worst = arguments.iter().zip(&results).map(|(x, y)| ulps(*y, f64::from(*x).exp2())).fold(0.0, f64::max);
            // Without fused multiply-adds each step of the polynomial rounds once more.
            let bound = if level == Level::Baseline { 1.25 } else { 1.0 };
            assert!(worst <= bound, "{level:?}: {worst} ulp");
        }
    }

    #[test]
    fn tanh_is_within_a_few_ulp_and_keeps_nan() {
        for level in levels() {
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

    #[test]
    fn exp2_is_exact_at_the_ends() {
        for level in levels() {
            let mut x = [f32::NEG_INFINITY, -1e30, -151.0, -126.0, -0.0, 0.0, 1.0, 127.0, 128.0, f32::INFINITY];
            exp2_in_place(level, &mut x);
            let inf = f32::INFINITY;
            assert_eq!(x, [0.0, 0.0, 0.0, f32::MIN_POSITIVE, 1.0, 1.0, 2.0, 2f32.powi(127), inf, inf], "{level:?}");
            let mut nan = [f32::NAN, -f32::NAN];
            exp2_in_place(level, &mut nan);
            assert!(nan.iter().all(|x| x.is_nan()), "{level:?}");
        }
    }

    #[test]
    fn softmax_in_two_steps_is_the_softmax_of_both() {
        let pitch = 2 * LANES;
        for level in levels() {
            let scores: Vec<f32> = (0..pitch * 5).map(|i| ((i * 7919) % 1009) as f32 / 50.0 - 10.0).collect();
            let (mut max, mut sum) = (vec![f32::NEG_INFINITY; pitch], vec![0.0; pitch]);
            let mut rescale = vec![0.0; pitch];
            let (mut first, mut second) = (scores[..2 * pitch].to_vec(), scores[2 * pitch..].to_vec());
            softmax_step(level, &mut first, pitch, 2, &mut max, &mut sum, &mut rescale);
            assert!(rescale.iter().all(|factor| *factor == 0.0), "nothing to keep before the first tile");
            softmax_step(level, &mut second, pitch, 3, &mut max, &mut sum, &mut rescale);
            for row in 0..pitch {
                let of_row = || (0..5).map(|key| f64::from(scores[key * pitch + row]));
                let top = of_row().fold(f64::NEG_INFINITY, f64::max);
                let total: f64 = of_row().map(|score| (score - top).exp2()).sum();
                assert_eq!(f64::from(max[row]), top);
                assert!((f64::from(sum[row]) / total - 1.0).abs() < 1e-6, "{level:?} row {row}");
                let weight = f64::from(first[row]) * f64::from(rescale[row]) / total;
                assert!((weight - (of_row().next().unwrap() - top).exp2() / total).abs() < 1e-6, "{level:?} row {row}");
            }
        }
    }

    #[test]
    fn a_nan_score_reaches_its_row_sum_and_no_other() {
        for level in levels() {
            let mut scores = vec![f32::NEG_INFINITY; LANES * 2];
            scores[LANES + 3] = f32::NAN;
            scores[5] = 1.0;
            let (mut max, mut sum) = ([f32::NEG_INFINITY; LANES], [0.0; LANES]);
            softmax_step(level, &mut scores, LANES, 2, &mut max, &mut sum, &mut [0.0; LANES]);
            for (row, sum) in sum.iter().enumerate() {
                match row {
                    3 => assert!(sum.is_nan()),
                    5 => assert_eq!(*sum, 1.0),
                    _ => assert_eq!(*sum, 0.0),
                }
            }
        }
    }
}
