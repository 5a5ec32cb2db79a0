//! The command line's answer to too little memory: exit code 1 after the sentence of the standard
//! library, which would otherwise end the program by a signal. The C library installs nothing.

/// Ends the program with exit code 1 at every SIGABRT, which the standard library raises after it
/// has reported a failed allocation on standard error.
pub fn exit_instead_of_abort() {
    // SAFETY: the handler calls nothing but `_exit`, which is safe in a signal handler.
    unsafe { libc::signal(libc::SIGABRT, exit as *const () as libc::sighandler_t) };
}

extern "C" fn exit(_signal: libc::c_int) {
    // SAFETY: `_exit` runs no handlers and frees nothing.
    unsafe { libc::_exit(1) };
}
