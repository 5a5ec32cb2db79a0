//! The C functions that write this machine's tuning records to a file and read them from one.

use super::context::flashtune_context;
use super::panic_boundary::enter;
use super::{sized, text};
use crate::error::Result;
use crate::plan::Engine;
use std::ffi::c_char;
use std::path::Path;

/// Writes this machine's records to the file path and replaces what it held. The file has sorted
/// lines of JSON: the same records give the same bytes. The file appears whole or not at all. It
/// keeps the permissions of the file that it replaces; a new file is private to this user. count
/// receives the number of records; it may be NULL. May be called from any thread.
///
/// Statuses: OK, INVALID_ARGUMENT, IO, OUT_OF_MEMORY.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flashtune_records_export(
    context: *mut flashtune_context,
    path: *const c_char,
    count: *mut u64,
) -> i32 {
    // SAFETY: the C caller promises what the header says. This holds for the function below too.
    unsafe { transfer(context, path, count, Engine::export_records) }
}

/// Adds the records of a file that flashtune_records_export wrote to this machine's.
///
/// A problem that this machine has measured itself keeps its own record. Two imported records of
/// the same device and problem compete. If only one of them tried the kernel family that this
/// library prefers for the problem, it wins. Otherwise the one with the lower median time wins.
/// Lines that this library does not understand are skipped, and so are records whose config it does
/// not accept on their device or whose times no device reaches. One log line says how many were
/// skipped.
///
/// path must name a regular file. count receives the number of records taken; it may be NULL. May
/// be called from any thread.
///
/// Statuses: OK, INVALID_ARGUMENT, IO (the records before the place that could not be read are
/// taken), OUT_OF_MEMORY.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flashtune_records_import(
    context: *mut flashtune_context,
    path: *const c_char,
    count: *mut u64,
) -> i32 {
    // SAFETY: as above.
    unsafe { transfer(context, path, count, import) }
}

fn import(engine: &Engine, path: &Path) -> Result<usize> {
    let imported = engine.import_records(path, false)?;
    if let Some(first) = &imported.first_refusal {
        log::warn!("{}: {} lines refused; the first is {first}", path.display(), imported.refused);
    }
    Ok(imported.taken.len())
}

/// Runs `work` on the file and writes its number to `count`. All pointers are checked before the
/// work starts.
///
/// # Safety
/// `context` is NULL or live, `path` NULL or a NUL-terminated string, and `count` NULL or may be
/// written.
unsafe fn transfer(
    context: *mut flashtune_context,
    path: *const c_char,
    count: *mut u64,
    work: fn(&Engine, &Path) -> Result<usize>,
) -> i32 {
    enter(|| {
        // SAFETY: by the caller's promise.
        let context = unsafe { flashtune_context::of(context)? };
        context.require_memory("records")?;
        // SAFETY: by the caller's promise.
        let path = unsafe { text::path("path", path)? };
        let count = if count.is_null() { None } else { Some(sized::output("count", count)?) };
        let number = work(&context.engine, &path)? as u64;
        if let Some(count) = count {
            // SAFETY: not NULL, aligned, and the caller promises that it may be written.
            unsafe { count.write(number) };
        }
        Ok(())
    })
}
