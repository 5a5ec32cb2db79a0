//! The C functions of the backward pass. They name the params struct; `pass` does the work of both
//! passes.

use super::args::{self, Checked, Memory};
use super::context::flashtune_context;
use super::operand::Data;
use super::params::Params;
use super::pass;
use super::plan_info::flashtune_plan_info;
use super::sized::SizedStruct;
use super::types::flashtune_backward_params;
use crate::error::Result;
use std::ffi::c_void;

// SAFETY: repr(C), a u64 first, then integers, floats and raw pointers. They have no invalid bytes.
unsafe impl SizedStruct for flashtune_backward_params {
    const NAME: &'static str = "flashtune_backward_params";
    const OLDEST: usize = 376;
}
// This number grows with the struct. OLDEST stays.
const _: () = assert!(size_of::<flashtune_backward_params>() == 720);

impl Params for flashtune_backward_params {
    type Checked = Checked;

    fn check(&self, data: Data, memory: Memory) -> Result<Checked> {
        args::backward(self, data, memory)
    }
}

/// The same as flashtune_forward_supported for the backward pass.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flashtune_backward_supported(
    context: *mut flashtune_context,
    params: *const flashtune_backward_params,
) -> i32 {
    // SAFETY: the C caller promises what the header says. This holds for every function of this
    // file.
    unsafe { pass::supported(context, params) }
}

/// The same as flashtune_forward_workspace_size for the backward pass. On either backend the size
/// is proportional to batch_size * num_heads_q * seqlen_q * head_dim. With cu_seqlens_q it is
/// proportional to (total_q + 128 * batch_size) * num_heads_q * head_dim. On a CUDA context with
/// fewer than 529 tiles of 128 keys over all key-value heads, the size also has room for partial
/// gradients: at most 540672 * (head_dim + head_dim_v) bytes, with each head dim rounded up to 16.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flashtune_backward_workspace_size(
    context: *mut flashtune_context,
    params: *const flashtune_backward_params,
    bytes: *mut u64,
) -> i32 {
    // SAFETY: as above.
    unsafe { pass::workspace_size(context, params, bytes) }
}

/// The same as flashtune_forward_prepare for the backward pass.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flashtune_backward_prepare(
    context: *mut flashtune_context,
    params: *const flashtune_backward_params,
) -> i32 {
    // SAFETY: as above.
    unsafe { pass::prepare(context, params) }
}

/// Runs one backward pass. It writes dq, dk and dv in full, with zeros for queries that see no key
/// and keys that no query sees. Only rows that no sequence uses are left as they are. The rules of
/// flashtune_forward for stream, workspace, capture, threads and statuses apply.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flashtune_backward(
    context: *mut flashtune_context,
    params: *const flashtune_backward_params,
    workspace: *mut c_void,
    workspace_bytes: u64,
    stream: *mut c_void,
) -> i32 {
    // SAFETY: as above.
    unsafe { pass::launch(context, params, workspace, workspace_bytes, stream) }
}

/// The same as flashtune_forward_plan_info for the backward pass.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flashtune_backward_plan_info(
    context: *mut flashtune_context,
    params: *const flashtune_backward_params,
    info: *mut flashtune_plan_info,
) -> i32 {
    // SAFETY: as above.
    unsafe { pass::plan_info(context, params, info) }
}
