//! Statuses of the C face as errors.

use crate::capi::last_error::flashtune_last_error;
use crate::error::{Error, Result, Status};
use std::ffi::CStr;

/// The result of a call of the C face, whose reason is this thread's last error.
pub(super) fn checked(status: i32) -> Result<()> {
    let status = Status::from_number(status);
    match status {
        Status::Ok => Ok(()),
        failed => {
            // SAFETY: the text ends in NUL and lives until this thread's next call.
            let reason = unsafe { CStr::from_ptr(flashtune_last_error()) };
            Err(Error::new(failed, reason.to_string_lossy()))
        }
    }
}
