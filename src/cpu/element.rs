//! Element types and rows of them: how fp16, bf16 and fp32 tensors become fp32 tiles and back.
//!
//! Everything inside a tile is fp32. Only this file turns the caller's addresses into slices and
//! matrices.

use super::product::Matrix;
use super::sequence::{Pages, Place, Sequence};
use super::simd::{Level, prefetch};
use super::transpose;
use super::vector::{scale, scale_into, vectorized};
use crate::call::TensorRef;
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

pub trait Element: Copy + Send + Sync + 'static {
    const ZERO: Self;
    /// Both slices have the same length.
    fn widen(level: Level, row: &[Self], wide: &mut [f32]);
    /// The row itself, if it is fp32.
    fn as_floats(_row: &[Self]) -> Option<&[f32]> {
        None
    }
    /// The row itself, if it is bf16.
    fn as_brains(_row: &[Self]) -> Option<&[bf16]> {
        None
    }
    /// Rounds to nearest, ties to even. Both slices have the same length.
    fn narrow(level: Level, wide: &[f32], row: &mut [Self]);
    /// Rounds `factor * wide`, which may be left in `wide`. Both slices have the same length.
    fn narrow_scaled(level: Level, factor: f32, wide: &mut [f32], row: &mut [Self]) {
        scale(level, wide, factor);
        Self::narrow(level, wide, row);
    }
}

impl Element for f32 {
    const ZERO: f32 = 0.0;
    fn widen(_level: Level, row: &[f32], wide: &mut [f32]) {
        wide.copy_from_slice(row);
    }
    fn as_floats(row: &[f32]) -> Option<&[f32]> {
        Some(row)
    }
    fn narrow(_level: Level, wide: &[f32], row: &mut [f32]) {
        row.copy_from_slice(wide);
    }
    fn narrow_scaled(level: Level, factor: f32, wide: &mut [f32], row: &mut [f32]) {
        scale_into(level, wide, factor, row);
    }
}

impl Element for f16 {
    const ZERO: f16 = f16::ZERO;
    fn widen(level: Level, row: &[f16], wide: &mut [f32]) {
        widen_f16(level, row, wide);
    }
    fn narrow(_level: Level, wide: &[f32], row: &mut [f16]) {
        row.convert_from_f32_slice(wide);
    }
}

impl Element for bf16 {
    const ZERO: bf16 = bf16::ZERO;
    fn widen(level: Level, row: &[bf16], wide: &mut [f32]) {
        widen_bf16(level, row, wide);
    }
    fn as_brains(row: &[bf16]) -> Option<&[bf16]> {
        Some(row)
    }
    fn narrow(level: Level, wide: &[f32], row: &mut [bf16]) {
        narrow_bf16(level, wide, row);
    }
}

