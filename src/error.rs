//! Errors: a status with a number that never changes, and a sentence for a person.
//!
//! The numbers are those of the C face; `capi` hands them out unchanged. A retired number stays
//! listed.

use std::fmt;

/// The kind of a failure. The numbers are those of the C header.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(i32)]
pub enum Status {
    /// No failure. No [`Error`] has it.
    Ok = 0,
    /// An argument is wrong; the message names it, its value and what is allowed.
    InvalidArgument = 1,
    /// The problem is valid, and this build, device or backend does not do it.
    Unsupported = 2,
    /// The plan is not prepared and may not be prepared now (stream capture, sealed context).
    NotPrepared = 3,
    /// No usable device, or libcuda is missing; the message lists the places tried.
    NoDevice = 4,
    /// libnvrtc is missing or too old or new for the driver; the message lists the places tried.
    NoCompiler = 5,
    /// NVRTC refused a kernel.
    CompileFailed = 6,
    /// The CUDA driver returned an error.
    Cuda = 7,
    /// Host or device memory ran out, or the system refused a thread.
    OutOfMemory = 8,
    /// The workspace has fewer bytes than the call needs.
    WorkspaceTooSmall = 9,
    /// A file could not be read or written.
    Io = 10,
    /// The caller's progress callback or a signal stopped the work. Finished work is kept.
    Cancelled = 11,
    /// A bug in flashtune: the boundary caught a panic.
    Internal = 12,
}

/// A failure: what kind it is, and one sentence that names the reason.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Error {
    /// The kind of failure.
    pub status: Status,
    /// The reason.
    pub message: String,
}

/// A value or an [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    pub fn new(status: Status, message: impl Into<String>) -> Self {
        Error { status, message: message.into() }
    }

    pub fn invalid(message: impl Into<String>) -> Self {
        Error::new(Status::InvalidArgument, message)
    }

    pub fn unsupported(message: impl Into<String>) -> Self {
        Error::new(Status::Unsupported, message)
    }

    /// The same error, with the action that failed put in front.
    pub fn context(mut self, doing: impl fmt::Display) -> Self {
        self.message = format!("{doing}: {}", self.message);
        self
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for Error {}

impl From<std::io::Error> for Error {
    fn from(error: std::io::Error) -> Self {
        Error::new(Status::Io, error.to_string())
    }
}
