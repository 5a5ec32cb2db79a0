//! The C functions that write this machine's tuning records to a file and read them from one.

use super::context::flashtune_context;
use super::panic_boundary::enter;
use super::{sized, text};
use crate::error::Result;
use std::ffi::c_char;

/// Writes this machine's records to the file path and replaces what it held. The file has sorted
/// lines of JSON: the same records give the same bytes. count receives their number; it may be
/// NULL. May be called from any thread.
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
        unsafe { write_count(count, || context.engine.export_records(&path)) }
    })
}

/// Adds the records of a file that flashtune_records_export wrote to this machine's.
///
/// Two records of the same device and problem compete. If only one of them tried the kernel family
/// that this library prefers for the problem, it wins. Otherwise the one with the lower median time
/// wins. Records that this library does not understand are skipped, and so are records whose config
/// it does not accept on their device.
///
/// count receives the number of records taken; it may be NULL. May be called from any thread.
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
        unsafe { write_count(count, || context.engine.import_records(&path)) }
    })
}

/// Runs `work` and writes its number to `count`. The pointer is checked before the work starts.
///
/// # Safety `count` is NULL or may be written.
unsafe fn write_count(count: *mut u64, work: impl FnOnce() -> Result<usize>) -> Result<()> {
    let count = if count.is_null() { None } else { Some(sized::output("count", count)?) };
    let number = work()? as u64;
    if let Some(count) = count {
        // SAFETY: not NULL, aligned, and the caller promises that it may be written.
        unsafe { count.write(number) };
    }
    Ok(())
}
