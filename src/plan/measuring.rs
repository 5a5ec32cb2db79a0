//! Measuring: one tuning run at a time, since measurements side by side would disturb each other.
//!
//! A run's progress callback may call the engine again on the same thread. A second run would then
//! wait for the first, which waits for the callback; `refuse_inside` turns that deadlock into an
//! error.

use crate::error::{Error, Result};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread::ThreadId;

#[derive(Default)]
pub struct Measuring {
    run: Mutex<()>,
    /// The thread that holds `run`.
    thread: Mutex<Option<ThreadId>>,
}

/// A run that goes on while this lives.
pub struct Run<'a> {
    measuring: &'a Measuring,
    _alone: MutexGuard<'a, ()>,
}

impl Measuring {
    /// Waits for the run of another thread.
    pub fn begin(&self) -> Run<'_> {
        let alone = self.run.lock().unwrap_or_else(PoisonError::into_inner);
        self.set_thread(Some(std::thread::current().id()));
        Run { measuring: self, _alone: alone }
    }

    /// An error if this thread is inside a run of its own.
    pub fn refuse_inside(&self, call: &str) -> Result<()> {
        match *self.thread.lock().unwrap_or_else(PoisonError::into_inner) == Some(std::thread::current().id()) {
            false => Ok(()),
            true => Err(Error::invalid(format!(
                "{call} was called from the progress callback of a measurement of the same context, which must end before another can begin"
            ))),
        }
    }

    fn set_thread(&self, thread: Option<ThreadId>) {
        *self.thread.lock().unwrap_or_else(PoisonError::into_inner) = thread;
    }
}

impl Drop for Run<'_> {
    fn drop(&mut self) {
        // The lock is released after this: the next run sets its own thread.
        self.measuring.set_thread(None);
    }
}
