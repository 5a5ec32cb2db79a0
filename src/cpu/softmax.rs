//! The exponentials of a tile: the forward pass's online softmax, and the backward pass's weights
//! and score gradients.
//!
//! They know tiles and rows of base-2 scores, not sequences, heads or masks.

use super::pairs::split_registers;
use super::simd::{Level, exp2_of_weight, larger, load, multiply_add, store};
use pulp::{Simd, WithSimd};

/// Chains of maxima and sums that run beside each other, to hide the latency of each.
const CHAINS: usize = 4;

/// One step of the online softmax over `keys` columns of base-2 scores, element (row, key) at `key
/// * pitch + row`.
///
/// Scores become weights 2^(score - row_max). `row_max` and `row_sum` are updated, and `rescale`
/// receives the factor of the sums and products of earlier tiles. The number of rows is a multiple
/// of `LANES`.
pub fn softmax_step(
    level: Level,
    scores: &mut [f32],
    pitch: usize,
    keys: usize,
    row_max: &mut [f32],
    row_sum: &mut [f32],
    rescale: &mut [f32],
) {
    run_step::<false>(level, scores, 1.0, pitch, keys, row_max, row_sum, rescale);
}

/// The same for scores and maxima that are not yet multiplied by `factor`, which is above 0: the
/// weights are 2^(factor * (score - row_max)). The weights of two keys become pairs in two parts,
/// as by `pairs::split_weights`. Behind an odd number of keys lies one more column, which is taken
/// as 0.
#[allow(clippy::too_many_arguments)] // a step, as above
pub fn softmax_step_in_pairs(
    level: Level,
    scores: &mut [f32],
    factor: f32,
    pitch: usize,
    keys: usize,
    row_max: &mut [f32],
    row_sum: &mut [f32],
    rescale: &mut [f32],
) {
    run_step::<true>(level, scores, factor, pitch, keys, row_max, row_sum, rescale);
}

#[allow(clippy::too_many_arguments)] // a step, as above
fn run_step<const IN_PAIRS: bool>(
    level: Level,
    scores: &mut [f32],
    factor: f32,
    pitch: usize,
    keys: usize,
    row_max: &mut [f32],
    row_sum: &mut [f32],
    rescale: &mut [f32],
) {
    let rows = row_max.len();
    assert!(rows.is_multiple_of(super::product::LANES) && rows == row_sum.len() && rows == rescale.len());
    let columns = if IN_PAIRS { keys.next_multiple_of(2) } else { keys };
    assert!(keys == 0 || (columns - 1) * pitch + rows <= scores.len(), "a step leaves its tile");
    level.run(Step::<IN_PAIRS> { scores, factor, pitch, keys, row_max, row_sum, rescale });
}

struct Step<'a, const IN_PAIRS: bool> {
    scores: &'a mut [f32],
    /// 1 unless the weights become pairs.
    factor: f32,
    pitch: usize,
    keys: usize,
    row_max: &'a mut [f32],
    row_sum: &'a mut [f32],
    rescale: &'a mut [f32],
}

impl<const IN_PAIRS: bool> WithSimd for Step<'_, IN_PAIRS> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let mut row = 0;
        while row < self.row_max.len() {
            let scores = self.scores.as_mut_ptr().wrapping_add(row);
            // SAFETY: `softmax_step` has checked that all columns lie in `scores` and that rows are
            // whole registers of the other slices; all four are borrowed exclusively.
            unsafe {
                let row_max = self.row_max.as_mut_ptr().add(row);
                let row_sum = self.row_sum.as_mut_ptr().add(row);
                let old_max = load(simd, row_max);
                let max = larger(simd, maximum(simd, scores, self.pitch, self.keys), old_max);
                // In a row that has seen only -inf, any finite reference makes the weights 0 and
                // not NaN.
                let reference = larger(simd, simd.splat_f32s(f32::MIN), max);
                let scale = [reference, simd.splat_f32s(self.factor)];
                let sum = weigh::<S, IN_PAIRS>(simd, scores, self.pitch, self.keys, scale);
                let factor = exp2_of_weight(simd, exponent::<S, IN_PAIRS>(simd, old_max, scale));
                store(simd, row_sum, multiply_add(simd, load(simd, row_sum), factor, sum));
                store(simd, row_max, max);
                store(simd, self.rescale.as_mut_ptr().add(row), factor);
            }
            row += S::F32_LANES;
        }
    }
}

