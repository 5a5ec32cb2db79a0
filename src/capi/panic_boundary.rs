//! The one entry into the library from C. It turns every result and every panic into a status, and
//! prints nothing.
//!
//! A panic is a bug of ours and becomes FLASHTUNE_STATUS_INTERNAL. Rust's panic hook prints before
//! any code can catch the panic. Our hook therefore stands in front of the previous one. It
//! swallows panics of threads inside a C call, and of the threads that this library starts (all
//! named "flashtune…"). Every other panic goes to the previous hook.
//!
//! The shared library has its own copy of std, so its hook is invisible to a Rust host. A Rust
//! program that links the rlib shares the hook. If it sets its own hook later, our panics appear on
//! stderr; nothing else changes.

use super::last_error;
use crate::error::{Error, Result, Status};
use std::any::Any;
use std::cell::Cell;
use std::panic::{AssertUnwindSafe, PanicHookInfo, catch_unwind};
use std::sync::Once;

/// Runs the body of a C function and keeps its error for flashtune_last_error.
pub fn enter(body: impl FnOnce() -> Result<()>) -> i32 {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| std::panic::set_hook(silenced(std::panic::take_hook())));

    let _scope = CallScope::begin();
    // Unwind safety: the plan layer's locks guard all state that a panic may leave half changed,
    // and a poisoned lock gives a status.
    let result = catch_unwind(AssertUnwindSafe(body)).unwrap_or_else(|payload| Err(internal(payload)));
    match result {
        Ok(()) => {
            last_error::clear();
            Status::Ok as i32
        }
        Err(error) => {
            last_error::set(&error.message);
            error.status as i32
        }
    }
}

fn internal(payload: Box<dyn Any + Send>) -> Error {
    let text = payload.downcast_ref::<String>().map(String::as_str);
    let text = text.or_else(|| payload.downcast_ref::<&str>().copied()).unwrap_or("no message");
    let at = PANIC_PLACE.take();
    let error = Error::new(Status::Internal, format!("flashtune panicked{at}: {text}"));
    // Dropping an unknown payload could panic again, outside of catch_unwind.
    std::mem::forget(payload);
    error
}

thread_local! {
    /// The number of C calls that this thread is inside. A callback that calls back adds one.
    static DEPTH: Cell<u32> = const { Cell::new(0) };
    /// " at file:line" of this thread's last swallowed panic.
    static PANIC_PLACE: Cell<String> = const { Cell::new(String::new()) };
}

struct CallScope;

impl CallScope {
    fn begin() -> Self {
        DEPTH.set(DEPTH.get() + 1);
        CallScope
    }
}

impl Drop for CallScope {
    fn drop(&mut self) {
        DEPTH.set(DEPTH.get() - 1);
    }
}

type Hook = Box<dyn Fn(&PanicHookInfo<'_>) + Sync + Send>;

fn silenced(previous: Hook) -> Hook {
    Box::new(move |info| {
        let thread = std::thread::current();
        let is_ours = DEPTH.get() > 0 || thread.name().is_some_and(|name| name.starts_with("flashtune"));
        match is_ours {
            true => PANIC_PLACE.set(info.location().map(|at| format!(" at {at}")).unwrap_or_default()),
            false => previous(info),
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU32, Ordering};

    #[test]
    fn a_panic_becomes_a_status_and_only_foreign_panics_reach_the_previous_hook() {
        // The first call installs the hook. The test then puts its own before it.
        assert_eq!(enter(|| Ok(())), 0);
        let seen = Arc::new(AtomicU32::new(0));
        let count = seen.clone();
        std::panic::set_hook(silenced(Box::new(move |_| {
            count.fetch_add(1, Ordering::Relaxed);
        })));

        assert_eq!(enter(|| panic!("the {} is upside down", "matrix")), Status::Internal as i32);
        let message = last_error::current();
        assert!(message.contains("panic_boundary.rs:") && message.ends_with("the matrix is upside down"), "{message}");
        let worker = std::thread::Builder::new().name("flashtune-worker".into()).spawn(|| panic!("in a worker"));
        assert!(worker.unwrap().join().is_err());
        assert_eq!(seen.load(Ordering::Relaxed), 0);

        assert!(
            std::thread::Builder::new().name("host".into()).spawn(|| panic!("the host's")).unwrap().join().is_err()
        );
        assert_eq!(seen.load(Ordering::Relaxed), 1);
        drop(std::panic::take_hook());
    }

    #[test]
    fn an_error_keeps_its_status_and_the_next_success_clears_its_message() {
        assert_eq!(enter(|| Err(Error::unsupported("no fp64"))), Status::Unsupported as i32);
        assert_eq!(last_error::current(), "no fp64");
        assert_eq!(enter(|| Ok(())), 0);
        assert_eq!(last_error::current(), "");
    }
}
