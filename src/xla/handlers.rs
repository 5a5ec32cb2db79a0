//! The handlers that XLA calls: one for each pass and platform, and those that quantise.

// The header says what a caller must promise.
#![allow(clippy::missing_safety_doc)]

use super::c_api::{STAGE_EXECUTE, STAGE_INITIALIZE};
use super::contexts::{Device, context};
use super::failure::{Failure, Result, check};
use super::frame::Frame;
use super::options::Options;
use super::{params, quantize, runtime};
use crate::capi::backward::{flashtune_backward, flashtune_backward_prepare, flashtune_backward_workspace_size};
use crate::capi::context::flashtune_context;
use crate::capi::forward::{flashtune_forward, flashtune_forward_prepare, flashtune_forward_workspace_size};
use crate::capi::panic_boundary::enter;
use crate::capi::quantize::{flashtune_quantize, flashtune_quantize_prepare};
use crate::cpu::HostMemory;
use std::ffi::c_void;
use std::ptr::null_mut;

/// The forward pass on the CPU, as a handler of XLA's foreign function interface. call_frame is an
/// XLA_FFI_CallFrame, and the result is an XLA_FFI_Error or NULL for success. Cast the function to
/// XLA_FFI_Handler to register it; XLA must be that of jaxlib 0.7 or later. The sources list the
/// arguments and results (src/xla/params.rs) and the attributes (src/xla/options.rs).
///
/// The handlers make a context for each device at their first call and keep it. Their operands are
/// contiguous. Command buffers cannot record them. May be called from any thread.
///
/// A handler reports a failure by XLA's own function for errors. A call that fails where XLA has no
/// such function, or where that function makes no error, ends the process: NULL would say that the
/// results are written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flashtune_xla_cpu_forward(call_frame: *mut c_void) -> *mut c_void {
    // SAFETY: XLA promises what the header says. This holds for every function of this file.
    unsafe { handle(call_frame, Platform::Cpu, forward) }
}

/// The backward pass on the CPU; see flashtune_xla_cpu_forward.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flashtune_xla_cpu_backward(call_frame: *mut c_void) -> *mut c_void {
    // SAFETY: as above.
    unsafe { handle(call_frame, Platform::Cpu, backward) }
}

/// The forward pass on a GPU, enqueued on XLA's stream; see flashtune_xla_cpu_forward. Registered
/// for the stage "initialize" too, the handler prepares the plan before the program runs. The
/// workspace comes from XLA's allocator.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flashtune_xla_cuda_forward(call_frame: *mut c_void) -> *mut c_void {
    // SAFETY: as above.
    unsafe { handle(call_frame, Platform::Cuda, forward) }
}

/// The backward pass on a GPU; see flashtune_xla_cuda_forward.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flashtune_xla_cuda_backward(call_frame: *mut c_void) -> *mut c_void {
    // SAFETY: as above.
    unsafe { handle(call_frame, Platform::Cuda, backward) }
}

/// Quantises a tensor to 8 bits, rotates it, or both, on the CPU; see flashtune_xla_cpu_forward.
/// The sources list the arguments and results (src/xla/quantize.rs).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flashtune_xla_cpu_quantize(call_frame: *mut c_void) -> *mut c_void {
    // SAFETY: as above.
    unsafe { handle(call_frame, Platform::Cpu, quantize) }
}

/// The same on a GPU; see flashtune_xla_cuda_forward.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flashtune_xla_cuda_quantize(call_frame: *mut c_void) -> *mut c_void {
    // SAFETY: as above.
    unsafe { handle(call_frame, Platform::Cuda, quantize) }
}

#[derive(Clone, Copy)]
enum Platform {
    Cpu,
    Cuda,
}

type Pass = fn(&Frame, Platform) -> Result<()>;

