//! One product of fp32 tiles through the GEMM crate, checked, on the calling thread.
//!
//! Parallelism is over tiles, not inside products. The crate wants contiguous rows in the output
//! and in the left factor. It copies at most such a left factor, into a buffer that it keeps for
//! each thread, and reads the right one in place (AVX-512). The tiles of `forward` and `backward`
//! are laid out for that, so a product allocates only a few bytes of the crate's bookkeeping.

/// A strided matrix: element (row, column) at `data[row * row_stride + column * column_stride]`.
#[derive(Clone, Copy)]
pub struct Matrix<'a> {
    data: &'a [f32],
    row_stride: usize,
    column_stride: usize,
}

impl<'a> Matrix<'a> {
    /// The rows of the matrix are contiguous, `pitch` apart.
    pub fn rows(data: &'a [f32], pitch: usize) -> Self {
        Matrix { data, row_stride: pitch, column_stride: 1 }
    }

    /// The columns of the matrix are contiguous, `pitch` apart.
    pub fn columns(data: &'a [f32], pitch: usize) -> Self {
        Matrix { data, row_stride: 1, column_stride: pitch }
    }

    fn check(&self, rows: usize, columns: usize) {
        let last = (rows.max(1) - 1) * self.row_stride + (columns.max(1) - 1) * self.column_stride;
        assert!(last < self.data.len(), "a {rows} x {columns} factor leaves its tile");
    }
}

/// Whether the output's old content is replaced or added to.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Into {
    Overwrite,
    Add,
}

/// Output rows of one call into the crate. Its AVX-512 kernel for 64 rows spills accumulators
/// (rustc 1.95) and runs at two thirds of the speed of the one for 48.
const MAX_ROWS: usize = 48;

/// `out (+)= factor * left * right`, with left (m, k), right (k, n) and out's element (i, j) at `j
/// * pitch + i`.
#[allow(clippy::too_many_arguments)] // the shape, the three matrices and what to do with them
pub fn multiply(
    [m, n, k]: [usize; 3],
    out: &mut [f32],
    pitch: usize,
    into: Into,
    left: Matrix,
    right: Matrix,
    factor: f32,
) {
    if m == 0 || n == 0 {
        return;
    }
    left.check(m, k);
    right.check(k, n);
    assert!((n - 1) * pitch + m <= out.len(), "a {m} x {n} product leaves its tile");
    let mut row = 0;
    while row < m {
        // Equal parts of whole registers: 128 rows are 48 + 48 + 32.
        let parts = (m - row).div_ceil(MAX_ROWS);
        let rows = (m - row).div_ceil(parts).next_multiple_of(16).min(m - row);
        // SAFETY: the asserts above bound every element of the three matrices, hence of these rows;
        // `out` is borrowed exclusively.
        unsafe {
            gemm_f32::gemm::f32::get_gemm_fn()(
                rows,
                n,
                k,
                out.as_mut_ptr().add(row),
                pitch as isize,
                1,
                into == Into::Add,
                left.data.as_ptr().add(row * left.row_stride),
                left.column_stride as isize,
                left.row_stride as isize,
                right.data.as_ptr(),
                right.column_stride as isize,
                right.row_stride as isize,
                1.0,
                factor,
                false,
                false,
                false,
                gemm_common::Parallelism::None,
            );
        }
        row += rows;
    }
}
