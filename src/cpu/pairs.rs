//! Products of bf16 pairs by tiles, and the layouts that they want: the counterpart of `product`
//! where the processor has AMX.
//!
//! A pair is two neighbours along the dimension that a product sums over, in one word of a tile.
//! Weights, which are fp32, become two bf16 numbers each.

use super::amx::{BLOCK, Configured, Sums, WORDS, Words};
use super::element::{Element, Head};
use super::product::{LANES, Matrix};
use super::simd::{Level, load, multiply_add, store};
use super::transpose;
use super::vector::vectorized;
use half::bf16;
use pulp::{Simd, WithSimd};
use std::ops::Range;

/// Keys of which a chunk of a product is made: 16 pairs. Chunks begin at multiples of it, so a
/// row's sums have one order.
pub const CHUNK: usize = 2 * WORDS;

/// Words of a row of so many numbers, in whole steps of a product.
pub fn words(numbers: usize) -> usize {
    numbers.div_ceil(CHUNK) * WORDS
}

/// What becomes of the output's old content and of the product.
#[derive(Clone, Copy)]
pub enum Into<'a> {
    /// out = factor * product
    Overwrite(f32),
    /// out = factor of the row * out + product
    Rescale(&'a [f32]),
}

/// `out = left * right` as `product::multiply`, with pairs in place of numbers. The left factor is
/// the sum of its parts. All three extents are multiples of 16, and the columns of `right` are
/// contiguous too.
#[allow(clippy::too_many_arguments)] // a product, as in `product`
pub fn multiply_pairs<const PARTS: usize>(
    unit: &Configured,
    level: Level,
    [m, n, pairs]: [usize; 3],
    out: &mut [f32],
    pitch: usize,
    into: Into,
    left: [Matrix; PARTS],
    right: Matrix,
) {
    if m == 0 || n == 0 {
        return;
    }
    assert!([m, n, pairs].iter().all(|extent| extent.is_multiple_of(WORDS)), "whole tiles");
    assert!((n - 1) * pitch + m <= out.len(), "a {m} x {n} product leaves its tile");
    if let Into::Rescale(factors) = into {
        assert!(m <= factors.len(), "a factor for each row");
    }
    let left = left.map(|part| part.words(m, pairs));
    let right = right.words(pairs, n);
    let mut sums = Sums([0.0; BLOCK * BLOCK]);
    let mut block = |i: usize, j: usize| {
        let [rows, columns] = [BLOCK.min(m - i), BLOCK.min(n - j)];
        let (tiles, right) = ([rows / LANES, columns / LANES], right.skip(j * right.pitch));
        // SAFETY: the factors have been checked to hold all pairs of m rows and n columns.
        unsafe { unit.multiply(tiles, pairs / WORDS, &left.map(|part| part.skip(i)), right, &mut sums) };
        let out = &mut out[j * pitch + i..];
        let into = match into {
            Into::Overwrite(_) => into,
            Into::Rescale(factors) => Into::Rescale(&factors[i..]),
        };
        level.run(Epilogue { sums: &sums, shape: [rows, columns], out, pitch, into });
    };
    // The factor that is walked in the inner loop is walked again and again: the smaller one.
    if m * PARTS <= n {
        (0..n).step_by(BLOCK).for_each(|j| (0..m).step_by(BLOCK).for_each(|i| block(i, j)));
    } else {
        (0..m).step_by(BLOCK).for_each(|i| (0..n).step_by(BLOCK).for_each(|j| block(i, j)));
    }
}

impl Words {
    fn skip(self, words: usize) -> Words {
        Words { data: self.data.wrapping_add(words), ..self }
    }
}

/// Moves the sums of a block into the output.
struct Epilogue<'a> {
    sums: &'a Sums,
    shape: [usize; 2],
    out: &'a mut [f32],
    pitch: usize,
    into: Into<'a>,
}

