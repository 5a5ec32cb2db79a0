//! What a handler asks of XLA: an error object, the stream, the device's number, scratch memory.

use super::c_api::{
    CODE_INTERNAL, DeviceOrdinalArgs, ErrorCreateArgs, ErrorDestroyArgs, ErrorDetailsArgs, Function,
    MemoryAllocateArgs, MemoryFreeArgs, StreamGetArgs,
};
use super::failure::{Failure, Result};
use super::frame::Frame;
use std::ffi::{CStr, CString, c_void};
use std::ptr::null_mut;

/// The alignment that every version of XLA gives.
const XLA_ALIGNMENT: usize = 16;
/// The alignment of a workspace.
const ALIGNMENT: usize = 256;

/// XLA's error object, or NULL for success. XLA frees it. Without an error object there is no way
/// to tell XLA of a failure, and the program would go on with results that nobody wrote. So that
/// ends the process.
pub fn error(create: Function<ErrorCreateArgs>, result: Result<()>) -> *mut c_void {
    let Err(failure) = result else { return null_mut() };
    let bytes: Vec<u8> = failure.message.into_bytes().into_iter().filter(|byte| *byte != 0).collect();
    let message = CString::new(bytes).unwrap_or_default();
    let mut args = ErrorCreateArgs {
        struct_size: size_of::<ErrorCreateArgs>(),
        extension_start: null_mut(),
        message: message.as_ptr(),
        code: failure.code,
    };
    // SAFETY: XLA copies the message.
    let error = create.map_or(null_mut(), |create| unsafe { create(&mut args) });
    if error.is_null() {
        eprintln!("flashtune: {}; XLA made no error of it, so the process ends", message.to_string_lossy());
        std::process::abort();
    }
    error
}

/// The CUstream of the call.
pub fn stream(frame: &Frame) -> Result<*mut c_void> {
    let mut args = StreamGetArgs {
        struct_size: size_of::<StreamGetArgs>(),
        extension_start: null_mut(),
        context: frame.raw.context,
        stream: null_mut(),
    };
    call(frame, "XLA_FFI_Stream_Get", frame.api.stream_get, &mut args)?;
    Ok(args.stream)
}

/// The number of the call's GPU. It is negative where XLA has not chosen the GPU yet.
pub fn device_ordinal(frame: &Frame) -> Result<i32> {
    let mut args = DeviceOrdinalArgs {
        struct_size: size_of::<DeviceOrdinalArgs>(),
        extension_start: null_mut(),
        context: frame.raw.context,
        ordinal: -1,
    };
    call(frame, "XLA_FFI_DeviceOrdinal_Get", frame.api.device_ordinal_get, &mut args)?;
    Ok(args.ordinal)
}

/// Device memory of one call. XLA's allocator orders its uses by the stream, so it may be freed
/// before the work on the stream is done.
pub struct Scratch<'a> {
    frame: Frame<'a>,
    allocation: *mut c_void,
    bytes: usize,
}

impl<'a> Scratch<'a> {
    pub fn new(frame: Frame<'a>, bytes: usize) -> Result<Scratch<'a>> {
        let bytes = bytes.saturating_add(ALIGNMENT);
        let mut args = MemoryAllocateArgs {
            struct_size: size_of::<MemoryAllocateArgs>(),
            extension_start: null_mut(),
            context: frame.raw.context,
            size: bytes,
            alignment: XLA_ALIGNMENT,
            data: null_mut(),
        };
        call(&frame, "XLA_FFI_DeviceMemory_Allocate", frame.api.memory_allocate, &mut args)?;
        Ok(Scratch { frame, allocation: args.data, bytes })
    }

    /// The first address of the alignment of a workspace.
    pub fn address(&self) -> *mut c_void {
        let offset = self.allocation.addr().next_multiple_of(ALIGNMENT) - self.allocation.addr();
        self.allocation.wrapping_byte_add(offset)
    }
}

impl Drop for Scratch<'_> {
    fn drop(&mut self) {
        let mut args = MemoryFreeArgs {
            struct_size: size_of::<MemoryFreeArgs>(),
            extension_start: null_mut(),
            context: self.frame.raw.context,
            size: self.bytes,
            data: self.allocation,
        };
        // Nothing can be done about a failure: at worst the memory stays allocated.
        let _ = call(&self.frame, "XLA_FFI_DeviceMemory_Free", self.frame.api.memory_free, &mut args);
    }
}

fn call<Args>(frame: &Frame, name: &str, function: Function<Args>, args: &mut Args) -> Result<()> {
    let function = function.ok_or_else(|| Failure::invalid(format!("this XLA has no {name}")))?;
    // SAFETY: the args are of this function and live during the call.
    let error = unsafe { function(args) };
    if error.is_null() { Ok(()) } else { Err(taken(frame, name, error)) }
}

/// An error of XLA, whose object is freed.
fn taken(frame: &Frame, name: &str, error: *mut c_void) -> Failure {
    let mut details = ErrorDetailsArgs {
        struct_size: size_of::<ErrorDetailsArgs>(),
        extension_start: null_mut(),
        error,
        message: null_mut(),
        code: 0,
    };
    let mut destroyed =
        ErrorDestroyArgs { struct_size: size_of::<ErrorDestroyArgs>(), extension_start: null_mut(), error };
    // SAFETY: the error is XLA's and not freed yet; its message is copied before it is freed.
    unsafe {
        if let Some(describe) = frame.api.error_details {
            describe(&mut details);
        }
        let reason = match details.message.is_null() {
            true => String::from("no message"),
            false => CStr::from_ptr(details.message).to_string_lossy().into_owned(),
        };
        if let Some(destroy) = frame.api.error_destroy {
            destroy(&mut destroyed);
        }
        let code = if details.code == 0 { CODE_INTERNAL } else { details.code };
        Failure { code, message: format!("{name} failed: {reason}") }
    }
}
