//! Element types and rows of them: how fp16, bf16 and fp32 tensors become fp32 tiles and back.
//!
//! Everything inside a tile is fp32. Only this file turns the caller's addresses into slices.

use super::sequence::{Pages, Place, Sequence};
use crate::call::TensorRef;
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

pub trait Element: Copy + Send + Sync + 'static {
    const ZERO: Self;
    /// Both slices have the same length.
    fn widen(row: &[Self], wide: &mut [f32]);
    /// Rounds to nearest, ties to even. Both slices have the same length.
    fn narrow(wide: &[f32], row: &mut [Self]);
}

impl Element for f32 {
    const ZERO: f32 = 0.0;
    fn widen(row: &[f32], wide: &mut [f32]) {
        wide.copy_from_slice(row);
    }
    fn narrow(wide: &[f32], row: &mut [f32]) {
        row.copy_from_slice(wide);
    }
}

impl Element for f16 {
    const ZERO: f16 = f16::ZERO;
    fn widen(row: &[f16], wide: &mut [f32]) {
        row.convert_to_f32_slice(wide);
    }
    fn narrow(wide: &[f32], row: &mut [f16]) {
        row.convert_from_f32_slice(wide);
    }
}

impl Element for bf16 {
    const ZERO: bf16 = bf16::ZERO;
    fn widen(row: &[bf16], wide: &mut [f32]) {
        // Not half's conversion: it branches on NaN for each element and so does not vectorise.
        wide.iter_mut().zip(row).for_each(|(wide, x)| *wide = f32::from_bits(u32::from(x.to_bits()) << 16));
    }
    fn narrow(wide: &[f32], row: &mut [bf16]) {
        row.convert_from_f32_slice(wide);
    }
}

/// A (batch, seqlen, heads, dim) tensor of the caller.
#[derive(Clone, Copy)]
pub struct Tensor<E> {
    data: *mut E,
    stride_batch: isize,
    stride_seqlen: isize,
    stride_head: isize,
    dim: usize,
}

// SAFETY: a Tensor is an address and strides; each access through it is an unsafe call whose caller
// answers for it.
unsafe impl<E> Send for Tensor<E> {}
// SAFETY: as above.
unsafe impl<E> Sync for Tensor<E> {}

impl<E: Element> Tensor<E> {
    pub fn new(tensor: &TensorRef, dim: usize) -> Self {
        Tensor {
            data: tensor.data.cast(),
            stride_batch: tensor.stride_batch as isize,
            stride_seqlen: tensor.stride_seqlen as isize,
            stride_head: tensor.stride_head as isize,
            dim,
        }
    }

    /// The head's rows, from the sequence's row 0 on.
    pub fn head(&self, place: Place, head: usize) -> Head<E> {
        let begin = match place {
            Place::Entry(batch) => batch as isize * self.stride_batch,
            Place::Row(row) => row as isize * self.stride_seqlen,
        };
        let data = self.data.wrapping_offset(begin + head as isize * self.stride_head);
        Head { data, stride: self.stride_seqlen, dim: self.dim, pages: None }
    }

    /// The head's rows of a sequence's keys, in k or v.
    pub fn keys(&self, sequence: &Sequence, head: usize) -> Head<E> {
        match sequence.pages {
            None => self.head(sequence.place_k, head),
            Some(pages) => Head { pages: Some((pages, self.stride_batch)), ..self.head(Place::Entry(0), head) },
        }
    }
}

/// One (seqlen, dim) matrix of a tensor.
#[derive(Clone, Copy)]
pub struct Head<E> {
    data: *mut E,
    stride: isize,
    dim: usize,
    /// The pages, and the stride between them in elements; `data` is then in the first page.
    pages: Option<(Pages, isize)>,
}