impl WithSimd for Epilogue<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let [rows, columns] = self.shape;
        assert!((columns - 1) * self.pitch + rows <= self.out.len());
        for column in 0..columns {
            let mut row = 0;
            while row < rows {
                // SAFETY: the block lies in the sums and in the output, as just checked, and has a
                // factor for each row.
                unsafe {
                    let sum = load(simd, self.sums.0.as_ptr().add(column * BLOCK + row));
                    let out = self.out.as_mut_ptr().add(column * self.pitch + row);
                    let value = match self.into {
                        Into::Overwrite(factor) => simd.mul_f32s(simd.splat_f32s(factor), sum),
                        Into::Rescale(factors) => {
                            multiply_add(simd, load(simd, factors.as_ptr().add(row)), load(simd, out), sum)
                        }
                    };
                    store(simd, out, value);
                }
                row += S::F32_LANES;
            }
        }
    }
}

vectorized! {
    /// Neighbours of a row become pairs.
    pub fn pair_neighbours(row: &[bf16], words: &mut [f32]) {
        let (pairs, last) = row.as_chunks::<2>();
        words.iter_mut().zip(pairs).for_each(|(word, [first, second])| *word = pair(*first, *second));
        if let [last] = last {
            words[pairs.len()] = pair(*last, bf16::ZERO);
        }
    }

    /// The numbers of two rows become pairs.
    pub fn pair_rows(first: &[bf16], second: &[bf16], words: &mut [f32]) {
        words.iter_mut().zip(first).zip(second).for_each(|((word, first), second)| *word = pair(*first, *second));
    }

    /// Weights of two keys, `pitch` rows each, become pairs: rounded to bf16 in the place of the
    /// first key, and what that leaves, rounded too, in that of the second. Together the two parts
    /// are off by 2^-17 of a weight at most.
    pub fn split_weights(weights: &mut [f32], pitch: usize) {
        for two in weights.chunks_exact_mut(2 * pitch) {
            let (first, second) = two.split_at_mut(pitch);
            for (first, second) in first.iter_mut().zip(second) {
                let [a, b] = [rounded(*first), rounded(*second)];
                let [rest_a, rest_b] = [rounded(*first - a), rounded(*second - b)];
                *first = f32::from_bits(a.to_bits() >> 16 | b.to_bits());
                *second = f32::from_bits(rest_a.to_bits() >> 16 | rest_b.to_bits());
            }
        }
    }
}

const UPPER: u32 = 0xffff_0000;

#[inline(always)]
fn pair(first: bf16, second: bf16) -> f32 {
    f32::from_bits(u32::from(first.to_bits()) | u32::from(second.to_bits()) << 16)
}

/// The nearest bf16, ties away from 0. A NaN that arithmetic made stays one.
#[inline(always)]
fn rounded(x: f32) -> f32 {
    f32::from_bits(x.to_bits().wrapping_add(0x8000) & UPPER)
}

impl<E: Element> Head<E> {
    /// A row of bf16.
    ///
    /// # Safety
    /// The row must lie in a live tensor that nobody writes meanwhile.
    unsafe fn brains<'a>(&self, position: usize) -> &'a [bf16] {
        // SAFETY: the caller's promise.
        E::as_brains(unsafe { self.row(position) }).expect("pairs are of bf16")
    }

