//! The error rule judges every numeric result, for every dtype, pass and backend.
//!
//! Errors are measured against fp64. The yardstick is the error of the naive results, which plain
//! arithmetic in the dtype gives. A result may have twice the naive's largest error forward, three
//! times in gradients, and 1.5 times its mean error. Two kinds of unavoidable rounding are added:
//! one step of the output's dtype, and the rounding of fp32 sums whose terms cancel.

use flashtune::problem::{Dtype, Eight, Four};

/// How a tensor is judged.
#[derive(Clone, Copy, Debug)]
pub struct Rule {
    pub dtype: Dtype,
    /// Allowed multiple of the naive's largest error.
    pub factor: f64,
    /// Largest sum of magnitudes of an element's terms; 0 if nothing cancels.
    pub terms: f64,
    /// Error from rounded inputs, for a tensor with too few elements for the naive results to show
    /// all of it.
    pub input_rounding: f64,
    /// Whether fp32 products are split into two tf32, which keep 22 of the 24 mantissa bits.
    pub is_split: bool,
}

/// Allowed multiple of the naive's mean error.
const MEAN_FACTOR: f64 = 1.5;
/// Fewest elements whose mean error is judged by `MEAN_FACTOR`. Elements of a row share the error
/// of the row's weights and delta, so a mean over fewer depends on the luck of a few roundings. It
/// is then judged like the largest error.
const ENOUGH_FOR_A_MEAN: f64 = 512.0;
/// Allowed fp32 steps, at the terms' magnitude, for another order of the sum or another
/// exponential.
const FP32_STEPS: f64 = 4.0;
/// Error of splitting both factors of a product, relative to the largest element.
const SPLIT_ERROR: f64 = 4.768_371_582_031_25e-7; // 2^-21

/// Compares a result with the reference. The error names the element that is wrong.
pub fn compare(name: &str, got: &[f32], reference: &[f64], naive: &[f64], rule: Rule) -> Result<(), String> {
    if got.len() != reference.len() {
        return Err(format!("{name}: {} elements, expected {}", got.len(), reference.len()));
    }
    let (mut worst, mut worst_at, mut sum, mut count) = (0.0f64, 0, 0.0, 0);
    let (mut naive_worst, mut naive_sum, mut largest, mut total) = (0.0f64, 0.0, 0.0f64, 0.0);
    for (at, ((got, reference), naive)) in got.iter().zip(reference).zip(naive).enumerate() {
        if got.is_nan() != reference.is_nan() {
            return Err(format!("{name}[{at}] is {got}, the reference {reference}"));
        }
        if reference.is_nan() {
            continue;
        }
        if !reference.is_finite() || !got.is_finite() {
            // Beyond the dtype's range both must give the same infinity.
            if f64::from(*got) == *reference {
                continue;
            }
            return Err(format!("{name}[{at}] is {got}, the reference {reference}"));
        }
        let error = (f64::from(*got) - reference).abs();
        if error > worst {
            (worst, worst_at) = (error, at);
        }
        sum += error;
        count += 1;
        largest = largest.max(reference.abs());
        total += reference.abs();
        naive_worst = naive_worst.max((naive - reference).abs());
        naive_sum += (naive - reference).abs();
    }
    if count == 0 {
        return Ok(());
    }
    let count = f64::from(count);
    let split = if rule.is_split { SPLIT_ERROR * largest } else { 0.0 };
    let cancelled = FP32_STEPS * rule.terms * 2f64.powi(-24) + rule.input_rounding + split;
    let limit = rule.factor * naive_worst + step(rule.dtype, largest) + cancelled;
    if worst > limit {
        return Err(format!(
            "{name}[{worst_at}] is {}, the reference {}: off by {worst:.3e}, allowed {limit:.3e} (naive {naive_worst:.3e})",
            got[worst_at], reference[worst_at]
        ));
    }
    let mean_factor = if count < ENOUGH_FOR_A_MEAN { rule.factor } else { MEAN_FACTOR };
    let mean_limit = mean_factor * naive_sum / count + step(rule.dtype, total / count) + cancelled;
    if sum / count > mean_limit {
        return Err(format!(
            "{name}: mean error {:.3e}, allowed {mean_limit:.3e} (naive {:.3e})",
            sum / count,
            naive_sum / count
        ));
    }
    Ok(())
}

