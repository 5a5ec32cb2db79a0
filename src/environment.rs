//! The environment: the one place where the library reads a variable.
//!
//! Variables choose folders, and libraries to load. A program that runs with more rights than its
//! caller (setuid, setgid, file capabilities) must not take them from that caller. There every
//! variable counts as unset, as with secure_getenv of the C library.

use std::ffi::OsString;

/// The variable's value; None if it is not set, or if this process is a privileged program.
pub fn variable(name: &str) -> Option<OsString> {
    match is_privileged() {
        true => None,
        false => std::env::var_os(name),
    }
}

#[cfg(target_os = "linux")]
fn is_privileged() -> bool {
    // SAFETY: getauxval takes a number and reads what the kernel gave to the process at its start.
    unsafe { libc::getauxval(libc::AT_SECURE) != 0 }
}

#[cfg(not(target_os = "linux"))]
fn is_privileged() -> bool {
    // SAFETY: these take no arguments and cannot fail.
    unsafe { libc::getuid() != libc::geteuid() || libc::getgid() != libc::getegid() }
}
