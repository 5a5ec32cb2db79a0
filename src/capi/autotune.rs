//! Tuning on request: measure the candidates for one problem, keep the winner.

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

/// How far a tuning run is. The library's own, valid during the callback.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct flashtune_progress {
    /// sizeof(flashtune_progress) of the library: later fields exist where it says so.
    pub struct_size: u64,
    /// "compile", "check" or "measure".
    pub phase: *const c_char,
    /// done of total candidates in this phase; failed ones of all phases.
    pub done: u64,
    pub total: u64,
    pub failed: u64,
    /// The best config so far and its median time in microseconds; NULL and 0 while there is none.
    pub best_config: *const c_char,
    pub best_us: f64,
}

/// Called now and then on the thread that called flashtune_autotune. Not 0 stops the run. It must return normally.
pub type flashtune_progress_callback =
    Option<unsafe extern "C" fn(progress: *const flashtune_progress, user: *mut c_void) -> i32>;

/// What to tune. Exactly one of forward and backward is set; it is borrowed for the call, and its data pointers may be
/// NULL and are not used: tuning runs on buffers of its own.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct flashtune_autotune_params {
    /// sizeof(flashtune_autotune_params).
    pub struct_size: u64,
    pub forward: *const flashtune_forward_params,
    pub backward: *const flashtune_backward_params,
    /// Seconds; when they are over the best so far is kept. 0: 20 seconds.
    pub time_limit_seconds: f64,
    /// NULL: no progress.
    pub progress: flashtune_progress_callback,
    /// Handed to progress; may be NULL.
    pub progress_user: *mut c_void,
    /// 0: a problem that has a record keeps it. 1: measure again.
    pub retune: i32,
    /// 0.
    pub reserved: i32,
}

// SAFETY: repr(C), a u64 first, then numbers, raw pointers and a nullable function pointer, whose every bit pattern is
// a value: NULL is None.
unsafe impl SizedStruct for flashtune_autotune_params {
    const NAME: &'static str = "flashtune_autotune_params";
    const OLDEST: usize = 56;
}
// When the struct grows, this number does, and OLDEST stays.
const _: () = assert!(size_of::<flashtune_autotune_params>() == 56);

/// Measures the candidates for one problem on the context's device and keeps the winner: this context uses it from
/// now on, and later processes find it in the cache folder. Allocates device memory for the problem's tensors, uses a
/// stream of its own, and returns when done. Any thread, others may go on using the context; not during stream capture.
///
/// Statuses: OK, INVALID_ARGUMENT, UNSUPPORTED, NOT_PREPARED (the context is sealed), CANCELLED (what was measured is
/// kept, and a later run resumes), NO_COMPILER, COMPILE_FAILED, CUDA, OUT_OF_MEMORY.
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
        let retune = sized::flag(("params.retune", params.retune), ("params.reserved", params.reserved))?;
        let mut options = TuneOptions { retune, ..TuneOptions::default() };
        if let Some(limit) = time_limit("params.time_limit_seconds", params.time_limit_seconds)? {
            options.time_limit = limit;
        }
        let mut observer = |event: Event| match event {
            Event::Progress(progress) => report(&params, &progress),
            Event::Trial(_) => ControlFlow::Continue(()),
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
    let seen = flashtune_progress {
        struct_size: size_of::<flashtune_progress>() as u64,
        phase: phase.as_ptr(),
        done: progress.done as u64,
        total: progress.total as u64,
        failed: progress.failed as u64,
        best_config: best.as_ref().map_or(std::ptr::null(), |(config, _)| config.as_ptr()),
        best_us: best.as_ref().map_or(0.0, |(_, time)| time.as_secs_f64() * 1e6),
    };
    // SAFETY: the host's function, called as its type says; `seen` and its texts outlive the call.
    match unsafe { callback(&seen, params.progress_user) } {
        0 => ControlFlow::Continue(()),
        _ => ControlFlow::Break(()),
    }
}