/// What a score may lose of the sum of its products' magnitudes where `wgmma` multiplies 8 bits: it
/// cuts each product 13 bits behind the first bit of the sum or of the largest product.
pub const CUT_OF_EIGHT_BITS: f64 = 1.0 / 8192.0;

/// What a score may lose of the same sum where a kernel widens int4 K to bf16: half a step of each
/// number, which has 8 bits.
pub const ROUNDING_OF_WIDENED_INT4: f64 = 1.0 / 256.0;

/// Judges LSE, which is fp32 in every dtype and comes from exact products of the inputs, so the
/// naive results are no yardstick. What remains is fp32 rounding of the scores, an exponential and
/// a logarithm: 16 steps at the magnitude plus one. `score_terms` is the largest sum of magnitudes
/// behind a score, and `lost` the part of that sum that products may lose.
pub fn compare_lse(got: &[f32], reference: &[f64], score_terms: f64, lost: f64) -> Result<(), String> {
    // Not 0 times an infinite score.
    let of_products = if lost > 0.0 { lost * score_terms } else { 0.0 };
    let limit = 16.0 * 2f64.powi(-24) * (1.0 + score_terms) + of_products;
    for (at, (got, reference)) in got.iter().zip(reference).enumerate() {
        let same = got.is_nan() == reference.is_nan()
            && (got.is_nan() || f64::from(*got) == *reference || (f64::from(*got) - reference).abs() <= limit);
        if !same {
            return Err(format!("lse[{at}] is {got}, the reference {reference}, allowed {limit:.3e}"));
        }
    }
    match got.len() == reference.len() {
        true => Ok(()),
        false => Err(format!("lse: {} elements, expected {}", got.len(), reference.len())),
    }
}

/// The distance between neighbouring numbers of the dtype at a magnitude.
pub fn step(dtype: Dtype, magnitude: f64) -> f64 {
    let (mantissa, smallest_exponent) = match dtype {
        Dtype::Fp16 => (10, -14),
        Dtype::Bf16 => (7, -126),
        Dtype::Fp32 => (23, -126),
    };
    let exponent = if magnitude > 0.0 { magnitude.log2().floor() as i32 } else { smallest_exponent };
    2f64.powi(exponent.max(smallest_exponent) - mantissa)
}

/// Compares two results that a law says are equal and that no reference judges. They may differ by
/// `steps` steps of the dtype, or of fp32 sums, at the magnitude of the largest element.
pub fn agree(name: &str, a: &[f32], b: &[f32], dtype: Dtype, steps: f64) {
    assert_eq!(a.len(), b.len(), "{name}");
    let largest = a.iter().map(|value| f64::from(value.abs())).fold(0.0, f64::max);
    // In fp32 every inner product and sum rounds at the scale of the output, so more steps are
    // allowed.
    let limit = if dtype == Dtype::Fp32 { 16.0 } else { 1.0 } * steps * step(dtype, largest);
    for (at, (a, b)) in a.iter().zip(b).enumerate() {
        assert!(a == b || f64::from((a - b).abs()) <= limit, "{name}[{at}]: {a} and {b}, allowed {limit:.3e}");
    }
}

/// The bounds of what quantising k and v costs on normal values: the format, the keys that share a
/// scale, and the largest ‖out − exact‖ / ‖exact‖. Scales are the largest magnitude over the
/// largest number of the format. Results on quantised numbers are judged by `compare` against fp64
/// on the same numbers; these bounds hold against fp64 on the numbers before.
pub const EIGHT_BIT_BOUNDS: [(Eight, i64, f64); 5] = [
    (Eight::E4m3, 0, 0.06),
    (Eight::E4m3, 1, 0.06),
    (Eight::E5m2, 0, 0.12),
    (Eight::Int8, 0, 0.025),
    (Eight::Int8, 1, 0.016),
];

/// The same for int4, whose rows have the scales and zeros of `Four::encode_row`.
pub const FOUR_BIT_BOUNDS: [(Four, f64); 2] = [(Four::Int4g32, 0.12), (Four::Int4g64, 0.14)];

/// ‖got − reference‖ / ‖reference‖
pub fn relative_error(got: &[f64], reference: &[f64]) -> f64 {
    let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|x| x * x).sum::<f64>().sqrt();
    norm(&mut got.iter().zip(reference).map(|(a, b)| a - b)) / norm(&mut reference.iter().copied())
}