/// The largest scores of a register of rows. A NaN score is no maximum; it reaches the sum through
/// its own weight.
///
/// # Safety
/// `keys` registers must lie at `scores`, `pitch` apart.
#[inline(always)]
unsafe fn maximum<S: Simd>(simd: S, scores: *const f32, pitch: usize, keys: usize) -> S::f32s {
    let mut maxima = [simd.splat_f32s(f32::NEG_INFINITY); CHAINS];
    let mut key = 0;
    // SAFETY: the caller's promise.
    unsafe {
        while key + CHAINS <= keys {
            for (chain, max) in maxima.iter_mut().enumerate() {
                *max = larger(simd, load(simd, scores.add((key + chain) * pitch)), *max);
            }
            key += CHAINS;
        }
        while key < keys {
            maxima[0] = larger(simd, load(simd, scores.add(key * pitch)), maxima[0]);
            key += 1;
        }
    }
    larger(simd, larger(simd, maxima[0], maxima[1]), larger(simd, maxima[2], maxima[3]))
}

/// Turns the scores of a register of rows into weights, or pairs of them, and returns their sum.
///
/// # Safety
/// `keys` registers must lie at `scores`, `pitch` apart, one more for an odd number of keys in
/// pairs, and nobody else may use them.
#[inline(always)]
unsafe fn weigh<S: Simd, const IN_PAIRS: bool>(
    simd: S,
    scores: *mut f32,
    pitch: usize,
    keys: usize,
    scale: [S::f32s; 2],
) -> S::f32s {
    let mut sums = [simd.splat_f32s(0.0); CHAINS];
    let mut key = 0;
    // SAFETY: the caller's promise.
    unsafe {
        while key + CHAINS <= keys {
            let mut weights = [simd.splat_f32s(0.0); CHAINS];
            for (chain, sum) in sums.iter_mut().enumerate() {
                let score = scores.add((key + chain) * pitch);
                let weight = exp2_of_weight(simd, exponent::<S, IN_PAIRS>(simd, load(simd, score), scale));
                *sum = simd.add_f32s(*sum, weight);
                if IN_PAIRS {
                    weights[chain] = weight;
                } else {
                    store(simd, score, weight);
                }
            }
            if IN_PAIRS {
                for (pair, two) in weights.as_chunks::<2>().0.iter().enumerate() {
                    let first = scores.add((key + 2 * pair) * pitch);
                    let [high, low] = split_registers(simd, *two);
                    store(simd, first, high);
                    store(simd, first.add(pitch), low);
                }
            }
            key += CHAINS;
        }
        let rest = key;
        while key < keys {
            let score = scores.add(key * pitch);
            let weight = exp2_of_weight(simd, exponent::<S, IN_PAIRS>(simd, load(simd, score), scale));
            store(simd, score, weight);
            // Its chain does not depend on the keys behind it, which a longer tile may hide.
            let sum = &mut sums[key % CHAINS];
            *sum = simd.add_f32s(*sum, weight);
            key += 1;
        }
        if IN_PAIRS {
            for key in (rest..keys).step_by(2) {
                let [first, second] = [scores.add(key * pitch), scores.add((key + 1) * pitch)];
                let of_second = if key + 1 < keys { load(simd, second) } else { simd.splat_f32s(0.0) };
                let [high, low] = split_registers(simd, [load(simd, first), of_second]);
                store(simd, first, high);
                store(simd, second, low);
            }
        }
    }
    simd.add_f32s(simd.add_f32s(sums[0], sums[1]), simd.add_f32s(sums[2], sums[3]))
}

/// The exponent of a score's weight.
#[inline(always)]
fn exponent<S: Simd, const IN_PAIRS: bool>(simd: S, score: S::f32s, [reference, factor]: [S::f32s; 2]) -> S::f32s {
    let above = simd.sub_f32s(score, reference);
    if IN_PAIRS { simd.mul_f32s(above, factor) } else { above }
}

/// The scores and weight gradients of some rows of the backward pass, element (row, key) at `row *
/// pitch + key`. Base-2 scores become weights 2^(score - LSE), and the gradients of the weights
/// those of the scores, weight * (gradient - delta).
pub struct ScoreGradients<'a> {
    pub scores: &'a mut [f32],
    pub gradients: &'a mut [f32],
    pub pitch: [usize; 2],
    pub keys: usize,
    /// Each row's LSE in base 2, in two parts.
    pub lse_log2: [&'a [f32]; 2],
    pub delta: &'a [f32],
}

