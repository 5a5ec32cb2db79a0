//! One product of fp32 tiles on the calling thread: accumulators in registers, both factors read in
//! place.
//!
//! Parallelism is over tiles, not inside products. The callers lay their tiles out for this kernel,
//! so it packs nothing and allocates nothing. A GEMM crate did the same at 92 to 95 % of its
//! speed on one Zen 4 core, and less where two multiply-adds go into a cycle: its calls, its choice
//! of a kernel and its epilogue are paid for each product of 2^20 operations. A factor may also be
//! rows of a caller's tensor.

use super::amx::Words;
use super::simd::{Level, load, multiply_add, store};
use pulp::{Simd, WithSimd};
use std::marker::PhantomData;

pub use crate::family::cpu::scratch::{LANES, STRIP};

/// A strided matrix: element (row, column) at `data + row * row_stride + column * column_stride`.
///
/// Only its elements are read: between the rows of a caller's tensor may lie what another thread
/// writes. It therefore holds an address and no slice.
#[derive(Clone, Copy)]
pub struct Matrix<'a> {
    data: *const f32,
    /// Floats from `data` to the end of the last element.
    len: usize,
    row_stride: usize,
    column_stride: usize,
    lives: PhantomData<&'a [f32]>,
}

impl<'a> Matrix<'a> {
    /// The rows of the matrix are contiguous, `pitch` apart.
    pub fn rows(data: &'a [f32], pitch: usize) -> Self {
        Matrix { data: data.as_ptr(), len: data.len(), row_stride: pitch, column_stride: 1, lives: PhantomData }
    }

    /// The columns of the matrix are contiguous, `pitch` apart.
    pub fn columns(data: &'a [f32], pitch: usize) -> Self {
        Matrix::rows(data, pitch).transposed()
    }

    /// Rows of floats that lie `pitch` apart.
    ///
    /// # Safety
    /// So many rows of so many columns must lie there, and nobody may write them during `'a`.
    pub unsafe fn in_place(data: *const f32, [rows, columns]: [usize; 2], pitch: usize) -> Self {
        let len = if rows == 0 { 0 } else { (rows - 1) * pitch + columns };
        Matrix { data, len, row_stride: pitch, column_stride: 1, lives: PhantomData }
    }

    pub fn transposed(self) -> Self {
        Matrix { row_stride: self.column_stride, column_stride: self.row_stride, ..self }
    }

    /// The matrix without its first rows.
    pub fn skip_rows(self, rows: usize) -> Self {
        let skipped = (rows * self.row_stride).min(self.len);
        Matrix { data: self.data.wrapping_add(skipped), len: self.len - skipped, ..self }
    }

    /// A row of a matrix whose rows are contiguous.
    pub fn row(self, row: usize, columns: usize) -> &'a [f32] {
        let row = self.skip_rows(row);
        assert!(self.column_stride == 1 && columns <= row.len, "a row leaves its matrix");
        // SAFETY: the row's elements lie in the matrix, as just checked, and are borrowed for `'a`.
        unsafe { std::slice::from_raw_parts(row.data, columns) }
    }

    /// A matrix of words, as tiles of them are loaded: its columns are contiguous.
    pub fn words(&self, rows: usize, columns: usize) -> Words {
        self.check(rows, columns);
        assert!(self.row_stride == 1, "the columns of a tile are contiguous");
        Words { data: self.data, pitch: self.column_stride }
    }

    fn check(&self, rows: usize, columns: usize) {
        let last = (rows.max(1) - 1) * self.row_stride + (columns.max(1) - 1) * self.column_stride;
        assert!(last < self.len, "a {rows} x {columns} factor leaves its tile");
    }
}

/// What becomes of the output's old content and of the product.
#[derive(Clone, Copy)]
pub enum Into<'a> {
    /// out = factor * product
    Overwrite(f32),
    /// out = out + product
    Add,
    /// out = factor of the column * out + product
    Rescale(&'a [f32]),
}

