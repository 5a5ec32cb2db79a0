//! The forward pass's functions.

use super::args::{self, Checked, Memory};
use super::context::flashtune_context;
use super::operand::Data;
use super::params::Params;
use super::pass;
use super::plan_info::flashtune_plan_info;
use super::sized::SizedStruct;
use super::types::flashtune_forward_params;
use crate::error::Result;
use std::ffi::c_void;

// SAFETY: repr(C), a u64 first, then integers, floats and raw pointers, which have no invalid bytes.
unsafe impl SizedStruct for flashtune_forward_params {
    const NAME: &'static str = "flashtune_forward_params";
    const OLDEST: usize = 248;
}
// When the struct grows, this number does, and OLDEST stays.
const _: () = assert!(size_of::<flashtune_forward_params>() == 568);

impl Params for flashtune_forward_params {
    type Checked = Checked;

    fn check(&self, data: Data, memory: Memory) -> Result<Checked> {
        args::forward(self, data, memory)
    }
}

/// Whether this context can do this forward pass: FLASHTUNE_STATUS_OK, or a status with the reason in
/// flashtune_last_error(). Cheap: compiles and launches nothing. Data pointers may be NULL. Any thread, also during
/// stream capture.
///
/// Statuses: OK, INVALID_ARGUMENT, UNSUPPORTED.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flashtune_forward_supported(
    context: *mut flashtune_context,
    params: *const flashtune_forward_params,
) -> i32 {
    // SAFETY: the C caller promises what the header says; so in every function of this file.
    unsafe { pass::supported(context, params) }
}

/// Writes to bytes how much workspace flashtune_forward needs for these params at most, whatever plan it uses: 0 on a
/// CPU context, and on a CUDA context but for few queries over many keys (with batch_invariant also over few), whose
/// partial results it holds. A pure function of the params and the context's backend. Data pointers may be NULL. Any
/// thread, also during stream capture.
///
/// Statuses: OK, INVALID_ARGUMENT.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flashtune_forward_workspace_size(
    context: *mut flashtune_context,
    params: *const flashtune_forward_params,
    bytes: *mut u64,
) -> i32 {
    // SAFETY: as above.
    unsafe { pass::workspace_size(context, params, bytes) }
}

/// Gets the plan for these params ready: looks up or chooses a config (under FLASHTUNE_TUNING_TUNE measures one where
/// there is no record), compiles and loads its kernels. May take seconds; once it returned OK, flashtune_forward only
/// enqueues for these params, also with another softmax_scale, nonzero dropout_p or seed and with other data and strides
/// of the same alignment; nearby sizes share the plan. Another shape, or these params after flashtune_autotune or
/// flashtune_records_import has changed the records, may need another config: flashtune_forward then prepares it, or
/// returns NOT_PREPARED on a capturing stream and in a sealed context. Data pointers may be NULL, and then count as
/// aligned to 16 bytes. Any thread, not while a stream of this thread is capturing.
///
/// Statuses: OK, INVALID_ARGUMENT, UNSUPPORTED, NOT_PREPARED (the context is sealed), NO_COMPILER, COMPILE_FAILED, CUDA,
/// OUT_OF_MEMORY.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flashtune_forward_prepare(
    context: *mut flashtune_context,
    params: *const flashtune_forward_params,
) -> i32 {
    // SAFETY: as above.
    unsafe { pass::prepare(context, params) }
}

/// Runs one forward pass. On a CUDA context it enqueues the work on stream, a CUstream or cudaStream_t of the context's
/// device (NULL: the default stream), and returns; buffers must live until that work is done, params only during the
/// call. On a CPU context stream is ignored, and the work is done on return.
///
/// workspace is device memory (host memory on a CPU context) aligned to 256 bytes, of workspace_bytes bytes, at least
/// what flashtune_forward_workspace_size says; NULL where that is 0. Its contents need not be set and are not kept;
/// two calls that may run at once must not share one.
///
/// With a plan prepared, it allocates, synchronises, compiles, reads and locks nothing (but for the memory that a thread
/// of a CPU context needs for one tile, whatever the lengths), and may be captured into a graph, which must not run twice
/// at a time: not from two instances, nor as two child nodes. Without a plan it prepares first, as
/// flashtune_forward_prepare; on a capturing stream or in a sealed context it returns NOT_PREPARED instead. out and lse
/// must share no byte with another tensor. Any thread, several at once.
///
/// Statuses: those of flashtune_forward_prepare, WORKSPACE_TOO_SMALL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flashtune_forward(
    context: *mut flashtune_context,
    params: *const flashtune_forward_params,
    workspace: *mut c_void,
    workspace_bytes: u64,
    stream: *mut c_void,
) -> i32 {
    // SAFETY: as above.
    unsafe { pass::launch(context, params, workspace, workspace_bytes, stream) }
}

/// Describes the plan that flashtune_forward uses for these params, preparing it first where there is none. The caller
/// sets info->struct_size = sizeof(flashtune_plan_info). Data pointers may be NULL. Threads and capture as
/// flashtune_forward_prepare.
///
/// Statuses: those of flashtune_forward_prepare; INVALID_ARGUMENT also where the problem is empty.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flashtune_forward_plan_info(
    context: *mut flashtune_context,
    params: *const flashtune_forward_params,
    info: *mut flashtune_plan_info,
) -> i32 {
    // SAFETY: as above.
    unsafe { pass::plan_info(context, params, info) }
}
