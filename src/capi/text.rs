//! Text between C and Rust: C strings in, fixed char arrays out.

use crate::error::{Error, Result};
use std::ffi::{CStr, OsStr, c_char};
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

/// A required path.
///
/// # Safety
/// `pointer` is NULL or a NUL-terminated string.
pub unsafe fn path(argument: &str, pointer: *const c_char) -> Result<PathBuf> {
    // SAFETY: by the caller's promise.
    match unsafe { optional_path(pointer) } {
        Some(path) if !path.as_os_str().is_empty() => Ok(path),
        Some(_) => Err(Error::invalid(format!("{argument} is \"\"; it must be the path of a file"))),
        None => Err(Error::invalid(format!("{argument} is NULL; it must be the path of a file"))),
    }
}

/// A path that may be NULL. Its bytes are used unchanged, as the system does.
///
/// # Safety
/// As `path`.
pub unsafe fn optional_path(pointer: *const c_char) -> Option<PathBuf> {
    // SAFETY: not NULL, and the caller promises a terminated string.
    let bytes = (!pointer.is_null()).then(|| unsafe { CStr::from_ptr(pointer) }.to_bytes())?;
    Some(PathBuf::from(OsStr::from_bytes(bytes)))
}

/// Text as a char array of a struct. It always ends in NUL. Text that is too long is cut between
/// two characters.
pub fn fixed<const N: usize>(text: &str) -> [c_char; N] {
    let mut chars = [0; N];
    let fits = |end: &usize| text.is_char_boundary(*end);
    let end = (0..=text.len().min(N - 1)).rev().find(fits).unwrap_or(0);
    for (to, from) in chars.iter_mut().zip(text[..end].bytes()) {
        *to = from as c_char;
    }
    chars
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_text_is_cut_between_characters_and_terminated() {
        let text = |chars: &[c_char]| chars.iter().map(|c| *c as u8).collect::<Vec<_>>();
        assert_eq!(text(&fixed::<6>("abc")), b"abc\0\0\0");
        assert_eq!(text(&fixed::<4>("abcdef")), b"abc\0");
        assert_eq!(text(&fixed::<4>("abß")), b"ab\0\0");
    }
}
