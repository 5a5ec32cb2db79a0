//! Streams: our own, and two facts about a caller's.

use super::context::{Context, Current};
use crate::error::Result;
use cudarc::driver::sys::{CUstream, CUstream_flags};
use std::ffi::{c_uint, c_void};
use std::sync::Arc;

pub struct OwnedStream {
    context: Arc<Context>,
    raw: CUstream,
}

// SAFETY: a CUstream may be used from any thread.
unsafe impl Send for OwnedStream {}
// SAFETY: as above; the driver orders concurrent calls.
unsafe impl Sync for OwnedStream {}

impl OwnedStream {
    /// A stream that neither waits for the legacy default stream nor makes it wait.
    pub fn new(context: &Arc<Context>) -> Result<OwnedStream> {
        let _setup = context.setup()?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: the context is current; destroyed in drop.
        unsafe { context.driver().stream_create(&mut raw, CUstream_flags::CU_STREAM_NON_BLOCKING as c_uint) }?;
        Ok(OwnedStream { context: context.clone(), raw })
    }

    pub(super) fn raw(&self) -> CUstream {
        self.raw
    }

    pub fn handle(&self) -> *mut c_void {
        self.raw.cast()
    }

    pub fn synchronize(&self) -> Result<()> {
        let _current = self.context.enter()?;
        // SAFETY: our own live stream.
        unsafe { self.context.driver().stream_synchronize(self.raw) }
    }
}

impl Drop for OwnedStream {
    fn drop(&mut self) {
        // SAFETY: created in `new`, destroyed once; queued work still completes.
        self.context.release(|driver| unsafe { driver.stream_destroy(self.raw) });
    }
}

/// Whether work on a caller's stream would be captured into a graph. The legacy stream counts as
/// capturing while a stream that it synchronises with does: any work on it would break that
/// capture.
///
/// # Safety
/// `stream` is a live CUstream of the current context, NULL, or one of the driver's special
/// handles.
pub unsafe fn is_capturing(current: &Current<'_>, stream: *mut c_void) -> Result<bool> {
    current.driver().capture_status(stream.cast())
}

/// The number of a stream. No other stream of the process ever has it. The legacy and the
/// per-thread default stream have numbers too.
///
/// # Safety
/// As `is_capturing`.
pub unsafe fn id(current: &Current<'_>, stream: *mut c_void) -> Result<u64> {
    let mut id = 0;
    // SAFETY: the caller's promise; writes one u64.
    unsafe { current.driver().stream_get_id(stream.cast(), &mut id) }?;
    Ok(id)
}
