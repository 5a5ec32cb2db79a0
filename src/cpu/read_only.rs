//! ReadOnly: an array of the caller that a launch's threads read.

#[derive(Clone, Copy)]
pub struct ReadOnly<T>(*const T);

// SAFETY: only read, and the caller keeps the array alive and unwritten during a launch.
unsafe impl<T> Send for ReadOnly<T> {}
// SAFETY: as above.
unsafe impl<T> Sync for ReadOnly<T> {}

impl<T: Copy> ReadOnly<T> {
    /// An aligned array, or NULL.
    pub fn new(array: *const T) -> Self {
        ReadOnly(array)
    }

    pub fn is_null(&self) -> bool {
        self.0.is_null()
    }

    /// # Safety
    /// The index lies in a live array that nobody writes meanwhile.
    pub unsafe fn at(&self, index: usize) -> T {
        // SAFETY: the caller's promise.
        unsafe { self.0.add(index).read() }
    }
}
