//! The structs of XLA's C API (xla/ffi/api/c_api.h) that the handlers read and write, API version
//! 0.1 and later.
//!
//! XLA keeps this API compatible: structs grow at their ends and say their size first. Each struct
//! here holds the fields up to the last one in use. Pointers to functions that are not called are
//! addresses.

use std::ffi::{c_char, c_void};
use std::mem::offset_of;

/// The type of a metadata extension.
pub const EXTENSION_METADATA: i32 = 1;

pub const STAGE_INITIALIZE: i32 = 2;
pub const STAGE_EXECUTE: i32 = 3;

pub const ATTRIBUTE_SCALAR: i32 = 3;
/// The one type of an argument and of a result.
pub const BUFFER: i32 = 1;

pub const DTYPE_PRED: i32 = 1;
pub const DTYPE_S8: i32 = 2;
pub const DTYPE_S32: i32 = 4;
pub const DTYPE_S64: i32 = 5;
pub const DTYPE_U8: i32 = 6;
pub const DTYPE_U32: i32 = 8;
pub const DTYPE_F16: i32 = 10;
pub const DTYPE_F32: i32 = 11;
pub const DTYPE_BF16: i32 = 16;
pub const DTYPE_F8E5M2: i32 = 19;
pub const DTYPE_F8E4M3FN: i32 = 20;

pub const CODE_INVALID_ARGUMENT: i32 = 3;
pub const CODE_RESOURCE_EXHAUSTED: i32 = 8;
pub const CODE_FAILED_PRECONDITION: i32 = 9;
pub const CODE_UNIMPLEMENTED: i32 = 12;
pub const CODE_INTERNAL: i32 = 13;

#[repr(C)]
pub struct Extension {
    pub struct_size: usize,
    pub kind: i32,
    pub next: *mut Extension,
}

#[repr(C)]
pub struct ApiVersion {
    pub struct_size: usize,
    pub extension_start: *mut Extension,
    pub major: i32,
    pub minor: i32,
}

#[repr(C)]
pub struct Metadata {
    pub struct_size: usize,
    pub api_version: ApiVersion,
    /// Bit 0: the handler may be captured into a command buffer.
    pub traits: u32,
}

#[repr(C)]
pub struct MetadataExtension {
    pub base: Extension,
    pub metadata: *mut Metadata,
}

#[repr(C)]
pub struct Buffer {
    pub struct_size: usize,
    pub extension_start: *mut Extension,
    pub dtype: i32,
    pub data: *mut c_void,
    pub rank: i64,
    pub dims: *const i64,
}

/// Arguments or results: `size` types and as many addresses of a `Buffer`.
#[repr(C)]
pub struct Buffers {
    pub struct_size: usize,
    pub extension_start: *mut Extension,
    pub size: i64,
    pub types: *const i32,
    pub buffers: *const *const c_void,
}

#[repr(C)]
pub struct ByteSpan {
    pub ptr: *const c_char,
    pub len: usize,
}

#[repr(C)]
pub struct Scalar {
    pub dtype: i32,
    pub value: *const c_void,
}

#[repr(C)]
pub struct Attributes {
    pub struct_size: usize,
    pub extension_start: *mut Extension,
    pub size: i64,
    pub types: *const i32,
    pub names: *const *const ByteSpan,
    pub values: *const *const c_void,
}

#[repr(C)]
pub struct CallFrame {
    pub struct_size: usize,
    pub extension_start: *mut Extension,
    pub api: *const Api,
    pub context: *mut c_void,
    pub stage: i32,
    pub args: Buffers,
    pub rets: Buffers,
    pub attributes: Attributes,
}

#[repr(C)]
pub struct ErrorCreateArgs {
    pub struct_size: usize,
    pub extension_start: *mut Extension,
    pub message: *const c_char,
    pub code: i32,
}

#[repr(C)]
pub struct ErrorDetailsArgs {
    pub struct_size: usize,
    pub extension_start: *mut Extension,
    pub error: *mut c_void,
    pub message: *const c_char,
    /// Written by API 0.5 and later alone.
    pub code: i32,
}

#[repr(C)]
pub struct ErrorDestroyArgs {
    pub struct_size: usize,
    pub extension_start: *mut Extension,
    pub error: *mut c_void,
}

#[repr(C)]
pub struct StreamGetArgs {
    pub struct_size: usize,
    pub extension_start: *mut Extension,
    pub context: *mut c_void,
    pub stream: *mut c_void,
}

#[repr(C)]
pub struct MemoryAllocateArgs {
    pub struct_size: usize,
    pub extension_start: *mut Extension,
    pub context: *mut c_void,
    pub size: usize,
    pub alignment: usize,
    pub data: *mut c_void,
}

#[repr(C)]
pub struct MemoryFreeArgs {
    pub struct_size: usize,
    pub extension_start: *mut Extension,
    pub context: *mut c_void,
    pub size: usize,
    pub data: *mut c_void,
}

#[repr(C)]
pub struct DeviceOrdinalArgs {
    pub struct_size: usize,
    pub extension_start: *mut Extension,
    pub context: *mut c_void,
    pub ordinal: i32,
}

/// A function of XLA's API. It returns NULL or an error that the caller owns.
pub type Function<Args> = Option<unsafe extern "C" fn(*mut Args) -> *mut c_void>;

type Unused = *const c_void;

#[repr(C)]
pub struct Api {
    pub struct_size: usize,
    pub extension_start: *mut Extension,
    pub version: ApiVersion,
    pub internal: Unused,
    pub error_create: Function<ErrorCreateArgs>,
    pub error_details: Option<unsafe extern "C" fn(*mut ErrorDetailsArgs)>,
    pub error_destroy: Option<unsafe extern "C" fn(*mut ErrorDestroyArgs)>,
    pub handler_register: Unused,
    pub stream_get: Function<StreamGetArgs>,
    pub type_register: Unused,
    pub context_get: Unused,
    pub state_set: Unused,
    pub state_get: Unused,
    pub memory_allocate: Function<MemoryAllocateArgs>,
    pub memory_free: Function<MemoryFreeArgs>,
    pub thread_pool_schedule: Unused,
    pub thread_pool_num_threads: Unused,
    pub future_create: Unused,
    pub future_set_available: Unused,
    pub future_set_error: Unused,
    pub run_id_get: Unused,
    pub device_ordinal_get: Function<DeviceOrdinalArgs>,
}

// Sizes and offsets in XLA's own header, of 64-bit platforms.
const _: () = assert!(size_of::<CallFrame>() == 168 && offset_of!(CallFrame, attributes) == 120);
const _: () = assert!(size_of::<Api>() == 192 && offset_of!(Api, stream_get) == 80);
const _: () = assert!(offset_of!(Api, memory_allocate) == 120 && offset_of!(Api, device_ordinal_get) == 184);
const _: () = assert!(size_of::<Buffer>() == 48 && size_of::<Scalar>() == 16 && size_of::<DeviceOrdinalArgs>() == 32);
const _: () = assert!(offset_of!(Metadata, traits) == 32 && offset_of!(MetadataExtension, metadata) == 24);
