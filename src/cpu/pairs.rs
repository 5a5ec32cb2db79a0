//! Products of bf16 pairs by tiles, and the layouts that they want: the counterpart of `product`
//! where the processor has AMX.
//!
//! A pair is two neighbours along the dimension that a product sums over, in one word of a tile.
//! Weights and score gradients, which are fp32, become two bf16 numbers each.

use super::amx::{BLOCK, Configured, Sums, Words};
use super::element::{Element, Head};
use super::product::{LANES, Matrix};
use super::simd::{Level, load, multiply_add, store};
use super::tile::MAX_BLOCK;
use super::transpose;
use super::vector::vectorized;
pub use crate::family::cpu::scratch::{CHUNK, WORDS, words};
use half::bf16;
use pulp::{Simd, WithSimd};
use std::ops::Range;

/// What becomes of the output's old content and of the product.
#[derive(Clone, Copy)]
pub enum Into<'a> {
    /// out = factor * product
    Overwrite(f32),
    /// out = out + product
    Add,
    /// out = factor of the row * out + product
    Rescale(&'a [f32]),
}

/// `out = left * right` as `product::multiply`, with pairs in place of numbers. Each factor is the
/// sum of its parts. `m` and `pairs` are multiples of 16. The columns of right parts are contiguous
/// too, and are read up to a multiple of 16 columns.
#[allow(clippy::too_many_arguments)] // a product, as in `product`
pub fn multiply_pairs<const L: usize, const R: usize>(
    unit: &Configured,
    level: Level,
    [m, n, pairs]: [usize; 3],
    out: &mut [f32],
    pitch: usize,
    into: Into,
    left: [Matrix; L],
    right: [Matrix; R],
) {
    if m == 0 || n == 0 {
        return;
    }
    assert!([m, pairs].iter().all(|extent| extent.is_multiple_of(WORDS)), "whole tiles");
    assert!((n - 1) * pitch + m <= out.len(), "a {m} x {n} product leaves its tile");
    if let Into::Rescale(factors) = into {
        assert!(m <= factors.len(), "a factor for each row");
    }
    let left = left.map(|part| part.words(m, pairs));
    let right = right.map(|part| part.words(pairs, n.next_multiple_of(LANES)));
    let mut room = Room([0.0; BLOCK * BLOCK]);
    let mut block = |i: usize, j: usize| {
        let [rows, columns] = [BLOCK.min(m - i), BLOCK.min(n - j)];
        let (left, right) = (left.map(|part| part.skip(i)), right.map(|part| part.skip(j * part.pitch)));
        let tiles = [rows, columns].map(|extent| extent.div_ceil(LANES));
        let multiply = |sums: Sums| {
            // SAFETY: the factors have been checked to hold all pairs of m rows and n columns, the
            // latter in whole tiles. The sums have room for a block, or are the output's and in
            // whole tiles.
            unsafe { unit.multiply(tiles, pairs / WORDS, &left, &right, sums) };
        };
        let out = &mut out[j * pitch + i..];
        let in_place = match into {
            Into::Add => Some(true),
            Into::Overwrite(1.0) => Some(false),
            _ => None,
        };
        if let Some(are_begun) = in_place.filter(|_| columns.is_multiple_of(LANES)) {
            return multiply(Sums { data: out.as_mut_ptr(), pitch, are_begun });
        }
        multiply(Sums { data: room.0.as_mut_ptr(), pitch: BLOCK, are_begun: false });
        let into = match into {
            Into::Rescale(factors) => Into::Rescale(&factors[i..]),
            _ => into,
        };
        level.run(Epilogue { sums: &room.0, shape: [rows, columns], out, pitch, into });
    };
    // The factor that is walked in the inner loop is walked again and again: the smaller one.
    if m * L <= n * R {
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

/// Room for the sums of a block.
#[repr(align(64))]
struct Room([f32; BLOCK * BLOCK]);

/// Moves the sums of a block into the output.
struct Epilogue<'a> {
    sums: &'a [f32; BLOCK * BLOCK],
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
                    let sum = load(simd, self.sums.as_ptr().add(column * BLOCK + row));
                    let out = self.out.as_mut_ptr().add(column * self.pitch + row);
                    let value = match self.into {
                        Into::Overwrite(factor) => simd.mul_f32s(simd.splat_f32s(factor), sum),
                        Into::Add => simd.add_f32s(load(simd, out), sum),
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

    /// Weights of two keys, `pitch` rows each, become pairs in two parts: the first in the place of
    /// the first key, and the second in that of the second.
    pub fn split_weights(weights: &mut [f32], pitch: usize) {
        for two in weights.chunks_exact_mut(2 * pitch) {
            let (first, second) = two.split_at_mut(pitch);
            for (first, second) in first.iter_mut().zip(second) {
                [*first, *second] = split([*first, *second]);
            }
        }
    }

    /// The same for two rows of another tile.
    pub fn split_rows(rows: [&[f32]; 2], parts: [&mut [f32]; 2]) {
        let ([first, second], [high, low]) = (rows, parts);
        for (((a, b), high), low) in first.iter().zip(second).zip(high).zip(low) {
            [*high, *low] = split([*a, *b]);
        }
    }

    /// Neighbours of each row, `numbers` of `pitch`, become pairs in two parts: the first in the
    /// first half of these numbers, and the second in the second half.
    pub fn split_neighbours(tile: &mut [f32], pitch: usize, numbers: usize) {
        let mut lows = [0.0; MAX_BLOCK as usize / 2];
        let words = numbers / 2;
        for row in tile.chunks_exact_mut(pitch) {
            for chunk in (0..numbers).step_by(CHUNK) {
                let mut numbers = [0.0; CHUNK];
                numbers.copy_from_slice(&row[chunk..chunk + CHUNK]);
                let (highs, lows) = (&mut row[chunk / 2..][..WORDS], &mut lows[chunk / 2..][..WORDS]);
                for ((high, low), two) in highs.iter_mut().zip(lows).zip(numbers.as_chunks::<2>().0) {
                    [*high, *low] = split(*two);
                }
            }
            row[words..numbers].copy_from_slice(&lows[..words]);
        }
    }
}

const UPPER: u32 = 0xffff_0000;

#[inline(always)]
fn pair(first: bf16, second: bf16) -> f32 {
    f32::from_bits(u32::from(first.to_bits()) | u32::from(second.to_bits()) << 16)
}

/// Two numbers as a pair in two parts: the nearest bf16, and the nearest one to the rest. Together
/// the parts are off by 2^-17 of a number at most. The rest of an infinity and of a NaN is 0.
#[inline(always)]
fn split(two: [f32; 2]) -> [f32; 2] {
    let [a, b] = two;
    let (high_a, high_b) = (rounded(a), rounded(b));
    let (low_a, low_b) = (rounded(rest(a, high_a)), rounded(rest(b, high_b)));
    let word = |first: f32, second: f32| f32::from_bits(first.to_bits() >> 16 | second.to_bits());
    [word(high_a, high_b), word(low_a, low_b)]
}

/// The same of registers of weights from 0 to 1. A NaN may be lost.
#[inline(always)]
pub fn split_registers<S: Simd>(simd: S, two: [S::f32s; 2]) -> [S::f32s; 2] {
    let [a, b] = two;
    let (high_a, high_b) = (rounded_register(simd, a), rounded_register(simd, b));
    let low_a = rounded_register(simd, simd.sub_f32s(a, simd.transmute_f32s_u32s(high_a)));
    let low_b = rounded_register(simd, simd.sub_f32s(b, simd.transmute_f32s_u32s(high_b)));
    [word_of_registers(simd, high_a, high_b), word_of_registers(simd, low_a, low_b)]
}

#[inline(always)]
fn rounded_register<S: Simd>(simd: S, x: S::f32s) -> S::u32s {
    let bits = simd.add_u32s(simd.transmute_u32s_f32s(x), simd.splat_u32s(0x8000));
    simd.and_u32s(bits, simd.splat_u32s(UPPER))
}

#[inline(always)]
fn word_of_registers<S: Simd>(simd: S, first: S::u32s, second: S::u32s) -> S::f32s {
    let first = simd.wrapping_dyn_shr_u32s(first, simd.splat_u32s(16));
    simd.transmute_f32s_u32s(simd.or_u32s(first, second))
}

#[inline(always)]
fn rest(x: f32, high: f32) -> f32 {
    if high.is_finite() { x - high } else { 0.0 }
}

/// The nearest bf16, ties away from 0.
#[inline(always)]
fn rounded(x: f32) -> f32 {
    const QUIET: u32 = 0x0040_0000;
    let bits = x.to_bits();
    // Rounding could carry a NaN to an infinity or to 0.
    f32::from_bits(if x.is_nan() { bits | QUIET } else { bits.wrapping_add(0x8000) } & UPPER)
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

    /// Pairs of neighbouring rows: (pair, c) at `pair * pitch + c`. Rows and columns that are not
    /// there become 0.
    ///
    /// # Safety
    /// The rows must lie in a live tensor that nobody writes meanwhile.
    pub unsafe fn pairs_of_rows<'a>(&self, first: usize, rows: usize, tile: &'a mut [f32], pitch: usize) -> Matrix<'a> {
        for (pair, into) in tile.chunks_exact_mut(pitch).take(words(rows)).enumerate() {
            // SAFETY: the caller's promise.
            unsafe { self.pair_of_rows(first, 0..rows, pair, into) };
        }
        Matrix::rows(tile, pitch)
    }

    /// The same transposed, (pair, c) at `c * pitch + pair`, for `columns` columns. `rows` count
    /// from `first`; others and columns that are not there become 0.
    ///
    /// # Safety
    /// The rows must lie in a live tensor that nobody writes meanwhile.
    pub unsafe fn pairs_of_rows_transposed<'a>(
        &self,
        first: usize,
        rows: Range<usize>,
        tile: &'a mut [f32],
        columns: usize,
        pitch: usize,
    ) -> Matrix<'a> {
        transposed(words(rows.end), columns, tile, pitch, |pair, words| {
            // SAFETY: the caller's promise.
            unsafe { self.pair_of_rows(first, rows.clone(), pair, words) };
        });
        Matrix::columns(tile, pitch)
    }

    /// A pair of the `rows`, which count from `first`.
    ///
    /// # Safety
    /// The rows must lie in a live tensor that nobody writes meanwhile.
    unsafe fn pair_of_rows(&self, first: usize, rows: Range<usize>, pair: usize, words: &mut [f32]) {
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

    /// A product of left parts (i, pair) at `pair * m + i` and right ones (pair, j) at `j * pairs +
    /// pair`.
    fn product<const L: usize, const R: usize>(
        unit: TileUnit,
        [m, n, pairs]: [usize; 3],
        into: Into,
        out: &mut [f32],
        left: [&[f32]; L],
        right: [&[f32]; R],
    ) {
        let left = left.map(|part| Matrix::columns(part, m));
        let (level, right) = (Level::detect(), right.map(|part| Matrix::columns(part, pairs)));
        let (unit, shape) = (unit.configure(), [m, n, pairs]);
        multiply_pairs(&unit, level, shape, out, m + 3, into, left, right);
    }

    #[test]
    fn every_shape_of_product_is_exact_on_integers() {
        for (m, n, pairs) in [(16, 16usize, 16), (32, 48, 16), (48, 19, 32), (64, 80, 48), (16, 96, 16), (32, 45, 16)] {
            let columns = n.next_multiple_of(LANES);
            let of_integers = |words, seed| random_words(words, seed, small_integer);
            let left = [1, 2].map(|seed| of_integers(m * pairs, seed));
            let right = [3, 4].map(|seed| of_integers(columns * pairs, seed));
            let factors: Vec<f32> = (0..m).map(|i| i as f32).collect();
            for into in [Into::Overwrite(0.5), Into::Overwrite(1.0), Into::Add, Into::Rescale(&factors)] {
                let mut outs = [(); 2].map(|()| vec![1.0; (n - 1) * (m + 3) + m]);
                product(
                    TileUnit::Emulated,
                    [m, n, pairs],
                    into,
                    &mut outs[0],
                    left.each_ref().map(|x| &x[..]),
                    [&right[0]],
                );
                product(
                    TileUnit::Emulated,
                    [m, n, pairs],
                    into,
                    &mut outs[1],
                    [&left[0]],
                    right.each_ref().map(|x| &x[..]),
                );
                for (of_right, out) in outs.iter().enumerate() {
                    for (at, got) in out.iter().enumerate() {
                        let (i, j) = (at % (m + 3), at / (m + 3));
                        let term = |part: [usize; 2], p: usize| {
                            let [left, right] = [left[part[0]][p * m + i], right[part[1]][j * pairs + p]].map(numbers);
                            left[0] * right[0] + left[1] * right[1]
                        };
                        let second = if of_right == 1 { [0, 1] } else { [1, 0] };
                        let sum = || (0..pairs).map(|p| term([0, 0], p) + term(second, p)).sum::<f32>();
                        let expected = match into {
                            _ if i >= m => 1.0,
                            Into::Overwrite(factor) => factor * sum(),
                            Into::Add => 1.0 + sum(),
                            Into::Rescale(factors) => factors[i] + sum(),
                        };
                        assert_eq!(*got, expected, "{m} x {n} x {pairs}, row {i} column {j}, two parts {second:?}");
                    }
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
        // With larger numbers beside them, sums could overflow, which is not emulated.
        let special = |random: u64| match random % 101 {
            at @ 0..4 => [bf16::NAN, bf16::INFINITY, bf16::NEG_INFINITY, bf16::from_bits(0x7f)][at as usize],
            _ => near_one(random >> 8),
        };
        let kinds: [(&str, &dyn Fn(u64) -> bf16); 3] =
            [("near 1", &near_one), ("of any size", &of_any_size), ("special", &special)];
        for ((name, kind), seed) in kinds.into_iter().zip(1..) {
            for shape @ [m, n, pairs] in [[16, 16, 16], [64, 256, 64], [48, 83, 128]] {
                let words = |count, seed| random_words(count, seed, kind);
                let (high, low) = (words(m * pairs, seed), words(m * pairs, seed + 9));
                let right = words(n.next_multiple_of(LANES) * pairs, seed + 99);
                for into in [Into::Overwrite(1.0), Into::Add] {
                    let [got, expected] = [amx, TileUnit::Emulated].map(|unit| {
                        let mut out = vec![3.0; n * (m + 3)];
                        product(unit, shape, into, &mut out, [&high, &low], [&right]);
                        out
                    });
                    for (at, (got, expected)) in got.iter().zip(&expected).enumerate() {
                        let same = got.to_bits() == expected.to_bits() || got.is_nan() && expected.is_nan();
                        assert!(same, "numbers {name}, {shape:?}, element {at}: {got:e}, expected {expected:e}");
                    }
                }
            }
        }
    }

    #[test]
    fn parts_of_what_is_not_finite_are_it_and_0() {
        // NaN as a GPU makes it, whose rounding would be 0, and one whose rounding would be inf.
        let [of_gpu, small] = [0x7fff_ffff, 0x7f80_0001].map(f32::from_bits);
        let numbers_of = |words: &[f32]| words.iter().flat_map(|word| numbers(*word)).collect::<Vec<f32>>();
        for level in Level::all() {
            let mut words = [of_gpu, f32::INFINITY, -small, f32::NEG_INFINITY];
            split_weights(level, &mut words, 2);
            let parts = numbers_of(&words);
            assert!(parts[0].is_nan() && parts[1].is_nan(), "{level:?}: {parts:?}");
            assert_eq!(parts[2..4], [f32::INFINITY, f32::NEG_INFINITY], "{level:?}");
            assert_eq!(parts[4..], [0.0; 4], "{level:?}");
        }
    }

    #[test]
    fn rows_and_neighbours_are_split_as_weights_are() {
        let (rows, pitch, numbers) = (3, 80, 64);
        let tile: Vec<f32> = (0..rows * pitch).map(|i| 1.0 / (1.0 + 0.37 * i as f32)).collect();
        for level in Level::all() {
            let mut neighbours = tile.clone();
            split_neighbours(level, &mut neighbours, pitch, numbers);
            for (row, before) in neighbours.chunks_exact(pitch).zip(tile.chunks_exact(pitch)) {
                for (word, two) in before[..numbers].as_chunks::<2>().0.iter().enumerate() {
                    let mut parts = *two;
                    split_weights(level, &mut parts, 1);
                    assert_eq!([row[word], row[numbers / 2 + word]].map(f32::to_bits), parts.map(f32::to_bits));
                }
                assert_eq!(row[numbers..], before[numbers..]);
            }
            let [mut high, mut low] = [[0.0; 64]; 2];
            split_rows(level, [&tile[..64], &tile[pitch..][..64]], [&mut high, &mut low]);
            let mut expected = [&tile[..64], &tile[pitch..][..64]].concat();
            split_weights(level, &mut expected, 64);
            assert_eq!([high, low].concat(), expected, "{level:?}");
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
        }
    }
}