/// `out = left * right` into `out`, whose element (i, j) lies at `j * pitch + i`. The shape is (m,
/// k) times (k, n), with m a multiple of `LANES`; the columns of `left` are contiguous.
pub fn multiply(
    level: Level,
    [m, n, k]: [usize; 3],
    out: &mut [f32],
    pitch: usize,
    into: Into,
    left: Matrix,
    right: Matrix,
) {
    if m == 0 || n == 0 {
        return;
    }
    left.check(m, k);
    right.check(k, n);
    assert!(m.is_multiple_of(LANES) && left.row_stride == 1, "the rows of a tile are whole registers");
    assert!((n - 1) * pitch + m <= out.len(), "a {m} x {n} product leaves its tile");
    if let Into::Rescale(factors) = into {
        assert!(n <= factors.len(), "a factor for each column");
    }
    level.run(Product { shape: [m, n, k], out: out.as_mut_ptr(), pitch, into, left, right });
}

/// A checked product: every element of the three matrices lies in its slice.
struct Product<'a> {
    shape: [usize; 3],
    out: *mut f32,
    pitch: usize,
    into: Into<'a>,
    left: Matrix<'a>,
    right: Matrix<'a>,
}

impl WithSimd for Product<'_> {
    type Output = ();

    /// The accumulators of a block: as many as the registers hold beside a column of the left
    /// factor, in a shape that loads little for each multiply-add.
    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let m = self.shape[0];
        let mut row = 0;
        while row < m {
            // Equal parts: 128 rows are 64 + 64, and 80 are 48 + 32.
            let parts = (m - row).div_ceil(STRIP);
            let rows = (m - row).div_ceil(parts).next_multiple_of(LANES);
            match (S::F32_LANES, rows / LANES) {
                (16, 1) => self.strip::<S, 1, 8>(simd, row),
                (16, 2) => self.strip::<S, 2, 8>(simd, row),
                (16, 3) => self.strip::<S, 3, 8>(simd, row),
                (16, _) => self.strip::<S, 4, 6>(simd, row),
                (8, _) => self.strips::<S, 2, 6>(simd, row, rows),
                (_, _) if S::REGISTER_COUNT < 32 => self.strips::<S, 2, 4>(simd, row, rows),
                (_, _) => self.strips::<S, 4, 6>(simd, row, rows),
            }
            row += rows;
        }
    }
}

