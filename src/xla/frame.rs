//! A call frame, read: which stage runs, and its buffers and attributes.

use super::c_api::{
    Api, BUFFER, Buffer as RawBuffer, Buffers, ByteSpan, CallFrame, EXTENSION_METADATA, ErrorCreateArgs, Function,
    Metadata, MetadataExtension, STAGE_INITIALIZE,
};
use super::failure::{Failure, Result};
use std::ffi::c_void;
use std::mem::offset_of;
use std::ptr::{null, null_mut};
use std::slice;

/// The first version of XLA's API.
const FIRST_VERSION: (i32, i32) = (0, 1);

/// The call frame of one call, and XLA's functions.
#[derive(Clone, Copy)]
pub struct Frame<'a> {
    pub raw: &'a CallFrame,
    pub api: &'a Api,
}

/// A contiguous, row-major tensor.
#[derive(Clone, Copy, Debug)]
pub struct Buffer<'a> {
    /// A DTYPE_* of XLA's C API.
    pub dtype: i32,
    /// NULL while XLA initialises: addresses are not final then.
    pub data: *mut c_void,
    pub dims: &'a [i64],
}

impl<'a> Frame<'a> {
    /// None if the frame or the table of XLA's functions is missing or shorter than in the first
    /// version that is supported. Python refuses such a version before it registers a handler.
    ///
    /// # Safety
    /// `frame` is NULL or a call frame of XLA, which lives as long as the result.
    pub unsafe fn of(frame: *mut c_void) -> Option<Frame<'a>> {
        // SAFETY: by the caller's promise. The same holds for XLA's table of functions, which lives
        // as long as the process.
        unsafe {
            let raw: &CallFrame = whole(frame.cast())?;
            Some(Frame { raw, api: whole(raw.api)? })
        }
    }

    /// XLA's function that makes errors, for a frame that `of` does not know. None if even that is
    /// missing.
    ///
    /// # Safety
    /// As `of`.
    pub unsafe fn error_create(frame: *mut c_void) -> Function<ErrorCreateArgs> {
        let frame = frame.cast::<CallFrame>();
        // SAFETY: by the caller's promise: each struct is read as far as its size says.
        unsafe {
            let has_api = says(frame, offset_of!(CallFrame, context));
            let api = if has_api { (&raw const (*frame).api).read() } else { null() };
            let has_function = says(api, offset_of!(Api, error_details));
            if has_function { (&raw const (*api).error_create).read() } else { None }
        }
    }

    /// The place for the handler's properties, and XLA's version, if XLA asks for them instead of a
    /// call. XLA up to 0.8 then leaves out its table of functions, and the version is the first.
    ///
    /// # Safety
    /// As `of`.
    pub unsafe fn metadata(frame: *mut c_void) -> Option<(*mut Metadata, (i32, i32))> {
        // SAFETY: by the caller's promise. The list of extensions is behind the size.
        let mut extension = unsafe {
            let has_list = says(frame.cast::<CallFrame>(), offset_of!(CallFrame, api));
            if has_list { (&raw const (*frame.cast::<CallFrame>()).extension_start).read() } else { null_mut() }
        };
        // SAFETY: as above.
        let frame = unsafe { Frame::of(frame) };
        let version = frame.map_or(FIRST_VERSION, |frame| (frame.api.version.major, frame.api.version.minor));
        // SAFETY: XLA's list of extensions ends in NULL and lives as long as the frame. The type
        // tells the struct, of which as much is read as its size says. XLA reads the metadata after
        // this call alone.
        unsafe {
            while let Some(found) = whole(extension.cast_const()) {
                if found.kind == EXTENSION_METADATA {
                    let metadata = whole(extension.cast::<MetadataExtension>().cast_const())?.metadata;
                    // XLA's size ends with the last field, without the padding behind it.
                    let least = offset_of!(Metadata, traits) + size_of::<u32>();
                    return says(metadata, least).then_some((metadata, version));
                }
                extension = found.next;
            }
        }
        None
    }

    pub fn args(&self) -> Result<Vec<Buffer<'a>>> {
        self.buffers("argument", &self.raw.args)
    }

    pub fn results(&self) -> Result<Vec<Buffer<'a>>> {
        self.buffers("result", &self.raw.rets)
    }

    fn buffers(&self, kind: &str, list: &'a Buffers) -> Result<Vec<Buffer<'a>>> {
        let is_final = self.raw.stage != STAGE_INITIALIZE;
        // SAFETY: XLA gives `size` types and as many addresses.
        let (types, addresses) = unsafe { (array(list.types, list.size), array(list.buffers, list.size)) };
        let read = types.iter().zip(addresses).enumerate().map(|(index, (of_type, address))| {
            if *of_type != BUFFER {
                return Err(Failure::invalid(format!("{kind} {index} is of type {of_type}; it must be a buffer")));
            }
            // SAFETY: the type says that the address is of a buffer, which lives as long as the
            // frame.
            let buffer = unsafe { whole(address.cast::<RawBuffer>()) }.ok_or_else(|| {
                Failure::invalid(format!(
                    "{kind} {index} has a struct that is shorter than in the first version of XLA"
                ))
            })?;
            let data = if is_final { buffer.data } else { std::ptr::null_mut() };
            // SAFETY: `rank` dims.
            Ok(Buffer { dtype: buffer.dtype, data, dims: unsafe { array(buffer.dims, buffer.rank) } })
        });
        read.collect()
    }

    /// Name, type and address of each attribute.
    pub fn attributes(&self) -> impl Iterator<Item = (&'a str, i32, *const c_void)> {
        let list = &self.raw.attributes;
        // SAFETY: XLA gives `size` types, names and addresses.
        let (types, names, values) =
            unsafe { (array(list.types, list.size), array(list.names, list.size), array(list.values, list.size)) };
        let text = |name: &'a *const ByteSpan| {
            // SAFETY: a name is a span of bytes that lives as long as the frame.
            let bytes = unsafe { array((**name).ptr.cast::<u8>(), (**name).len as i64) };
            std::str::from_utf8(bytes).unwrap_or("(not UTF-8)")
        };
        names.iter().zip(types).zip(values).map(move |((name, of_type), value)| (text(name), *of_type, *value))
    }
}

/// A struct of XLA, which begins with its size. None if it is missing or shorter than ours.
///
/// # Safety
/// `pointer` is NULL or of a struct that lives for 'a.
unsafe fn whole<'a, T>(pointer: *const T) -> Option<&'a T> {
    // SAFETY: by the caller's promise.
    unsafe { says(pointer, size_of::<T>()).then(|| &*pointer) }
}

/// Whether the struct is there and says that it has at least so many bytes.
///
/// # Safety
/// As `whole`.
unsafe fn says<T>(pointer: *const T, bytes: usize) -> bool {
    // SAFETY: by the caller's promise. Each struct of XLA begins with its size.
    !pointer.is_null() && unsafe { pointer.cast::<usize>().read() } >= bytes
}

/// # Safety
/// `pointer` is of `size` elements that live for 'a, or `size` is not positive.
unsafe fn array<'a, T>(pointer: *const T, size: i64) -> &'a [T] {
    match size > 0 && !pointer.is_null() {
        // SAFETY: by the caller's promise.
        true => unsafe { slice::from_raw_parts(pointer, size as usize) },
        false => &[],
    }
}
