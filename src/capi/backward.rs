//! The C functions of the backward pass. They name the params struct; `pass` does the work of both
//! passes.

use super::args::{self, Checked};
use super::context::flashtune_context;
use super::memory::Memory;
use super::operand::Data;
use super::panic_boundary::enter;
use super::params::Params;
use super::pass;
use super::plan_info::flashtune_plan_info;
use super::sized::{self, SizedStruct};
use super::types::{
    FLASHTUNE_FEATURE_PAGED, flashtune_backward_params, flashtune_forward_params, flashtune_scores_tensor,
    flashtune_tensor,
};
use crate::error::{Error, Result};
use std::ffi::c_void;
use std::ptr::{null, null_mut};

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

/// Writes to backward the parameters of the backward pass of a forward pass: every field that both
/// structs have. dout, dq, dk, dv, deterministic, dbias, dsinks and dlse become zero, and the
/// caller sets them afterwards. backward->struct_size is sizeof(flashtune_backward_params), set by
/// the caller. The call reads the struct alone: it follows no pointer and checks no field.
///
/// Statuses: OK, INVALID_ARGUMENT (a struct is NULL or of an impossible size), UNSUPPORTED (forward
/// has pages or batch_invariant, which no backward pass has).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flashtune_backward_params_from_forward(
    forward: *const flashtune_forward_params,
    backward: *mut flashtune_backward_params,
) -> i32 {
    enter(|| {
        // SAFETY: the C caller promises structs of the sizes that they say. This holds for the
        // three accesses.
        let (forward, size) = unsafe { (sized::read("forward", forward)?, sized::output_size("backward", backward)?) };
        let of_forward = from_forward(&forward)?;
        // SAFETY: as above.
        unsafe { sized::write(backward, size, &of_forward) };
        Ok(())
    })
}

fn from_forward(forward: &flashtune_forward_params) -> Result<flashtune_backward_params> {
    if forward.features & FLASHTUNE_FEATURE_PAGED != 0 {
        return Err(Error::unsupported("forward.features has PAGED; a backward pass has no pages"));
    }
    if forward.batch_invariant != 0 {
        return Err(Error::unsupported("forward.batch_invariant is set; a backward pass has no such order"));
    }
    let none = flashtune_tensor { data: null_mut(), stride_batch: 0, stride_seqlen: 0, stride_head: 0 };
    let no_scores = flashtune_scores_tensor {
        data: null_mut(),
        stride_batch: 0,
        stride_head: 0,
        stride_seqlen_q: 0,
        stride_seqlen_k: 0,
    };
    Ok(flashtune_backward_params {
        struct_size: size_of::<flashtune_backward_params>() as u64,
        dtype: forward.dtype,
        causal: forward.causal,
        batch_size: forward.batch_size,
        num_heads_q: forward.num_heads_q,
        num_heads_kv: forward.num_heads_kv,
        seqlen_q: forward.seqlen_q,
        seqlen_k: forward.seqlen_k,
        head_dim: forward.head_dim,
        head_dim_v: forward.head_dim_v,
        softmax_scale: forward.softmax_scale,
        dropout_p: forward.dropout_p,
        dropout_seed: forward.dropout_seed,
        dropout_offset: forward.dropout_offset,
        dropout_seed_ptr: forward.dropout_seed_ptr,
        dropout_offset_ptr: forward.dropout_offset_ptr,
        q: forward.q,
        k: forward.k,
        v: forward.v,
        out: forward.out.into(),
        lse: forward.lse,
        dout: none.into(),
        dq: none,
        dk: none,
        dv: none,
        deterministic: 0,
        reserved: 0,
        features: forward.features,
        window: forward.window,
        softcap: forward.softcap,
        window_left: forward.window_left,
        window_right: forward.window_right,
        alibi_slopes: forward.alibi_slopes,
        alibi_stride_batch: forward.alibi_stride_batch,
        bias: forward.bias,
        mask: forward.mask,
        sinks: forward.sinks,
        cu_seqlens_q: forward.cu_seqlens_q,
        cu_seqlens_k: forward.cu_seqlens_k,
        seqused_q: forward.seqused_q,
        seqused_k: forward.seqused_k,
        total_q: forward.total_q,
        total_k: forward.total_k,
        dbias: no_scores,
        dsinks: null_mut(),
        dlse: null(),
        block_mask: forward.block_mask,
    })
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
/// fewer than 529 tiles of 128 keys over all key-value heads, or without a mask up to 1056, the
/// size also has room for partial gradients: at most 540672 * (head_dim + head_dim_v) bytes, with
/// each head dim rounded up to 16.
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
