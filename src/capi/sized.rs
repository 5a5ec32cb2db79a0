//! Structs that begin with their size, so that they can grow. This file reads those of older and
//! newer callers.
//!
//! An older caller's struct is shorter than ours, but never shorter than in the first release. Its
//! missing tail counts as zeros, the default of every field. A newer caller's struct is longer, and
//! its unknown tail must be zeros.

use crate::error::{Error, Result};
use std::ffi::c_void;
use std::mem::MaybeUninit;

/// A struct whose first field is its size in bytes.
///
/// # Safety
/// `repr(C)`, the first field a `u64`, and every pattern of bytes a valid value.
pub unsafe trait SizedStruct: Copy {
    /// Name in the header.
    const NAME: &'static str;
    /// Size in the first release that had the struct.
    const OLDEST: usize;
}

/// More than any struct of any release. A larger `struct_size` is an uninitialised field.
const MAX_STRUCT_SIZE: u64 = 16 * 1024;

/// Reads a field that is 0 or 1 and the reserved field after it, each given by name and value.
pub fn flag((name, value): (&str, i32), (reserved_name, reserved): (&str, i32)) -> Result<bool> {
    match (value, reserved) {
        (0, 0) => Ok(false),
        (1, 0) => Ok(true),
        (0 | 1, other) => Err(Error::invalid(format!("{reserved_name} is {other}; it must be 0"))),
        (other, _) => Err(Error::invalid(format!("{name} is {other}; it must be 0 or 1"))),
    }
}

/// Copies the caller's struct. `argument` is the parameter's name.
///
/// # Safety
/// `pointer` is NULL or names memory of as many readable bytes as its first eight say.
pub unsafe fn read<T: SizedStruct>(argument: &str, pointer: *const T) -> Result<T> {
    // SAFETY: by the caller's promise.
    let size = unsafe { size_of_struct(argument, pointer)? };
    let known = size.min(size_of::<T>());
    let bytes = pointer.cast::<u8>();
    // SAFETY: `size` bytes are readable, and `known` is not more.
    let tail = unsafe { std::slice::from_raw_parts(bytes.add(known), size - known) };
    if let Some(index) = tail.iter().position(|byte| *byte != 0) {
        return Err(Error::invalid(format!(
            "{argument}.struct_size is {size}: byte {} of a newer {} is set, which this library ({} bytes) does not know; it must be zero",
            known + index,
            T::NAME,
            size_of::<T>()
        )));
    }
    let mut copy = MaybeUninit::<T>::zeroed();
    // SAFETY: `known` bytes are readable and fit in `copy`; any bytes are a valid T.
    unsafe {
        std::ptr::copy_nonoverlapping(bytes, copy.as_mut_ptr().cast::<u8>(), known);
        Ok(copy.assume_init())
    }
}

/// Bytes of the caller's output struct, checked before the work starts.
///
/// # Safety
/// As `read`.
pub unsafe fn output_size<T: SizedStruct>(argument: &str, pointer: *mut T) -> Result<usize> {
    // SAFETY: by the caller's promise.
    unsafe { size_of_struct(argument, pointer) }
}

/// Writes an output struct behind its first eight bytes. Bytes behind our struct, up to `size`,
/// become zero.
///
/// # Safety
/// `size` came from `output_size` for this pointer, and as many bytes are writable.
pub unsafe fn write<T: SizedStruct>(pointer: *mut T, size: usize, value: &T) {
    const HEAD: usize = size_of::<u64>();
    let known = size.min(size_of::<T>());
    let (from, to) = (std::ptr::from_ref(value).cast::<u8>(), pointer.cast::<u8>());
    // SAFETY: HEAD <= OLDEST <= known <= size, and the caller promises `size` writable bytes.
    unsafe {
        std::ptr::copy_nonoverlapping(from.add(HEAD), to.add(HEAD), known - HEAD);
        std::ptr::write_bytes(to.add(known), 0, size - known);
    }
}