/// # Safety
/// `call_frame` is NULL or a call frame of XLA.
unsafe fn handle(call_frame: *mut c_void, platform: Platform, pass: Pass) -> *mut c_void {
    // SAFETY: by the caller's promise.
    if let Some((metadata, version)) = unsafe { Frame::metadata(call_frame) } {
        // SAFETY: `Frame::metadata` has checked that the struct has these fields.
        unsafe {
            // XLA's own version: its structs only grow, and the fields in use are all there.
            (&raw mut (*metadata).api_version.major).write(version.0);
            (&raw mut (*metadata).api_version.minor).write(version.1);
            // Not to be captured: the workspace belongs to one call alone, and a captured launch
            // owns its tile counter for good.
            (&raw mut (*metadata).traits).write(0);
        }
        return null_mut();
    }
    // SAFETY: as above.
    let Some(frame) = (unsafe { Frame::of(call_frame) }) else {
        let message = "this XLA is older than flashtune supports, which is that of jaxlib 0.7 or later";
        // SAFETY: as above.
        return runtime::error(unsafe { Frame::error_create(call_frame) }, Err(Failure::invalid(message)));
    };
    let mut result = Ok(());
    let status = enter(|| {
        result = pass(&frame, platform);
        Ok(())
    });
    if frame.raw.stage == STAGE_INITIALIZE {
        // The launch prepares what could not be prepared here, or fails with the same sentence.
        return null_mut();
    }
    runtime::error(frame.api.error_create, check(status).and(result))
}

fn forward(frame: &Frame, platform: Platform) -> Result<()> {
    let params = params::forward(frame, &Options::of(frame)?)?;
    run(
        frame,
        platform,
        // SAFETY: the context lives as long as the process, and the params during the call. XLA
        // promises that the buffers live until the work on its stream is done. This holds for all
        // six calls.
        |context| unsafe { flashtune_forward_prepare(context, &params) },
        |context, bytes| unsafe { flashtune_forward_workspace_size(context, &params, bytes) },
        |context, workspace, bytes, stream| unsafe { flashtune_forward(context, &params, workspace, bytes, stream) },
    )
}

fn backward(frame: &Frame, platform: Platform) -> Result<()> {
    let params = params::backward(frame, &Options::of(frame)?)?;
    run(
        frame,
        platform,
        // SAFETY: as above.
        |context| unsafe { flashtune_backward_prepare(context, &params) },
        |context, bytes| unsafe { flashtune_backward_workspace_size(context, &params, bytes) },
        |context, workspace, bytes, stream| unsafe { flashtune_backward(context, &params, workspace, bytes, stream) },
    )
}

fn quantize(frame: &Frame, platform: Platform) -> Result<()> {
    let params = quantize::quantize(frame, &Options::of(frame)?)?;
    let no_workspace = |_, bytes: *mut u64| {
        // SAFETY: `run` passes the address of its own number.
        unsafe { bytes.write(0) };
        0
    };
    run(
        frame,
        platform,
        // SAFETY: as above.
        |context| unsafe { flashtune_quantize_prepare(context, &params) },
        no_workspace,
        |context, _, _, stream| unsafe { flashtune_quantize(context, &params, stream) },
    )
}

/// Prepares or launches a pass, by the stage. Its three functions are those of the C face.
fn run(
    frame: &Frame,
    platform: Platform,
    prepare: impl Fn(*mut flashtune_context) -> i32,
    workspace_size: impl Fn(*mut flashtune_context, *mut u64) -> i32,
    launch: impl Fn(*mut flashtune_context, *mut c_void, u64, *mut c_void) -> i32,
) -> Result<()> {
    let device = match platform {
        Platform::Cpu => Device::Cpu,
        Platform::Cuda => Device::Cuda(runtime::device_ordinal(frame)?),
    };
    match (frame.raw.stage, device) {
        // XLA has not chosen the GPU yet. The launch prepares the plan.
        (STAGE_INITIALIZE, Device::Cuda(..0)) => return Ok(()),
        (STAGE_INITIALIZE, device) => return check(prepare(context(device)?)),
        (STAGE_EXECUTE, _) => {}
        (other, _) => {
            return Err(Failure::invalid(format!("stage {other} of XLA; it must be 2 (initialize) or 3 (execute)")));
        }
    }
    let context = context(device)?;
    let mut bytes = 0;
    check(workspace_size(context, &mut bytes))?;
    match (device, bytes) {
        (Device::Cpu, 0) => check(launch(context, null_mut(), 0, null_mut())),
        (Device::Cpu, _) => {
            let memory = HostMemory::new(bytes as usize)?;
            check(launch(context, memory.address(), bytes, null_mut()))
        }
        (Device::Cuda(_), 0) => check(launch(context, null_mut(), 0, runtime::stream(frame)?)),
        (Device::Cuda(_), _) => {
            let stream = runtime::stream(frame)?;
            let memory = runtime::Scratch::new(*frame, bytes as usize)?;
            check(launch(context, memory.address(), bytes, stream))
        }
    }
}
