//! Status codes and versions as C sees them. `error::Status` is the home of the numbers. cbindgen
//! reads only literals, so the numbers are repeated here, and assertions below hold the two equal.

use crate::error::Status;
use std::ffi::{CStr, c_char};

/// Success. After any other status all outputs are untouched, and flashtune_last_error() returns
/// the reason.
pub const FLASHTUNE_STATUS_OK: i32 = 0;
/// An argument is wrong. The message names it, its value and what is allowed.
pub const FLASHTUNE_STATUS_INVALID_ARGUMENT: i32 = 1;
/// The problem is valid, but this build, device or backend cannot run it.
pub const FLASHTUNE_STATUS_UNSUPPORTED: i32 = 2;
/// The problem has no plan, and preparing one is not allowed now: the stream is capturing or the
/// context is sealed.
pub const FLASHTUNE_STATUS_NOT_PREPARED: i32 = 3;
/// There is no usable device, or libcuda is missing. The message lists the places tried.
pub const FLASHTUNE_STATUS_NO_DEVICE: i32 = 4;
/// No usable libnvrtc was found. It must be version 12.0 or later, and its major version at most
/// that of the CUDA version that the driver supports. The message lists the places tried.
pub const FLASHTUNE_STATUS_NO_COMPILER: i32 = 5;
/// NVRTC rejected a kernel.
pub const FLASHTUNE_STATUS_COMPILE_FAILED: i32 = 6;
/// The CUDA driver returned an error. If a launch had enqueued some of its kernels before, its
/// outputs and its workspace may be partly written.
pub const FLASHTUNE_STATUS_CUDA: i32 = 7;
/// Host or device memory ran out, or the system refused a thread.
pub const FLASHTUNE_STATUS_OUT_OF_MEMORY: i32 = 8;
/// The workspace has fewer bytes than this call needs.
pub const FLASHTUNE_STATUS_WORKSPACE_TOO_SMALL: i32 = 9;
/// A file could not be read or written.
pub const FLASHTUNE_STATUS_IO: i32 = 10;
/// The progress callback stopped the run. Completed measurements are kept.
pub const FLASHTUNE_STATUS_CANCELLED: i32 = 11;
/// A bug in flashtune. Please report the message.
pub const FLASHTUNE_STATUS_INTERNAL: i32 = 12;

// One line for each status: C's constant, the variant of `Status`, and its text.
macro_rules! statuses {
    ($($number:ident = $status:ident, $name:literal;)*) => {
        $(const _: () = assert!($number == Status::$status as i32);)*

        fn name_of(status: i32) -> &'static CStr {
            match status {
                $($number => $name,)*
                _ => c"unknown status",
            }
        }

        /// The status of a number that a function of the C face returned.
        pub(crate) fn of_number(status: i32) -> Status {
            match status {
                $($number => Status::$status,)*
                _ => Status::Internal,
            }
        }
    };
}

statuses! {
    FLASHTUNE_STATUS_OK = Ok, c"ok";
    FLASHTUNE_STATUS_INVALID_ARGUMENT = InvalidArgument, c"invalid argument";
    FLASHTUNE_STATUS_UNSUPPORTED = Unsupported, c"unsupported";
    FLASHTUNE_STATUS_NOT_PREPARED = NotPrepared, c"not prepared";
    FLASHTUNE_STATUS_NO_DEVICE = NoDevice, c"no device";
    FLASHTUNE_STATUS_NO_COMPILER = NoCompiler, c"no compiler";
    FLASHTUNE_STATUS_COMPILE_FAILED = CompileFailed, c"compile failed";
    FLASHTUNE_STATUS_CUDA = Cuda, c"CUDA error";
    FLASHTUNE_STATUS_OUT_OF_MEMORY = OutOfMemory, c"out of memory";
    FLASHTUNE_STATUS_WORKSPACE_TOO_SMALL = WorkspaceTooSmall, c"workspace too small";
    FLASHTUNE_STATUS_IO = Io, c"input or output error";
    FLASHTUNE_STATUS_CANCELLED = Cancelled, c"cancelled";
    FLASHTUNE_STATUS_INTERNAL = Internal, c"internal error";
}

/// Returns a status in words, for example "invalid argument". A number that is no status gives
/// "unknown status".
///
/// The string is static: it is never NULL and must not be freed. May be called from any thread,
/// also during stream capture.
#[unsafe(no_mangle)]
pub extern "C" fn flashtune_status_string(status: i32) -> *const c_char {
    name_of(status).as_ptr()
}

/// Returns the version of the loaded library, to compare with FLASHTUNE_VERSION: major * 1000000 +
/// minor * 1000 + patch. May be called from any thread, also during stream capture.
#[unsafe(no_mangle)]
pub extern "C" fn flashtune_version() -> i32 {
    VERSION
}

/// Returns the version of the loaded library as text, for example "0.1.0".
///
/// The string is static: it is never NULL and must not be freed. May be called from any thread,
/// also during stream capture.
#[unsafe(no_mangle)]
pub extern "C" fn flashtune_version_string() -> *const c_char {
    VERSION_STRING.as_ptr().cast()
}

// These constants must stay private. cbindgen would print public ones as macros beside those of
// build.rs.
const VERSION: i32 = decimal(env!("CARGO_PKG_VERSION_MAJOR")) * 1_000_000
    + decimal(env!("CARGO_PKG_VERSION_MINOR")) * 1_000
    + decimal(env!("CARGO_PKG_VERSION_PATCH"));
const VERSION_STRING: &str = concat!(env!("CARGO_PKG_VERSION"), "\0");

const fn decimal(digits: &str) -> i32 {
    let (mut value, mut i) = (0, 0);
    while i < digits.len() {
        value = value * 10 + (digits.as_bytes()[i] - b'0') as i32;
        i += 1;
    }
    value
}