impl<E: Element> Head<E> {
    fn address(&self, position: usize) -> *mut E {
        let (begin, row) = match self.pages {
            None => (0, position),
            Some((Pages { table, first, size }, stride)) => {
                // SAFETY: the table has an entry for each page of a used key (the caller checked
                // its size).
                let page = unsafe { table.at(first + position / size) };
                (page as isize * stride, position % size)
            }
        };
        self.data.wrapping_offset(begin + row as isize * self.stride)
    }

    /// # Safety
    /// The row must lie in a live tensor that nobody writes meanwhile.
    unsafe fn row<'a>(&self, position: usize) -> &'a [E] {
        // SAFETY: the caller's promise; the last dim is contiguous.
        unsafe { std::slice::from_raw_parts(self.address(position), self.dim) }
    }

    /// Rows `first..first + rows` as fp32 into `tile`, element (row, c) at `row * pitch + c`.
    /// Columns from `dim` to `pitch` become 0.
    ///
    /// # Safety
    /// The rows must lie in a live tensor that nobody writes meanwhile.
    pub unsafe fn load(&self, first: usize, rows: usize, tile: &mut [f32], pitch: usize) {
        for (position, wide) in (first..first + rows).zip(tile.chunks_exact_mut(pitch)) {
            // SAFETY: the caller's promise.
            E::widen(unsafe { self.row(position) }, &mut wide[..self.dim]);
            wide[self.dim..].fill(0.0);
        }
    }

    /// Rows `first..first + rows` as fp32 into `tile`, element (row, c) at `c * pitch + row`. Rows
    /// from `rows` to `padded_rows` become 0.
    ///
    /// # Safety
    /// The rows must lie in a live tensor that nobody writes meanwhile.
    pub unsafe fn load_transposed(
        &self,
        first: usize,
        rows: usize,
        padded_rows: usize,
        tile: &mut [f32],
        pitch: usize,
    ) {
        // Strips of 16 rows, so that each column of a strip is written as one cache line.
        const STRIP: usize = 16;
        const COLUMNS: usize = 64;
        let mut wide = [[0.0f32; COLUMNS]; STRIP];
        for strip in (0..padded_rows).step_by(STRIP) {
            for column in (0..self.dim).step_by(COLUMNS) {
                let columns = COLUMNS.min(self.dim - column);
                for (i, wide) in wide.iter_mut().enumerate() {
                    match strip + i < rows {
                        // SAFETY: the caller's promise.
                        true => E::widen(
                            unsafe { &self.row(first + strip + i)[column..column + columns] },
                            &mut wide[..columns],
                        ),
                        false => wide.fill(0.0),
                    }
                }
                for c in 0..columns {
                    let to = &mut tile[(column + c) * pitch + strip..][..STRIP];
                    to.iter_mut().zip(&wide).for_each(|(to, wide)| *to = wide[c]);
                }
            }
        }
    }

    /// Rounds `wide` into the row at `position`.
    ///
    /// # Safety
    /// The row must lie in a live tensor that nobody else reads or writes meanwhile.
    pub unsafe fn store(&self, position: usize, wide: &[f32]) {
        let row = self.address(position);
        // SAFETY: the caller's promise; the last dim is contiguous.
        E::narrow(wide, unsafe { std::slice::from_raw_parts_mut(row, self.dim) });
    }

    /// Rounds `factor * tile` into rows `first..first + rows`, element (row, c) at `c * pitch +
    /// row` of `tile`.
    ///
    /// # Safety
    /// The rows must lie in a live tensor that nobody else reads or writes meanwhile.
    pub unsafe fn store_transposed(&self, first: usize, rows: usize, tile: &[f32], pitch: usize, factor: f32) {
        let mut wide = [0.0; crate::problem::MAX_HEAD_DIM as usize];
        for i in 0..rows {
            let column = wide[..self.dim].iter_mut().enumerate();
            column.for_each(|(c, wide)| *wide = factor * tile[c * pitch + i]);
            // SAFETY: the caller's promise.
            unsafe { self.store(first + i, &wide[..self.dim]) };
        }
    }
}
