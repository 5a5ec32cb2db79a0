//! Host memory of the CPU backend: aligned, zeroed at first, freed on drop.
//!
//! Tensors of the tuner and the tests, and each worker's scratch, live in it. It knows nothing of attention.

use crate::error::{Error, Result, Status};
use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ffi::c_void;
use std::ptr::NonNull;

/// The alignment that the workspace of every backend has; a multiple of a cache line.
const ALIGNMENT: usize = 256;

#[derive(Debug)]
pub struct HostMemory {
    data: NonNull<u8>,
    bytes: usize,
}

// SAFETY: HostMemory owns its allocation like a Vec; its own methods write through `&self` only in `upload`, whose
// callers order it against launches as they must on a GPU.
unsafe impl Send for HostMemory {}
// SAFETY: as above.
unsafe impl Sync for HostMemory {}

impl HostMemory {
    pub fn new(bytes: usize) -> Result<HostMemory> {
        let Ok(layout) = Layout::from_size_align(bytes.max(1), ALIGNMENT) else {
            return Err(out_of_memory(bytes));
        };
        // SAFETY: the layout's size is not zero.
        let data = unsafe { alloc_zeroed(layout) };
        NonNull::new(data).map(|data| HostMemory { data, bytes }).ok_or_else(|| out_of_memory(bytes))
    }

    pub fn address(&self) -> *mut c_void {
        self.data.as_ptr().cast()
    }

    pub fn bytes(&self) -> usize {
        self.bytes
    }

    pub(super) fn upload(&self, bytes: &[u8]) -> Result<()> {
        self.check_length(bytes.len())?;
        // SAFETY: the length was checked; a source that overlaps would have to borrow this allocation, which no
        // method lends out while `&self` is shared.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.data.as_ptr(), bytes.len()) };
        Ok(())
    }

    pub(super) fn download(&self, bytes: &mut [u8]) -> Result<()> {
        self.check_length(bytes.len())?;
        // SAFETY: the length was checked and all bytes are initialised, by `alloc_zeroed` at the latest.
        unsafe { std::ptr::copy_nonoverlapping(self.data.as_ptr(), bytes.as_mut_ptr(), bytes.len()) };
        Ok(())
    }

    pub(super) fn as_floats_mut(&mut self) -> &mut [f32] {
        // SAFETY: 256-byte aligned, initialised, and borrowed as long as `self`; every bit pattern is a float.
        unsafe { std::slice::from_raw_parts_mut(self.data.as_ptr().cast(), self.bytes / size_of::<f32>()) }
    }

    fn check_length(&self, bytes: usize) -> Result<()> {
        match bytes <= self.bytes {
            true => Ok(()),
            false => Err(Error::invalid(format!("copy of {bytes} bytes; the allocation has {}", self.bytes))),
        }
    }
}

impl Drop for HostMemory {
    fn drop(&mut self) {
        let layout = Layout::from_size_align(self.bytes.max(1), ALIGNMENT).expect("checked when allocated");
        // SAFETY: allocated in `new` with this very layout.
        unsafe { dealloc(self.data.as_ptr(), layout) };
    }
}

fn out_of_memory(bytes: usize) -> Error {
    Error::new(Status::OutOfMemory, format!("cannot allocate {bytes} bytes of host memory"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_copy_longer_than_the_allocation_is_refused() {
        let memory = HostMemory::new(8).unwrap();
        memory.upload(&[7; 8]).unwrap();
        assert_eq!(memory.upload(&[1; 9]).unwrap_err().status, Status::InvalidArgument);
        let mut back = [0; 8];
        memory.download(&mut back).unwrap();
        assert_eq!(back, [7; 8]);
    }

    #[test]
    fn an_impossible_size_is_out_of_memory() {
        for bytes in [usize::MAX, isize::MAX as usize - ALIGNMENT] {
            assert_eq!(HostMemory::new(bytes).unwrap_err().status, Status::OutOfMemory);
        }
    }
}
