//! Pool: threads for work that is side by side for a moment, such as compiling several kernels.
//!
//! They end with the work. rayon's global pool belongs to the host program and is never used.

use crate::error::{Error, Result, Status};

/// Runs `work` on a thread of a pool with one thread for each core, at most `most`, or on this
/// thread if it belongs to a pool. Parallel iterators of rayon inside `work` run on the pool.
pub fn install<R: Send>(most: usize, work: impl FnOnce() -> R + Send) -> Result<R> {
    if rayon::current_thread_index().is_some() {
        return Ok(work());
    }
    let pool = rayon::ThreadPoolBuilder::new()
        // The panic hook of the C face knows our threads by their names.
        .thread_name(|index| format!("flashtune-build-{index}"))
        .num_threads(std::thread::available_parallelism().map_or(1, usize::from).min(most))
        .build()
        .map_err(|error| Error::new(Status::OutOfMemory, format!("cannot start threads: {error}")))?;
    Ok(pool.install(work))
}

/// What both return. `first` runs on a thread of its own. If no thread can be started, or `first`
/// panics on it, `first` runs on this thread after `second`.
pub fn beside<A: Send, B>(first: impl Fn() -> A + Sync, second: impl FnOnce() -> B) -> (A, B) {
    let first = &first;
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().name("flashtune-beside".to_owned()).spawn_scoped(scope, first);
        let second = second();
        let of_thread = thread.ok().and_then(|thread| thread.join().ok());
        (of_thread.unwrap_or_else(first), second)
    })
}