    /// Rows of pairs, `pitch` words each: neighbours of a row. Words past the row and rows up to
    /// the next multiple of 16 become 0.
    ///
    /// # Safety
    /// The rows must lie in a live tensor that nobody writes meanwhile.
    pub unsafe fn pairs<'a>(&self, first: usize, rows: usize, tile: &'a mut [f32], pitch: usize) -> Matrix<'a> {
        let padded_rows = rows.next_multiple_of(LANES);
        for (row, words) in tile.chunks_exact_mut(pitch).take(padded_rows).enumerate() {
            // SAFETY: the caller's promise.
            let numbers = if row < rows { unsafe { self.brains(first + row) } } else { &[] };
            pair_neighbours(self.level(), numbers, words);
            words[numbers.len().div_ceil(2)..].fill(0.0);
        }
        Matrix::rows(tile, pitch)
    }

    /// The same transposed: pair p of a row at `p * pitch + row`, for `pairs` pairs. Rows from
    /// `rows` to `padded_rows`, a multiple of 4, become 0.
    ///
    /// # Safety
    /// The rows must lie in a live tensor that nobody writes meanwhile.
    pub unsafe fn load_pairs_transposed(
        &self,
        first: usize,
        rows: usize,
        padded_rows: usize,
        tile: &mut [f32],
        pairs: usize,
    ) {
        transposed(padded_rows, pairs, tile, padded_rows, |row, words| {
            // SAFETY: the caller's promise.
            let numbers = if row < rows { unsafe { self.brains(first + row) } } else { &[] };
            pair_neighbours(self.level(), numbers, words);
            words[numbers.len().div_ceil(2)..].fill(0.0);
        });
    }

    /// Pairs of neighbouring rows, transposed: (pair, c) at `c * pitch + pair`, for `columns`
    /// columns. `rows` count from `first`. Others and columns that are not there become 0.
    ///
    /// # Safety
    /// The rows must lie in a live tensor that nobody writes meanwhile.
    pub unsafe fn pairs_of_rows<'a>(
        &self,
        first: usize,
        rows: Range<usize>,
        tile: &'a mut [f32],
        columns: usize,
        pitch: usize,
    ) -> Matrix<'a> {
        transposed(words(rows.end), columns, tile, pitch, |pair, words| {
            // SAFETY: the caller's promise.
            let row = |row: usize| rows.contains(&row).then(|| unsafe { self.brains(first + row) });
            let used = match (row(2 * pair), row(2 * pair + 1)) {
                (Some(even), Some(odd)) => {
                    pair_rows(self.level(), even, odd, words);
                    even.len()
                }
                (Some(even), None) => {
                    words.iter_mut().zip(even).for_each(|(word, x)| *word = self::pair(*x, bf16::ZERO));
                    even.len()
                }
                (None, Some(odd)) => {
                    words.iter_mut().zip(odd).for_each(|(word, x)| *word = self::pair(bf16::ZERO, *x));
                    odd.len()
                }
                (None, None) => 0,
            };
            words[used..].fill(0.0);
        });
        Matrix::columns(tile, pitch)
    }
}

/// Writes the words of each row, which `fill` makes, as columns that are `pitch` apart: four rows
/// at a time. `rows` is a multiple of 4.
fn transposed(rows: usize, columns: usize, tile: &mut [f32], pitch: usize, fill: impl Fn(usize, &mut [f32])) {
    const MOST_COLUMNS: usize = 512;
    let mut four = [[0.0; MOST_COLUMNS]; 4];
    for at in (0..rows).step_by(4) {
        for (row, words) in four.iter_mut().enumerate() {
            fill(at + row, &mut words[..columns]);
        }
        transpose::from_rows(four.each_ref().map(|words| &words[..columns]), &mut tile[at..], pitch);
    }
}

#[cfg(test)]
mod tests {
    use super::super::amx::TileUnit;
    use super::*;