/// # Safety
/// As `read`.
unsafe fn size_of_struct<T: SizedStruct>(argument: &str, pointer: *const T) -> Result<usize> {
    if pointer.is_null() {
        return Err(Error::invalid(format!("{argument} is NULL; it must point to a {}", T::NAME)));
    }
    if !pointer.is_aligned() {
        return Err(Error::invalid(format!(
            "{argument} is {pointer:p}; a {} must be aligned to {} bytes",
            T::NAME,
            align_of::<T>()
        )));
    }
    // SAFETY: not NULL and aligned, and the caller promises at least the size itself.
    let size = unsafe { pointer.cast::<u64>().read() };
    // The size of every struct of every release is a multiple of its alignment. Another size could
    // end inside of a pointer, and the half of it would count as an address.
    if size < T::OLDEST as u64 || size > MAX_STRUCT_SIZE || !size.is_multiple_of(align_of::<T>() as u64) {
        return Err(Error::invalid(format!(
            "{argument}.struct_size is {size}; it must be sizeof({}), at least {}, at most {MAX_STRUCT_SIZE} and a multiple of {}",
            T::NAME,
            T::OLDEST,
            align_of::<T>()
        )));
    }
    Ok(size as usize)
}

/// Checks the pointer to an output.
pub fn output<T>(argument: &str, pointer: *mut T) -> Result<*mut T> {
    if pointer.is_null() || !pointer.is_aligned() {
        return Err(Error::invalid(format!(
            "{argument} is {}; it must point to {} writable bytes, aligned to {}",
            address(pointer.cast()),
            size_of::<T>(),
            align_of::<T>()
        )));
    }
    Ok(pointer)
}

/// An address for a message.
pub fn address(pointer: *const c_void) -> String {
    if pointer.is_null() { "NULL".to_owned() } else { format!("{pointer:p}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Clone, Copy, Debug, PartialEq)]
    #[repr(C)]
    struct Grown {
        struct_size: u64,
        first: u64,
        second: u64,
    }
    // SAFETY: repr(C), three u64.
    unsafe impl SizedStruct for Grown {
        const NAME: &'static str = "grown";
        const OLDEST: usize = 16;
    }

    fn read_words(words: &[u64]) -> Result<Grown> {
        // SAFETY: the tests give as many words as the first one says, or a size that is refused
        // unread.
        unsafe { read("params", words.as_ptr().cast::<Grown>()) }
    }

    #[test]
    fn an_older_callers_missing_tail_is_zero() {
        assert_eq!(read_words(&[16, 7]).unwrap(), Grown { struct_size: 16, first: 7, second: 0 });
    }

    #[test]
    fn a_newer_callers_tail_is_accepted_only_as_zeros() {
        assert_eq!(read_words(&[32, 7, 8, 0]).unwrap().second, 8);
        let error = read_words(&[32, 7, 8, 1]).unwrap_err();
        assert!(error.message.contains("struct_size is 32: byte 24"), "{error}");
    }

    #[test]
    fn absurd_sizes_are_refused_unread() {
        for size in [0, 1, 15, MAX_STRUCT_SIZE + 1, u64::MAX] {
            let error = read_words(&[size]).unwrap_err();
            assert!(error.message.contains(&format!("struct_size is {size};")), "{error}");
        }
    }

    #[test]
    fn a_size_that_ends_inside_of_a_field_is_refused() {
        for size in [17, 20, 23, 28] {
            let error = read_words(&[size, 7, 8, 0]).unwrap_err();
            assert!(error.message.ends_with("a multiple of 8"), "{error}");
        }
    }

    #[test]
    fn an_output_is_written_to_its_own_size() {
        let mut words = [16_u64, 1, 2, 3];
        let value = Grown { struct_size: 0, first: 7, second: 8 };
        // SAFETY: 16 and then 32 bytes of `words` are writable.
        unsafe { write(words.as_mut_ptr().cast::<Grown>(), 16, &value) };
        assert_eq!(words, [16, 7, 2, 3]);
        // SAFETY: as above.
        unsafe { write(words.as_mut_ptr().cast::<Grown>(), 32, &value) };
        assert_eq!(words, [16, 7, 8, 0]);
    }
}
