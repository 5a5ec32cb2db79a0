//! This machine's tuning records out to a file and in from one.

use super::context::flashtune_context;
use super::panic_boundary::enter;
use super::{sized, text};
use crate::error::Result;
use std::ffi::c_char;

/// Writes this machine's records to the file path, replacing it: sorted lines of JSON, the same bytes for the same
/// records. count gets their number; it may be NULL. Any thread.
///
/// Statuses: OK, INVALID_ARGUMENT, IO.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flashtune_records_export(
    context: *mut flashtune_context,
    path: *const c_char,
    count: *mut u64,
) -> i32 {
    enter(|| {
        // SAFETY: the C caller promises a live context or NULL.
        let context = unsafe { flashtune_context::of(context)? };
        // SAFETY: the C caller promises NULL or a terminated string.
        let path = unsafe { text::path("path", path)? };
        // SAFETY: the C caller promises that count is NULL or may be written.
        unsafe { counted(count, || context.engine.export_records(&path)) }
    })
}

/// Takes the records of a file that flashtune_records_export wrote into this machine's. A record replaces the one of the
/// same device and problem where it alone has tried the kernel family that is preferred now or, where that does not tell
/// them apart, where its median time is lower. Records that this library does not understand, or whose config it does not
/// accept on their device, are passed over. count gets how many were taken; it may be NULL. Any thread.
///
/// Statuses: OK, INVALID_ARGUMENT, IO.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flashtune_records_import(
    context: *mut flashtune_context,
    path: *const c_char,
    count: *mut u64,
) -> i32 {
    enter(|| {
        // SAFETY: the C caller promises a live context or NULL.
        let context = unsafe { flashtune_context::of(context)? };
        // SAFETY: the C caller promises NULL or a terminated string.
        let path = unsafe { text::path("path", path)? };
        // SAFETY: the C caller promises that count is NULL or may be written.
        unsafe { counted(count, || context.engine.import_records(&path)) }
    })
}

/// Runs `work` and writes its number, once it is known that it can be written.
///
/// # Safety
/// `count` is NULL or may be written.
unsafe fn counted(count: *mut u64, work: impl FnOnce() -> Result<usize>) -> Result<()> {
    let count = if count.is_null() { None } else { Some(sized::output("count", count)?) };
    let number = work()? as u64;
    if let Some(count) = count {
        // SAFETY: not NULL, aligned, and the caller promises that it may be written.
        unsafe { count.write(number) };
    }
    Ok(())
}
