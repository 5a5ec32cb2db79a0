//! Statuses of the C face as errors.

use crate::capi::{last_error, status};
use crate::error::{Error, Result, Status};

/// The result of a call of the C face, whose reason is this thread's last error.
pub(super) fn checked(number: i32) -> Result<()> {
    match status::of_number(number) {
        Status::Ok => Ok(()),
        failed => Err(Error::new(failed, last_error::current())),
    }
}
