//! Views of tensors and arrays. A view of a slice is checked against the slice's length when it is
//! made, so later code may trust its shape and strides.

use super::element::Element;
use crate::error::{Error, Result};
use std::ffi::c_void;
use std::marker::PhantomData;

/// The memory that holds a view's elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    Host,
    Device,
}

/// A view without its lifetime and element type.
#[derive(Clone, Copy, Debug)]
pub(super) struct View {
    pub data: *mut c_void,
    pub shape: [usize; 4],
    pub strides: [usize; 3],
    pub place: Place,
}

/// A view of a (batch, seqlen, heads, dim) tensor that is read. The last dimension is contiguous.
#[derive(Clone, Copy, Debug)]
pub struct Tensor<'a, T> {
    pub(super) view: View,
    memory: PhantomData<&'a [T]>,
}

/// A view of a (batch, seqlen, heads, dim) tensor that is written. The last dimension is
/// contiguous.
#[derive(Debug)]
pub struct TensorMut<'a, T> {
    pub(super) view: View,
    memory: PhantomData<&'a mut [T]>,
}

/// A contiguous array that is read.
#[derive(Clone, Copy, Debug)]
pub struct Array<'a, T> {
    pub(super) data: *const T,
    pub(super) len: usize,
    pub(super) place: Place,
    memory: PhantomData<&'a [T]>,
}

/// A contiguous array that is written.
#[derive(Debug)]
pub struct ArrayMut<'a, T> {
    pub(super) data: *mut T,
    pub(super) len: usize,
    pub(super) place: Place,
    memory: PhantomData<&'a mut [T]>,
}

// SAFETY: these four stand for slices, shared or exclusive, and are sent and shared as slices are.
unsafe impl<T: Sync> Send for Tensor<'_, T> {}
// SAFETY: as above.
unsafe impl<T: Sync> Sync for Tensor<'_, T> {}
// SAFETY: as above.
unsafe impl<T: Send> Send for TensorMut<'_, T> {}
// SAFETY: as above.
unsafe impl<T: Sync> Sync for TensorMut<'_, T> {}
// SAFETY: as above.
unsafe impl<T: Sync> Send for Array<'_, T> {}
// SAFETY: as above.
unsafe impl<T: Sync> Sync for Array<'_, T> {}
// SAFETY: as above.
unsafe impl<T: Send> Send for ArrayMut<'_, T> {}
// SAFETY: as above.
unsafe impl<T: Sync> Sync for ArrayMut<'_, T> {}

impl<'a, T: Element> Tensor<'a, T> {
    /// A contiguous tensor of this shape. The slice may be longer.
    pub fn new(data: &'a [T], shape: [usize; 4]) -> Result<Self> {
        Self::strided(data, shape, contiguous(shape)?)
    }

    /// A tensor with the strides of batch, seqlen and head, in elements. A stride of 0 shares the
    /// elements along its dimension. Views into a packed buffer begin at their first element.
    pub fn strided(data: &'a [T], shape: [usize; 4], strides: [usize; 3]) -> Result<Self> {
        check_bounds(data.len(), shape, strides)?;
        let data = data.as_ptr().cast_mut().cast();
        Ok(Tensor { view: View { data, shape, strides, place: Place::Host }, memory: PhantomData })
    }

    /// A tensor in the memory of a GPU, by its address (a `CUdeviceptr`).
    ///
    /// # Safety
    /// The address is aligned to the element, and every element of this shape and these strides
    /// lies in memory that the context's GPU can read. The memory stays allocated, and nothing
    /// else writes to it, until all work that uses the view is done.
    pub unsafe fn from_device(address: u64, shape: [usize; 4], strides: [usize; 3]) -> Self {
        Tensor { view: View::on_device(address, shape, strides), memory: PhantomData }
    }

    /// (batch, seqlen, heads, dim).
    pub fn shape(&self) -> [usize; 4] {
        self.view.shape
    }
}

impl<'a, T: Element> TensorMut<'a, T> {
    /// A contiguous tensor of this shape. The slice may be longer.
    pub fn new(data: &'a mut [T], shape: [usize; 4]) -> Result<Self> {
        Self::strided(data, shape, contiguous(shape)?)
    }

    /// A tensor with the strides of batch, seqlen and head, in elements. A launch refuses strides
    /// that put two elements in one place.
    pub fn strided(data: &'a mut [T], shape: [usize; 4], strides: [usize; 3]) -> Result<Self> {
        check_bounds(data.len(), shape, strides)?;
        let data = data.as_mut_ptr().cast();
        Ok(TensorMut { view: View { data, shape, strides, place: Place::Host }, memory: PhantomData })
    }

    /// A tensor in the memory of a GPU, by its address (a `CUdeviceptr`).
    ///
    /// # Safety
    /// The address is aligned to the element, and every element of this shape and these strides
    /// lies in memory that the context's GPU can write. The memory stays allocated, and nothing
    /// else uses it, until all work that uses the view is done.
    pub unsafe fn from_device(address: u64, shape: [usize; 4], strides: [usize; 3]) -> Self {
        TensorMut { view: View::on_device(address, shape, strides), memory: PhantomData }
    }

    /// (batch, seqlen, heads, dim).
    pub fn shape(&self) -> [usize; 4] {
        self.view.shape
    }
}

