//! Failures of a handler: a code of XLA and one sentence.

use super::c_api::{
    CODE_FAILED_PRECONDITION, CODE_INTERNAL, CODE_INVALID_ARGUMENT, CODE_RESOURCE_EXHAUSTED, CODE_UNIMPLEMENTED,
};
use crate::capi::last_error;
use crate::capi::status::{
    FLASHTUNE_STATUS_INVALID_ARGUMENT, FLASHTUNE_STATUS_NO_COMPILER, FLASHTUNE_STATUS_NO_DEVICE,
    FLASHTUNE_STATUS_NOT_PREPARED, FLASHTUNE_STATUS_OK, FLASHTUNE_STATUS_OUT_OF_MEMORY, FLASHTUNE_STATUS_UNSUPPORTED,
};
use crate::error::Error;

#[derive(Debug)]
pub struct Failure {
    /// A CODE_* of XLA's C API.
    pub code: i32,
    pub message: String,
}

pub type Result<T> = std::result::Result<T, Failure>;

impl Failure {
    pub fn invalid(message: impl Into<String>) -> Self {
        Failure { code: CODE_INVALID_ARGUMENT, message: message.into() }
    }

    /// From a status and a sentence of the C face.
    pub fn of(status: i32, message: String) -> Self {
        let code = match status {
            FLASHTUNE_STATUS_INVALID_ARGUMENT => CODE_INVALID_ARGUMENT,
            FLASHTUNE_STATUS_UNSUPPORTED => CODE_UNIMPLEMENTED,
            FLASHTUNE_STATUS_NOT_PREPARED | FLASHTUNE_STATUS_NO_DEVICE | FLASHTUNE_STATUS_NO_COMPILER => {
                CODE_FAILED_PRECONDITION
            }
            FLASHTUNE_STATUS_OUT_OF_MEMORY => CODE_RESOURCE_EXHAUSTED,
            _ => CODE_INTERNAL,
        };
        Failure { code, message }
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Failure::of(error.status as i32, error.message)
    }
}

/// The result of a function of the C face, which this thread has just called.
pub fn check(status: i32) -> Result<()> {
    if status == FLASHTUNE_STATUS_OK {
        return Ok(());
    }
    Err(Failure::of(status, last_error::current()))
}
