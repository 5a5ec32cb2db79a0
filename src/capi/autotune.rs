//! Tuning on request: the C struct, its checks, and the C function that measures the candidates for
//! one problem.

use super::context::{flashtune_context, time_limit};
use super::operand::Data;
use super::panic_boundary::enter;
use super::params::checked;
use super::pass;
use super::sized::{self, SizedStruct};
use super::types::{flashtune_backward_params, flashtune_forward_params};
use crate::error::{Error, Result};
use crate::problem::Problem;
use crate::tune::{Event, Progress, TuneOptions};
use std::ffi::{CString, c_char, c_void};
use std::ops::ControlFlow;

/// The progress of a tuning run. It belongs to the library and is valid during the callback.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct flashtune_progress {
    /// sizeof(flashtune_progress) of the library. A later field exists only if it lies within this
    /// size.
    pub struct_size: u64,
    /// "compile", "check" or "measure".
    pub phase: *const c_char,
    /// Candidates that this phase has finished.
    pub done: u64,
    /// All candidates of this phase.
    pub total: u64,
    /// Candidates that failed in any phase so far.
    pub failed: u64,
    /// The best config so far. NULL while there is none.
    pub best_config: *const c_char,
    /// Its median time in microseconds. 0 while there is none.
    pub best_us: f64,
}

/// Receives the progress of flashtune_autotune, from time to time, on the calling thread. A result
/// other than 0 stops the run. The callback must return normally.
pub type flashtune_progress_callback =
    Option<unsafe extern "C" fn(progress: *const flashtune_progress, user: *mut c_void) -> i32>;

/// The problem to tune. Exactly one of forward and backward is set. It is borrowed for the call.
/// Its data pointers may be NULL and are not used, because tuning allocates buffers of its own.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct flashtune_autotune_params {
    /// sizeof(flashtune_autotune_params).
    pub struct_size: u64,
    /// The forward pass to tune, or NULL.
    pub forward: *const flashtune_forward_params,
    /// The backward pass to tune, or NULL.
    pub backward: *const flashtune_backward_params,
    /// Time limit in seconds, up to 366 days. 0 means 20 seconds. At the limit, the best config so
    /// far is kept.
    pub time_limit_seconds: f64,
    /// Receives the progress. NULL if not wanted.
    pub progress: flashtune_progress_callback,
    /// Passed to progress. May be NULL.
    pub progress_user: *mut c_void,
    /// 0 or 1. With 0, a problem that has a record keeps it. With 1, it is measured again.
    pub retune: i32,
    /// Must be 0.
    pub reserved: i32,
}

// SAFETY: repr(C), a u64 first, then numbers, raw pointers and a nullable function pointer. Every
// bit pattern is a value: NULL is None.
unsafe impl SizedStruct for flashtune_autotune_params {
    const NAME: &'static str = "flashtune_autotune_params";
    const OLDEST: usize = 56;
}
// This number grows with the struct. OLDEST stays.
const _: () = assert!(size_of::<flashtune_autotune_params>() == 56);

/// Measures the candidates for one problem on the context's device and keeps the winner. This
/// context uses it from now on, and later processes find it in the cache folder. If the folder
/// cannot be written, the call still succeeds: a log line names the file and the reason, and the
/// record serves this context alone.
///
/// The call allocates device memory for the problem's tensors, uses a stream of its own, and
/// returns when done. May be called from any thread, but not during stream capture. Other threads
/// may go on using the context.
///
/// Statuses: OK, INVALID_ARGUMENT, UNSUPPORTED, NOT_PREPARED (the context is sealed), CANCELLED
/// (measurements are kept, and a later run resumes), NO_COMPILER, COMPILE_FAILED, CUDA,
/// OUT_OF_MEMORY.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flashtune_autotune(
    context: *mut flashtune_context,
    params: *const flashtune_autotune_params,
) -> i32 {
    enter(|| {
        // SAFETY: the C caller promises a live context or NULL.
        let context = unsafe { flashtune_context::of(context)? };
        // SAFETY: the C caller promises a struct of the size that it says.
        let params = unsafe { sized::read("params", params)? };
        // SAFETY: as above, for the pass's params.
        let problem = unsafe { problem(context, &params)? };
        context.require_memory("tuning")?;
        let retune = sized::flag(("params.retune", params.retune), ("params.reserved", params.reserved))?;
        let mut options = TuneOptions { retune, ..TuneOptions::default() };
        if let Some(limit) = time_limit("params.time_limit_seconds", params.time_limit_seconds)? {
            options.time_limit = limit;
        }
        let mut observer = |event: Event| match event {
            Event::Progress(progress) => report(&params, &progress),
            Event::Trial(_) | Event::PassedOver(_) => ControlFlow::Continue(()),
        };
        context.engine.autotune(&problem, &options, &mut observer).map(drop)
    })
}

unsafe fn problem(context: &flashtune_context, params: &flashtune_autotune_params) -> Result<Problem> {
    let checked = match (params.forward.is_null(), params.backward.is_null()) {
        // SAFETY: the C caller promises a struct of the size that it says.
        (false, true) => unsafe { checked(context, "params.forward", params.forward, Data::Optional)? },
        // SAFETY: as above.
        (true, false) => unsafe { checked(context, "params.backward", params.backward, Data::Optional)? },
        (true, true) => {
            return Err(Error::invalid("params.forward and params.backward are both NULL; one of them must be set"));
        }
        (false, false) => {
            return Err(Error::invalid("params.forward and params.backward are both set; one of them must be NULL"));
        }
    };
    pass::refuse_empty(&checked.call.problem)?;
    Ok(checked.call.problem)
}

fn report(params: &flashtune_autotune_params, progress: &Progress) -> ControlFlow<()> {
    let Some(callback) = params.progress else { return ControlFlow::Continue(()) };
    let text = |text: String| CString::new(text).unwrap_or_default();
    let phase = text(progress.phase.name().to_owned());
    let best = progress.best.map(|(config, time)| (text(config.to_string()), time));
    let snapshot = flashtune_progress {
        struct_size: size_of::<flashtune_progress>() as u64,
        phase: phase.as_ptr(),
        done: progress.done as u64,
        total: progress.total as u64,
        failed: progress.failed as u64,
        best_config: best.as_ref().map_or(std::ptr::null(), |(config, _)| config.as_ptr()),
        best_us: best.as_ref().map_or(0.0, |(_, time)| time.as_secs_f64() * 1e6),
    };
    // SAFETY: this is the host's function, called as its type says; `snapshot` and its texts
    // outlive the call.
    match unsafe { callback(&snapshot, params.progress_user) } {
        0 => ControlFlow::Continue(()),
        _ => ControlFlow::Break(()),
    }
}