impl<'a, T> Array<'a, T> {
    /// An array in the memory of a GPU, by its address (a `CUdeviceptr`).
    ///
    /// # Safety
    /// The address is aligned to the element, and `len` elements lie in memory that the context's
    /// GPU can read. They stay as they are until all work that uses the array is done. Nothing
    /// checks lengths that lie there: `cu_seqlens` begins at 0, does not decrease, and ends at most
    /// at the rows of its tensor.
    pub unsafe fn from_device(address: u64, len: usize) -> Self {
        let data = std::ptr::with_exposed_provenance(address as usize);
        Array { data, len, place: Place::Device, memory: PhantomData }
    }
}

impl<'a, T> From<&'a [T]> for Array<'a, T> {
    fn from(data: &'a [T]) -> Self {
        Array { data: data.as_ptr(), len: data.len(), place: Place::Host, memory: PhantomData }
    }
}

impl<'a, T> From<&'a Vec<T>> for Array<'a, T> {
    fn from(data: &'a Vec<T>) -> Self {
        Array::from(data.as_slice())
    }
}

impl<'a, T, const N: usize> From<&'a [T; N]> for Array<'a, T> {
    fn from(data: &'a [T; N]) -> Self {
        Array::from(data.as_slice())
    }
}

impl<'a, T> ArrayMut<'a, T> {
    /// An array in the memory of a GPU, by its address (a `CUdeviceptr`).
    ///
    /// # Safety
    /// The address is aligned to the element, and `len` elements lie in memory that the context's
    /// GPU can write. The memory stays allocated, and nothing else uses it, until all work that
    /// uses the array is done.
    pub unsafe fn from_device(address: u64, len: usize) -> Self {
        let data = std::ptr::with_exposed_provenance_mut(address as usize);
        ArrayMut { data, len, place: Place::Device, memory: PhantomData }
    }
}

impl<'a, T> From<&'a mut [T]> for ArrayMut<'a, T> {
    fn from(data: &'a mut [T]) -> Self {
        ArrayMut { data: data.as_mut_ptr(), len: data.len(), place: Place::Host, memory: PhantomData }
    }
}

impl<'a, T> From<&'a mut Vec<T>> for ArrayMut<'a, T> {
    fn from(data: &'a mut Vec<T>) -> Self {
        ArrayMut::from(data.as_mut_slice())
    }
}

impl View {
    fn on_device(address: u64, shape: [usize; 4], strides: [usize; 3]) -> View {
        let data = std::ptr::with_exposed_provenance_mut(address as usize);
        View { data, shape, strides, place: Place::Device }
    }
}

/// The strides of a contiguous tensor.
fn contiguous(shape @ [_, seqlen, heads, dim]: [usize; 4]) -> Result<[usize; 3]> {
    let row = heads.checked_mul(dim);
    match row.and_then(|row| Some([seqlen.checked_mul(row)?, row, dim])) {
        Some(strides) => Ok(strides),
        None => Err(Error::invalid(format!("the shape {shape:?} overflows: its strides exceed a usize"))),
    }
}

/// Refuses a view that reaches past the end of its slice.
fn check_bounds(len: usize, shape: [usize; 4], strides: [usize; 3]) -> Result<()> {
    let needed = match shape.contains(&0) {
        true => Some(0),
        false => shape
            .iter()
            .zip(strides)
            .try_fold(shape[3], |end, (count, stride)| end.checked_add((count - 1).checked_mul(stride)?)),
    };
    match needed {
        Some(needed) if needed <= len => Ok(()),
        needed => Err(Error::invalid(format!(
            "a tensor of shape (batch, seqlen, heads, dim) = {shape:?} and strides (batch, seqlen, head) = {strides:?} needs {} elements; the slice has {len}",
            needed.map_or("more than 2^63".to_owned(), |needed| needed.to_string())
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_view_ends_within_its_slice() {
        let data = [0.0_f32; 24];
        let is_ok = |shape, strides| Tensor::strided(&data, shape, strides).is_ok();
        assert!(Tensor::new(&data, [1, 3, 2, 4]).is_ok() && Tensor::new(&data, [1, 3, 2, 5]).is_err());
        // The last element is 23 and then 24.
        assert!(is_ok([1, 2, 2, 4], [0, 16, 4]) && !is_ok([1, 2, 2, 4], [0, 17, 4]));
        // The stride of a dimension of size 1 is not used, and a stride of 0 reaches nowhere.
        assert!(is_ok([1, 3, 2, 4], [usize::MAX, 8, 4]) && is_ok([1 << 40, 3, 2, 4], [0, 8, 4]));
        assert!(is_ok([1 << 40, 0, 2, 4], [9; 3]));
        for shape in [[2, 1, 1, 4], [usize::MAX, 1, 1, 4], [1, usize::MAX, 2, 4]] {
            assert!(!is_ok(shape, [usize::MAX / 2; 3]), "{shape:?}");
            assert!(Tensor::new(&data[..7], shape).is_err(), "{shape:?}");
        }
    }

    #[test]
    fn the_reason_has_both_lengths() {
        let error = TensorMut::new(&mut [0.0_f32; 7], [1, 1, 2, 4]).unwrap_err();
        assert!(error.message.ends_with("needs 8 elements; the slice has 7"), "{error}");
    }
}
