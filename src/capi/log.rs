//! Hands the library's log lines to a callback of the host program. Without a callback the library
//! writes no log line anywhere.

use super::panic_boundary::enter;
use crate::error::{Error, Result, Status};
use log::{LevelFilter, Log, Metadata, Record};
use std::cell::Cell;
use std::ffi::{CString, c_char, c_void};
use std::sync::{Once, PoisonError, RwLock};

/// A failure that the program will notice.
pub const FLASHTUNE_LOG_ERROR: i32 = 1;
/// A degraded state, for example a cache folder that cannot be used.
pub const FLASHTUNE_LOG_WARN: i32 = 2;
/// A decision: a device, a config or a record.
pub const FLASHTUNE_LOG_INFO: i32 = 3;
/// Details for developers of flashtune.
pub const FLASHTUNE_LOG_DEBUG: i32 = 4;

/// Receives one log line: UTF-8 without a line feed, valid during the callback. level is a
/// FLASHTUNE_LOG_*.
///
/// The library calls it on any thread, also on several at once. The callback must return normally.
/// It must call no flashtune function except flashtune_status_string and flashtune_version*.
pub type flashtune_log_callback = Option<unsafe extern "C" fn(level: i32, message: *const c_char, user: *mut c_void)>;

/// Sets the process's log callback; NULL removes it. user may be NULL. Each callback receives user,
/// which stays the caller's.
///
/// When this function returns, the previous callback is not running and will not be called again.
/// May be called from any thread, but not from inside the callback.
///
/// Statuses: OK, INVALID_ARGUMENT (called from inside the callback), UNSUPPORTED (a Rust program
/// linked to flashtune's rlib has its own logger, which gets the lines instead).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flashtune_set_log_callback(callback: flashtune_log_callback, user: *mut c_void) -> i32 {
    enter(|| {
        if IN_CALLBACK.get() {
            return Err(Error::invalid("flashtune_set_log_callback was called from inside the log callback"));
        }
        install()?;
        let target = callback.map(|call| Target { call, user });
        let level = if target.is_some() { LevelFilter::Debug } else { LevelFilter::Off };
        *TARGET.write().unwrap_or_else(PoisonError::into_inner) = target;
        log::set_max_level(level);
        Ok(())
    })
}

fn install() -> Result<()> {
    static ONCE: Once = Once::new();
    static LOGGER: CallbackLogger = CallbackLogger;
    ONCE.call_once(|| {
        let _ = log::set_logger(&LOGGER);
    });
    // The process has one logger, and any caller may have set it. A zero-sized static compares by
    // address.
    match std::ptr::addr_eq(log::logger(), &LOGGER) {
        true => Ok(()),
        false => Err(Error::new(Status::Unsupported, "this process already has a logger of its own, set by Rust code")),
    }
}

struct Target {
    call: unsafe extern "C" fn(i32, *const c_char, *mut c_void),
    user: *mut c_void,
}

// SAFETY: the caller of flashtune_set_log_callback promises a callback that any thread may call
// with `user`.
unsafe impl Send for Target {}
// SAFETY: as above.
unsafe impl Sync for Target {}

static TARGET: RwLock<Option<Target>> = RwLock::new(None);

thread_local! {
    /// A line logged from inside the callback is dropped, because taking the lock twice could
    /// deadlock.
    static IN_CALLBACK: Cell<bool> = const { Cell::new(false) };
}

struct CallbackLogger;

impl Log for CallbackLogger {
    fn enabled(&self, metadata: &Metadata) -> bool {
        // Dependencies log too. Their lines mean nothing to the host.
        metadata.target().starts_with("flashtune") && metadata.level() <= log::Level::Debug
    }

    fn log(&self, record: &Record) {
        if !self.enabled(record.metadata()) || IN_CALLBACK.get() {
            return;
        }
        let line = record.args().to_string().replace(['\0', '\n'], " ");
        let line = CString::new(line).unwrap_or_default();
        // The lock is held during the call. A callback that was removed has therefore also
        // returned.
        if let Some(target) = &*TARGET.read().unwrap_or_else(PoisonError::into_inner) {
            IN_CALLBACK.set(true);
            // SAFETY: this is the host's function, called as its type says; `line` outlives the
            // call.
            unsafe { (target.call)(record.level() as i32, line.as_ptr(), target.user) };
            IN_CALLBACK.set(false);
        }
    }

    fn flush(&self) {}
}
