//! Host memory of the CPU backend: aligned, zeroed at first, freed on drop.
//!
//! It holds the tensors of the tuner and the tests, and each worker's scratch. It knows nothing of
//! attention.

use crate::error::{Error, Result, Status};
use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ffi::c_void;
use std::ptr::NonNull;
use std::sync::Mutex;

/// The alignment that the workspace of every backend has; a multiple of a cache line.
const ALIGNMENT: usize = 256;

#[derive(Debug)]
pub struct HostMemory {
    /// The allocator's block, with `ALIGNMENT` bytes to spare.
    allocation: NonNull<u8>,
    data: NonNull<u8>,
    bytes: usize,
}

// SAFETY: HostMemory owns its allocation like a Vec; its own methods write through `&self` only in
// `upload`, whose callers order it against launches as they must on a GPU.
unsafe impl Send for HostMemory {}
// SAFETY: as above.
unsafe impl Sync for HostMemory {}

impl HostMemory {
    pub fn new(bytes: usize) -> Result<HostMemory> {
        let Some(layout) = layout(bytes) else {
            return Err(out_of_memory(bytes));
        };
        // SAFETY: the layout's size is not zero.
        let Some(allocation) = NonNull::new(unsafe { alloc_zeroed(layout) }) else {
            return Err(out_of_memory(bytes));
        };
        let offset = allocation.as_ptr().align_offset(ALIGNMENT);
        // SAFETY: the offset is below ALIGNMENT, which the layout has to spare.
        let data = unsafe { allocation.add(offset) };
        Ok(HostMemory { allocation, data, bytes })
    }

    pub fn address(&self) -> *mut c_void {
        self.data.as_ptr().cast()
    }

    pub fn bytes(&self) -> usize {
        self.bytes
    }

    pub(super) fn upload(&self, bytes: &[u8]) -> Result<()> {
        self.check_length(bytes.len())?;
        // SAFETY: the length was checked; a source that overlaps would have to borrow this
        // allocation, which no method lends out while `&self` is shared.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.data.as_ptr(), bytes.len()) };
        Ok(())
    }

    pub(super) fn download(&self, bytes: &mut [u8]) -> Result<()> {
        self.check_length(bytes.len())?;
        // SAFETY: the length was checked and all bytes are initialised, by `alloc_zeroed` at the
        // latest.
        unsafe { std::ptr::copy_nonoverlapping(self.data.as_ptr(), bytes.as_mut_ptr(), bytes.len()) };
        Ok(())
    }

    pub(super) fn as_floats_mut(&mut self) -> &mut [f32] {
        // SAFETY: 256-byte aligned, initialised, and borrowed as long as `self`; every bit pattern
        // is a float.
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
        let layout = layout(self.bytes).expect("checked when allocated");
        // SAFETY: allocated in `new` with this very layout.
        unsafe { dealloc(self.allocation.as_ptr(), layout) };
    }
}

/// Aligned by hand and not by the allocator: for so large an alignment std would zero the memory
/// itself, page by page. The allocator hands out fresh pages that are zero already.
fn layout(bytes: usize) -> Option<Layout> {
    Layout::from_size_align(bytes.checked_add(ALIGNMENT)?, 1).ok()
}

/// Bytes that a call needs free for its own small allocations: texts, tables, blocks of queues. A
/// refused one of these could only end the process.
pub const FOR_SMALL_ALLOCATIONS: usize = 2 << 20;

/// What the sentence of a refusal is written in, and what glibc keeps for each thread. Held from
/// the first check on, and given to the allocator once the system refuses.
static RESERVE: Mutex<Vec<u8>> = Mutex::new(Vec::new());
const RESERVE_BYTES: usize = 64 << 10;

/// An error if the system would refuse so many bytes now. It asks for them and gives them back
/// untouched, past the allocator, which keeps nothing of them.
pub fn require_available(bytes: usize) -> Result<()> {
    let (access, kind) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
    // SAFETY: a new mapping at an address of the system's choice.
    let mapping = unsafe { libc::mmap(std::ptr::null_mut(), bytes, access, kind, -1, 0) };
    if mapping == libc::MAP_FAILED {
        return Err(out_of_memory(bytes));
    }
    // SAFETY: the whole of the mapping just made, which nothing refers to.
    unsafe { libc::munmap(mapping, bytes) };
    // Whoever holds the lock is doing the same. After a fork, nobody may be there to release it.
    if let Ok(mut reserve) = RESERVE.try_lock()
        && reserve.is_empty()
        && reserve.try_reserve_exact(RESERVE_BYTES).is_ok()
    {
        reserve.push(0);
    }
    Ok(())
}

fn out_of_memory(bytes: usize) -> Error {
    drop(RESERVE.try_lock().map(|mut reserve| std::mem::take(&mut *reserve)));
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
    fn what_the_system_has_is_available_and_what_no_system_has_is_not() {
        require_available(1 << 20).unwrap();
        assert_eq!(require_available(isize::MAX as usize).unwrap_err().status, Status::OutOfMemory);
    }

    #[test]
    fn a_refusal_gives_up_the_reserve_and_the_next_success_fills_it_again() {
        // Other tests of this process may hold the lock for a moment, which both calls then skip.
        let until = |is_held: bool, step: &dyn Fn()| {
            (0..1000).any(|_| {
                step();
                RESERVE.lock().unwrap().is_empty() != is_held
            })
        };
        assert!(until(true, &|| require_available(1).unwrap()));
        assert!(until(false, &|| drop(require_available(usize::MAX >> 1).unwrap_err())));
    }

    #[test]
    fn an_impossible_size_is_out_of_memory() {
        for bytes in [usize::MAX, usize::MAX - ALIGNMENT, isize::MAX as usize, isize::MAX as usize - ALIGNMENT] {
            assert_eq!(HostMemory::new(bytes).unwrap_err().status, Status::OutOfMemory);
        }
    }

    #[test]
    fn the_address_is_aligned_for_a_workspace() {
        for bytes in [0, 1, 1000, 1 << 20] {
            assert!(HostMemory::new(bytes).unwrap().address().addr().is_multiple_of(256));
        }
    }
}