    /// Numbers of a matrix as pairs along its rows, and the bits of the numbers.
    fn random_words(count: usize, seed: u64, numbers: impl Fn(u64) -> bf16) -> Vec<f32> {
        let mut state = seed;
        let mut next = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            numbers(state >> 33)
        };
        (0..count).map(|_| pair(next(), next())).collect()
    }

    fn small_integer(random: u64) -> bf16 {
        bf16::from_f32((random % 17) as f32 - 8.0)
    }

    fn numbers(word: f32) -> [f32; 2] {
        [word.to_bits() << 16, word.to_bits() & UPPER].map(f32::from_bits)
    }

    /// A product of left factors (i, pair) at `pair * m + i` and a right one (pair, j) at `j *
    /// pairs + pair`.
    fn product(
        unit: TileUnit,
        [m, n, pairs]: [usize; 3],
        into: Into,
        out: &mut [f32],
        left: [&[f32]; 2],
        right: &[f32],
    ) {
        let left = left.map(|part| Matrix::columns(part, m));
        let level = Level::detect();
        multiply_pairs(&unit.configure(), level, [m, n, pairs], out, m + 3, into, left, Matrix::columns(right, pairs));
    }

    #[test]
    fn every_shape_of_product_is_exact_on_integers() {
        for (m, n, pairs) in [(16, 16, 16), (32, 48, 16), (48, 16, 32), (64, 80, 48), (16, 96, 16)] {
            let of_integers = |words, seed| random_words(words, seed, small_integer);
            let (high, low, right) = (of_integers(m * pairs, 1), of_integers(m * pairs, 2), of_integers(n * pairs, 3));
            let factors: Vec<f32> = (0..m).map(|i| i as f32).collect();
            for into in [Into::Overwrite(0.5), Into::Rescale(&factors)] {
                let mut out = vec![1.0; n * (m + 3)];
                product(TileUnit::Emulated, [m, n, pairs], into, &mut out, [&high, &low], &right);
                for (at, got) in out.iter().enumerate() {
                    let (i, j) = (at % (m + 3), at / (m + 3));
                    let term = |part: &[f32], p: usize| {
                        let ([a0, a1], [b0, b1]) = (numbers(part[p * m + i]), numbers(right[j * pairs + p]));
                        a0 * b0 + a1 * b1
                    };
                    let sum = || (0..pairs).map(|p| term(&high, p) + term(&low, p)).sum::<f32>();
                    let expected = match into {
                        _ if i >= m => 1.0,
                        Into::Overwrite(factor) => factor * sum(),
                        Into::Rescale(factors) => factors[i] + sum(),
                    };
                    assert_eq!(*got, expected, "{m} x {n} x {pairs}, row {i} column {j}");
                }
            }
        }
    }

    #[test]
    fn amx_has_the_bits_of_its_emulation() {
        let Some(amx) = TileUnit::detect() else {
            return eprintln!("skipped: this processor or system has no AMX for bf16");
        };
        // From 2^-47 to 2^48, either sign.
        let of_any_size =
            |random: u64| bf16::from_bits((random % 0x3000 + 0x2800) as u16 | (random >> 8) as u16 & 0x8000);
        let near_one = |random: u64| bf16::from_f32((random % 4001) as f32 / 1000.0 - 2.0);
        let kinds: [(&str, &dyn Fn(u64) -> bf16); 2] = [("near 1", &near_one), ("of any size", &of_any_size)];
        for ((name, kind), seed) in kinds.into_iter().zip(1..) {
            for shape @ [m, n, pairs] in [[16, 16, 16], [64, 256, 64], [48, 80, 128]] {
                let (high, low) = (random_words(m * pairs, seed, kind), random_words(m * pairs, seed + 9, kind));
                let right = random_words(n * pairs, seed + 99, kind);
                let [got, expected] = [amx, TileUnit::Emulated].map(|unit| {
                    let mut out = vec![0.0; n * (m + 3)];
                    product(unit, shape, Into::Overwrite(1.0), &mut out, [&high, &low], &right);
                    out
                });
                for (at, (got, expected)) in got.iter().zip(&expected).enumerate() {
                    assert_eq!(got.to_bits(), expected.to_bits(), "numbers {name}, {shape:?}, element {at}");
                }
            }
        }
    }

    #[test]
    fn two_parts_of_a_weight_are_off_by_little() {
        let pitch = 32;
        let weights: Vec<f32> = (0..4 * pitch).map(|i| 1.0 / (1.0 + 0.37 * i as f32)).collect();
        for level in Level::all() {
            let mut words = weights.clone();
            split_weights(level, &mut words, pitch);
            for (at, weight) in weights.iter().enumerate() {
                let (key, row) = (at / pitch, at % pitch);
                let of_part = |part: usize| numbers(words[(key / 2 * 2 + part) * pitch + row])[key % 2];
                let error = f64::from(of_part(0)) + f64::from(of_part(1)) - f64::from(*weight);
                assert!(error.abs() <= 2f64.powi(-17) * f64::from(*weight), "{level:?}: {weight}, off by {error:e}");
                assert!((of_part(0) / weight - 1.0).abs() <= 2f32.powi(-8), "{level:?}: {weight}");
            }
            let mut nan = [f32::NAN, 1.0, 0.5, -f32::NAN];
            split_weights(level, &mut nan, 2);
            assert!([numbers(nan[0])[0], numbers(nan[1])[1]].iter().all(|x| x.is_nan()), "{level:?}");
        }
    }
}
