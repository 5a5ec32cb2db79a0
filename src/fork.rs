//! Fork: tells a context whether this process is the one that made it.
//!
//! Threads do not survive a fork, nor does CUDA. A call that needed them would wait for ever.

use std::ffi::c_int;
use std::sync::Once;
use std::sync::atomic::{AtomicU32, Ordering};

static FORKS: AtomicU32 = AtomicU32::new(0);

unsafe extern "C" {
    fn pthread_atfork(
        prepare: Option<unsafe extern "C" fn()>,
        parent: Option<unsafe extern "C" fn()>,
        child: Option<unsafe extern "C" fn()>,
    ) -> c_int;
}

unsafe extern "C" fn count_fork() {
    FORKS.fetch_add(1, Ordering::Relaxed);
}

/// The number of forks between this process and the one that called this first. It costs a load.
pub fn generation() -> u32 {
    static REGISTERED: Once = Once::new();
    REGISTERED.call_once(|| {
        // SAFETY: the handler only adds to an atomic, which is allowed after a fork. The library is
        // never unloaded, so the handler stays. A failure leaves the count at 0.
        unsafe { pthread_atfork(None, None, Some(count_fork)) };
    });
    FORKS.load(Ordering::Relaxed)
}