// half's conversions of bf16 branch on NaN for each element, and those of fp16 are calls for each
// eight.
vectorized! {
    pub fn widen_bf16(row: &[bf16], wide: &mut [f32]) {
        wide.iter_mut().zip(row).for_each(|(wide, x)| *wide = f32::from_bits(u32::from(x.to_bits()) << 16));
    }

    pub fn narrow_bf16(wide: &[f32], row: &mut [bf16]) {
        for (x, wide) in row.iter_mut().zip(wide) {
            let bits = wide.to_bits();
            let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
            // A NaN keeps its upper bits and becomes quiet: rounding could carry it to an infinity.
            let quiet = bits >> 16 | 0x40;
            *x = bf16::from_bits(if wide.is_nan() { quiet } else { rounded } as u16);
        }
    }

    pub fn widen_f16(row: &[f16], wide: &mut [f32]) {
        for (wide, x) in wide.iter_mut().zip(row) {
            let bits = u32::from(x.to_bits());
            // The exponent's bias grows from 15 to 127; denormals become normal numbers on the way.
            let magnitude = f32::from_bits((bits & 0x7fff) << 13) * f32::from_bits((254 - 15) << 23);
            let exponent_of_inf = if magnitude >= 65536.0 { 0x7f80_0000 } else { 0 };
            *wide = f32::from_bits(magnitude.to_bits() | exponent_of_inf | (bits & 0x8000) << 16);
        }
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
    level: Level,
}

// SAFETY: a Tensor is an address and strides; each access through it is an unsafe call whose caller
// answers for it.
unsafe impl<E> Send for Tensor<E> {}
// SAFETY: as above.
unsafe impl<E> Sync for Tensor<E> {}

impl<E> Tensor<E> {
    pub fn new(tensor: &TensorRef, dim: usize) -> Self {
        Tensor {
            data: tensor.data.cast(),
            stride_batch: tensor.stride_batch as isize,
            stride_seqlen: tensor.stride_seqlen as isize,
            stride_head: tensor.stride_head as isize,
            dim,
            level: Level::detect(),
        }
    }

    /// The head's rows, from the sequence's row 0 on.
    pub fn head(&self, place: Place, head: usize) -> Head<E> {
        let begin = match place {
            Place::Entry(batch) => batch as isize * self.stride_batch,
            Place::Row(row) => row as isize * self.stride_seqlen,
            Place::RowOfEntry(batch, row) => batch as isize * self.stride_batch + row as isize * self.stride_seqlen,
        };
        let data = self.data.wrapping_offset(begin + head as isize * self.stride_head);
        Head { data, stride: self.stride_seqlen, dim: self.dim, level: self.level, pages: None }
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
    level: Level,
    /// The pages, and the stride between them in elements; `data` is then in the first page.
    pages: Option<(Pages, isize)>,
}

impl<E> Head<E> {
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

    pub fn level(&self) -> Level {
        self.level
    }

    /// # Safety
    /// The row must lie in a live tensor that nobody writes meanwhile.
    pub unsafe fn row<'a>(&self, position: usize) -> &'a [E] {
        // SAFETY: the caller's promise; the last dim is contiguous.
        unsafe { std::slice::from_raw_parts(self.address(position), self.dim) }
    }
}

impl<E: Element> Head<E> {
    /// # Safety
    /// The row must lie in a live tensor that nobody else reads or writes meanwhile.
    #[allow(clippy::mut_from_ref)] // the slice is the tensor's memory, not part of `self`
    unsafe fn row_mut(&self, position: usize) -> &mut [E] {
        // SAFETY: the caller's promise; the last dim is contiguous.
        unsafe { std::slice::from_raw_parts_mut(self.address(position), self.dim) }
    }

    /// Rows `first..first + rows` as fp32 into `tile`, element (row, c) at `row * pitch + c`.
    /// Columns from `dim` to `pitch` become 0.
    ///
    /// # Safety
    /// The rows must lie in a live tensor that nobody writes meanwhile.
    pub unsafe fn load(&self, first: usize, rows: usize, tile: &mut [f32], pitch: usize) {
        for (position, wide) in (first..first + rows).zip(tile.chunks_exact_mut(pitch)) {
            // SAFETY: the caller's promise.
            E::widen(self.level, unsafe { self.row(position) }, &mut wide[..self.dim]);
            if pitch > self.dim {
                wide[self.dim..].fill(0.0);
            }
        }
    }

    /// Rows `first..first + rows` as fp32: the caller's own, if they are fp32 and have `pitch`
    /// columns, or else a copy in `tile`, made as by `load`.
    ///
    /// # Safety
    /// The rows must lie in a live tensor that nobody writes during `'a`.
    pub unsafe fn rows<'a>(&self, first: usize, rows: usize, tile: &'a mut [f32], pitch: usize) -> Matrix<'a> {
        // SAFETY: the caller's promise; the last dim is contiguous.
        unsafe {
            match self.stride_in_place(pitch) {
                Some(stride) => Matrix::in_place(self.address(first).cast(), [rows, self.dim], stride),
                None => {
                    self.load(first, rows, tile, pitch);
                    Matrix::rows(tile, pitch)
                }
            }
        }
    }

    /// The stride of rows that `rows` does not copy.
    fn stride_in_place(&self, pitch: usize) -> Option<usize> {
        let is_in_place = E::as_floats(&[]).is_some() && self.dim == pitch && self.pages.is_none();
        usize::try_from(self.stride).ok().filter(|_| is_in_place)
    }

    /// Asks for a row that `rows` does not copy. Products read six such rows side by side. It
    /// helped on an Emerald Rapids together with prefetches of copied rows. On a Zen 5 it was
    /// within the noise.
    ///
    /// # Safety
    /// The row must lie in a live tensor that nobody writes meanwhile.
    pub unsafe fn prefetch_in_place(&self, position: usize, pitch: usize) {
        if self.stride_in_place(pitch).is_some() {
            // SAFETY: the caller's promise.
            prefetch(unsafe { self.row(position) });
        }
    }

    /// Rows `first..first + rows` as fp32 into `tile`, element (row, c) at `c * pitch + row`. Rows
    /// from `rows` to `padded_rows`, a multiple of 4, become 0.
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
        const COLUMNS: usize = 64;
        const ZEROS: [f32; COLUMNS] = [0.0; COLUMNS];
        let mut copies = [ZEROS; 4];
        for column in (0..self.dim).step_by(COLUMNS) {
            let columns = column..self.dim.min(column + COLUMNS);
            let tile = &mut tile[column * pitch..];
            for four in (0..padded_rows).step_by(4) {
                for row in four + 4..rows.min(four + 8) {
                    // SAFETY: the caller's promise.
                    prefetch(unsafe { &self.row(first + row)[columns.clone()] });
                }
                let mut of_four = [&ZEROS[..columns.len()]; 4];
                for ((row, of_row), copy) in (four..rows).zip(&mut of_four).zip(&mut copies) {
                    // SAFETY: the caller's promise.
                    let row = unsafe { &self.row(first + row)[columns.clone()] };
                    *of_row = E::as_floats(row).unwrap_or_else(|| {
                        let copy = &mut copy[..columns.len()];
                        E::widen(self.level, row, copy);
                        copy
                    });
                }
                transpose::from_rows(of_four, &mut tile[four..], pitch);
            }
        }
    }

    /// Rounds `wide` into the row at `position`.
    ///
    /// # Safety
    /// The row must lie in a live tensor that nobody else reads or writes meanwhile.
    pub unsafe fn store(&self, position: usize, wide: &[f32]) {
        // SAFETY: the caller's promise.
        E::narrow(self.level, wide, unsafe { self.row_mut(position) });
    }

    /// Rounds `factor * wide`, which may be left in `wide`, into the row at `position`.
    ///
    /// # Safety
    /// The row must lie in a live tensor that nobody else reads or writes meanwhile.
    pub unsafe fn store_scaled(&self, position: usize, factor: f32, wide: &mut [f32]) {
        // SAFETY: the caller's promise.
        E::narrow_scaled(self.level, factor, wide, unsafe { self.row_mut(position) });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ffi::c_void;

    #[test]
    fn every_16_bit_number_widens_exactly_and_comes_back() {
        for level in Level::all() {
            let bits: Vec<u16> = (0..=u16::MAX).collect();
            let mut wide = vec![0.0; bits.len()];
            let halves: Vec<f16> = bits.iter().map(|bits| f16::from_bits(*bits)).collect();
            widen_f16(level, &halves, &mut wide);
            for (half, wide) in halves.iter().zip(&wide) {
                let same = half.to_f32().to_bits() == wide.to_bits();
                assert!(same || half.is_nan() && wide.is_nan(), "{level:?} {half:?} {wide}");
            }
            let brains: Vec<bf16> = bits.iter().map(|bits| bf16::from_bits(*bits)).collect();
            widen_bf16(level, &brains, &mut wide);
            let mut back = vec![bf16::ZERO; brains.len()];
            narrow_bf16(level, &wide, &mut back);
            for (brain, back) in brains.iter().zip(&back) {
                assert!(brain.to_bits() == back.to_bits() || brain.is_nan() && back.is_nan(), "{level:?} {brain:?}");
            }
        }
    }

    #[test]
    fn bf16_rounds_as_the_half_crate_does() {
        for level in Level::all() {
            // Every upper half, with ties and their neighbours below.
            let lower = [0u32, 1, 0x7fff, 0x8000, 0x8001, 0xffff];
            let wide: Vec<f32> =
                (0..=0xffffu32).flat_map(|upper| lower.map(|lower| f32::from_bits(upper << 16 | lower))).collect();
            let mut narrow = vec![bf16::ZERO; wide.len()];
            narrow_bf16(level, &wide, &mut narrow);
            for (wide, narrow) in wide.iter().zip(&narrow) {
                let expected = bf16::from_f32(*wide);
                let same = narrow.to_bits() == expected.to_bits();
                assert!(same || narrow.is_nan() && expected.is_nan(), "{level:?} {wide:e}: {narrow:?}");
            }
        }
    }

    #[test]
    fn rows_of_fp32_are_read_where_they_lie_and_others_are_copied() {
        let data: Vec<f32> = (0..3 * 24).map(|x| x as f32).collect();
        let brains: Vec<bf16> = data.iter().map(|x| bf16::from_f32(*x)).collect();
        let view = |data: *const c_void| TensorRef::packed(data.cast_mut(), 3, 1, 24);
        let mut tile = [f32::NAN; 2 * 32];
        for (dim, pitch) in [(16, 16), (16, 32), (10, 16)] {
            let head = Tensor::<f32>::new(&view(data.as_ptr().cast()), dim).head(Place::Entry(0), 0);
            // SAFETY: rows of `data`.
            let rows = unsafe { head.rows(1, 2, &mut tile, pitch) };
            assert_eq!(rows.row(0, dim).as_ptr() == data[24..].as_ptr(), dim == pitch);
            let expected = |row: usize| [&data[24 * row..][..dim], &vec![0.0; pitch - dim]].concat();
            assert_eq!([rows.row(0, pitch), rows.row(1, pitch)], [expected(1), expected(2)]);
            let head = Tensor::<bf16>::new(&view(brains.as_ptr().cast()), dim).head(Place::Entry(0), 0);
            // SAFETY: rows of `brains`.
            let rows = unsafe { head.rows(1, 2, &mut tile, pitch) };
            assert_eq!([rows.row(0, pitch), rows.row(1, pitch)], [expected(1), expected(2)]);
        }
    }
}