impl ScoreGradients<'_> {
    pub fn run(self, level: Level) {
        let rows = self.delta.len();
        assert!(self.lse_log2.iter().all(|part| part.len() == rows));
        for (tile, pitch) in [(&self.scores, self.pitch[0]), (&self.gradients, self.pitch[1])] {
            assert!(rows == 0 || (rows - 1) * pitch + self.keys <= tile.len(), "a row leaves its tile");
        }
        level.run(self);
    }
}

impl WithSimd for ScoreGradients<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        for row in 0..self.delta.len() {
            let [high, low] = self.lse_log2;
            let row_of = [simd.splat_f32s(high[row]), simd.splat_f32s(low[row]), simd.splat_f32s(self.delta[row])];
            let scores = &mut self.scores[row * self.pitch[0]..][..self.keys];
            let gradients = &mut self.gradients[row * self.pitch[1]..][..self.keys];
            let (scores, scores_rest) = S::as_mut_simd_f32s(scores);
            let (gradients, gradients_rest) = S::as_mut_simd_f32s(gradients);
            for (score, gradient) in scores.iter_mut().zip(gradients) {
                (*score, *gradient) = score_gradient(simd, *score, *gradient, row_of);
            }
            if !scores_rest.is_empty() {
                let (score, gradient) = (simd.partial_load_f32s(scores_rest), simd.partial_load_f32s(gradients_rest));
                let (weight, gradient) = score_gradient(simd, score, gradient, row_of);
                simd.partial_store_f32s(scores_rest, weight);
                simd.partial_store_f32s(gradients_rest, gradient);
            }
        }
    }
}

/// A weight and the gradient of its score; the row's LSE is in two parts, and its delta is last.
#[inline(always)]
fn score_gradient<S: Simd>(simd: S, score: S::f32s, gradient: S::f32s, row: [S::f32s; 3]) -> (S::f32s, S::f32s) {
    let [lse, lse_rest, delta] = row;
    let x = simd.sub_f32s(simd.sub_f32s(score, lse), lse_rest);
    // From 128 on the weight is infinite. The select keeps a NaN.
    let top = simd.splat_f32s(128.0);
    let weight = exp2_of_weight(simd, simd.select_f32s(simd.greater_than_f32s(x, top), top, x));
    (weight, simd.mul_f32s(weight, simd.sub_f32s(gradient, delta)))
}

#[cfg(test)]
mod tests {
    use super::super::product::LANES;
    use super::*;