impl Product<'_> {
    #[inline(always)]
    fn strips<S: Simd, const R: usize, const C: usize>(&self, simd: S, first: usize, rows: usize) {
        let mut row = first;
        while row < first + rows {
            self.strip::<S, R, C>(simd, row);
            row += R * S::F32_LANES;
        }
    }

    /// The output's rows from `row` on, as many as `R` registers hold.
    #[inline(always)]
    fn strip<S: Simd, const R: usize, const C: usize>(&self, simd: S, row: usize) {
        match self.right.column_stride {
            1 => self.columns::<S, R, C, true>(simd, row),
            _ => self.columns::<S, R, C, false>(simd, row),
        }
    }

    #[inline(always)]
    fn columns<S: Simd, const R: usize, const C: usize, const UNIT: bool>(&self, simd: S, row: usize) {
        let n = self.shape[1];
        let mut column = 0;
        while column + C <= n {
            self.block::<S, R, C, UNIT>(simd, row, column);
            column += C;
        }
        if column + 4 <= n {
            self.block::<S, R, 4, UNIT>(simd, row, column);
            column += 4;
        }
        if column + 2 <= n {
            self.block::<S, R, 2, UNIT>(simd, row, column);
            column += 2;
        }
        if column < n {
            self.block::<S, R, 1, UNIT>(simd, row, column);
        }
    }

    /// `C` columns of the output and `R` registers of its rows; `UNIT` if the right factor's rows
    /// are contiguous.
    #[inline(always)]
    #[allow(clippy::needless_range_loop)] // rustc inlines no closure into code for more registers
    fn block<S: Simd, const R: usize, const C: usize, const UNIT: bool>(&self, simd: S, row: usize, column: usize) {
        let k = self.shape[2];
        let column_stride = if UNIT { 1 } else { self.right.column_stride };
        let mut sums = [[simd.splat_f32s(0.0); R]; C];
        // SAFETY: `multiply` has checked that rows and columns of this block lie in the three
        // slices, of which `out` is borrowed exclusively.
        unsafe {
            let mut left = self.left.data.add(row);
            let mut right = self.right.data.add(column * column_stride);
            for _ in 0..k {
                let mut of_left = [simd.splat_f32s(0.0); R];
                for r in 0..R {
                    of_left[r] = load(simd, left.add(r * S::F32_LANES));
                }
                for c in 0..C {
                    let of_right = simd.splat_f32s(*right.add(c * column_stride));
                    for r in 0..R {
                        sums[c][r] = multiply_add(simd, of_left[r], of_right, sums[c][r]);
                    }
                }
                left = left.wrapping_add(self.left.column_stride);
                right = right.wrapping_add(self.right.row_stride);
            }
            for c in 0..C {
                for r in 0..R {
                    let at = row + r * S::F32_LANES;
                    let out = self.out.add((column + c) * self.pitch + at);
                    let value = match self.into {
                        Into::Overwrite(factor) => simd.mul_f32s(simd.splat_f32s(factor), sums[c][r]),
                        Into::Add => simd.add_f32s(load(simd, out), sums[c][r]),
                        Into::Rescale(factors) => {
                            let factor = simd.splat_f32s(*factors.as_ptr().add(column + c));
                            multiply_add(simd, factor, load(simd, out), sums[c][r])
                        }
                    };
                    store(simd, out, value);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Small integers, whose products are exact in any order.
    fn integers(count: usize, seed: usize) -> Vec<f32> {
        (0..count).map(|i| ((i * 7919 + seed * 104_729) % 17) as f32 - 8.0).collect()
    }

    #[test]
    fn every_shape_of_product_is_exact_on_integers_at_every_level() {
        for level in Level::all() {
            for m in [16, 32, 48, 64, 80, 128] {
                for n in (1..20).chain([31]) {
                    for k in [0, 1, 2, 7, 33] {
                        for right_is_rows in [false, true] {
                            check(level, [m, n, k], right_is_rows);
                        }
                    }
                }
            }
        }
    }

    fn check(level: Level, [m, n, k]: [usize; 3], right_is_rows: bool) {
        let (left_pitch, pitch) = (m + 3, m + 5);
        let right_pitch = if right_is_rows { n + 1 } else { k + 1 };
        let left = integers(left_pitch * k.max(1), 1);
        let right = integers(right_pitch * n.max(k), 2);
        let factors = integers(n, 3);
        let before = integers(pitch * n, 4);
        let right_matrix =
            if right_is_rows { Matrix::rows(&right, right_pitch) } else { Matrix::columns(&right, right_pitch) };
        for into in [Into::Overwrite(0.5), Into::Add, Into::Rescale(&factors)] {
            let mut out = before.clone();
            multiply(level, [m, n, k], &mut out, pitch, into, Matrix::columns(&left, left_pitch), right_matrix);
            for (at, (got, before)) in out.iter().zip(&before).enumerate() {
                let (i, j) = (at % pitch, at / pitch);
                let sum: f32 = (0..if i < m { k } else { 0 })
                    .map(|p| {
                        let of_right =
                            if right_is_rows { right[p * right_pitch + j] } else { right[j * right_pitch + p] };
                        left[p * left_pitch + i] * of_right
                    })
                    .sum();
                let expected = match into {
                    _ if i >= m => *before,
                    Into::Overwrite(factor) => factor * sum,
                    Into::Add => before + sum,
                    Into::Rescale(factors) => factors[j] * before + sum,
                };
                assert_eq!(*got, expected, "{level:?} {m} x {n} x {k}, row {i} column {j}");
            }
        }
    }

    #[test]
    #[should_panic(expected = "a 16 x 4 product leaves its tile")]
    fn a_product_past_its_tile_is_caught() {
        let factor = [0.0; 64];
        let into = Into::Overwrite(1.0);
        multiply(
            Level::Baseline,
            [16, 4, 1],
            &mut [0.0; 63],
            16,
            into,
            Matrix::columns(&factor, 16),
            Matrix::rows(&factor, 4),
        );
    }
}