    #[test]
    fn softmax_in_two_steps_is_the_softmax_of_both() {
        let pitch = 2 * LANES;
        for level in Level::all() {
            let scores: Vec<f32> = (0..pitch * 11).map(|i| ((i * 7919) % 1009) as f32 / 50.0 - 10.0).collect();
            let (mut max, mut sum) = (vec![f32::NEG_INFINITY; pitch], vec![0.0; pitch]);
            let mut rescale = vec![0.0; pitch];
            let (mut first, mut second) = (scores[..6 * pitch].to_vec(), scores[6 * pitch..].to_vec());
            softmax_step(level, &mut first, pitch, 6, &mut max, &mut sum, &mut rescale);
            assert!(rescale.iter().all(|factor| *factor == 0.0), "nothing to keep before the first tile");
            softmax_step(level, &mut second, pitch, 5, &mut max, &mut sum, &mut rescale);
            for row in 0..pitch {
                let of_row = || (0..11).map(|key| f64::from(scores[key * pitch + row]));
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
    fn a_step_in_pairs_splits_the_weights_of_a_step() {
        let pitch = 2 * LANES;
        for level in Level::all() {
            // Factors that are powers of two round nothing.
            for (keys, factor) in (1..11).zip([1.0, 0.25, 4.0].into_iter().cycle()) {
                let mut weights: Vec<f32> = (0..pitch * 12).map(|i| ((i * 7919) % 1009) as f32 / 50.0 - 10.0).collect();
                let mut pairs: Vec<f32> = weights.iter().map(|score| score / factor).collect();
                let rows = || (vec![f32::NEG_INFINITY; pitch], vec![0.0; pitch], vec![0.0; pitch]);
                let ((mut max, mut sum, mut rescale), mut of_pairs) = (rows(), rows());
                softmax_step(level, &mut weights, pitch, keys, &mut max, &mut sum, &mut rescale);
                let (of_max, of_sum, of_rescale) = (&mut of_pairs.0, &mut of_pairs.1, &mut of_pairs.2);
                softmax_step_in_pairs(level, &mut pairs, factor, pitch, keys, of_max, of_sum, of_rescale);
                of_max.iter_mut().for_each(|max| *max *= factor);
                let columns = keys.next_multiple_of(2);
                weights[keys * pitch..columns * pitch].fill(0.0);
                crate::cpu::pairs::split_weights(level, &mut weights[..columns * pitch], pitch);
                let bits = |words: &[f32]| words.iter().map(|word| word.to_bits()).collect::<Vec<u32>>();
                assert_eq!(
                    bits(&pairs[..columns * pitch]),
                    bits(&weights[..columns * pitch]),
                    "{level:?}, {keys} keys"
                );
                assert_eq!((max, sum, rescale), of_pairs);
            }
        }
    }

    #[test]
    fn a_nan_score_reaches_its_row_sum_and_no_other() {
        for level in Level::all() {
            // Keys of every chain of the loop, and one behind them.
            for key in 0..5 {
                let mut scores = vec![f32::NEG_INFINITY; LANES * 5];
                scores[LANES * key + 3] = f32::NAN;
                scores[5] = 1.0;
                let (mut max, mut sum) = ([f32::NEG_INFINITY; LANES], [0.0; LANES]);
                softmax_step(level, &mut scores, LANES, 5, &mut max, &mut sum, &mut [0.0; LANES]);
                for (row, sum) in sum.iter().enumerate() {
                    match row {
                        3 => assert!(sum.is_nan(), "{level:?} key {key}"),
                        5 => assert_eq!(*sum, 1.0),
                        _ => assert_eq!(*sum, 0.0),
                    }
                }
            }
        }
    }

    #[test]
    fn score_gradients_are_those_of_the_softmax_in_rows_of_any_length() {
        for level in Level::all() {
            for keys in [1, 3, 15, 16, 17, 40] {
                let (rows, pitch) = (3, [keys + 2, keys + 1]);
                let value = |i: usize| ((i * 7919) % 1009) as f32 / 100.0 - 5.0;
                let mut scores: Vec<f32> = (0..rows * pitch[0]).map(value).collect();
                let mut gradients: Vec<f32> = (0..rows * pitch[1]).map(|i| value(i + 500)).collect();
                let (scores_in, gradients_in) = (scores.clone(), gradients.clone());
                let (lse, rest, delta) = ([5.0, f32::INFINITY, -2.0], [1e-8, 0.0, 0.0], [0.25, 0.0, 3.0]);
                let tile = ScoreGradients {
                    scores: &mut scores,
                    gradients: &mut gradients,
                    pitch,
                    keys,
                    lse_log2: [&lse, &rest],
                    delta: &delta,
                };
                tile.run(level);
                for (i, (got, before)) in scores.iter().zip(&scores_in).enumerate() {
                    let (row, key) = (i / pitch[0], i % pitch[0]);
                    let weight = (f64::from(*before) - f64::from(lse[row])).exp2();
                    let expected = if key < keys { weight } else { f64::from(*before) };
                    assert!(
                        (f64::from(*got) - expected).abs() <= 1e-6 * expected.abs(),
                        "{level:?} row {row} key {key}"
                    );
                }
                for (i, (got, before)) in gradients.iter().zip(&gradients_in).enumerate() {
                    let (row, key) = (i / pitch[1], i % pitch[1]);
                    let expected =
                        if key < keys { scores[row * pitch[0] + key] * (before - delta[row]) } else { *before };
                    assert_eq!(*got, expected, "{level:?} row {row} key {key}");
                }
            }
        }
    }

    #[test]
    fn a_weight_far_above_its_lse_is_infinite_and_nan_stays() {
        for level in Level::all() {
            let (mut scores, mut gradients) = ([1e4, f32::NAN, 0.0], [1.0; 3]);
            let tile = ScoreGradients {
                scores: &mut scores,
                gradients: &mut gradients,
                pitch: [3; 2],
                keys: 3,
                lse_log2: [&[0.0], &[0.0]],
                delta: &[0.0],
            };
            tile.run(level);
            assert_eq!((scores[0], scores[1].is_nan(), scores[2]), (f32::INFINITY, true, 1.0), "{level:?}");
            assert!(gradients[1].is_nan(), "{level:?}");
        }
    }
}
