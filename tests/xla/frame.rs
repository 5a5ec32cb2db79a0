//! A call frame made by hand, and an XLA that records what a handler asks of it.

use flashtune::backend::{Backend, Memory};
use flashtune::xla::c_api::*;
use std::cell::RefCell;
use std::ffi::{CStr, c_char, c_void};
use std::ptr::{null, null_mut};

pub type Handler = unsafe extern "C" fn(*mut c_void) -> *mut c_void;

/// dtype, address and shape.
pub type Tensor<'a> = (i32, *mut c_void, &'a [i64]);

#[derive(Clone, Copy)]
pub enum Value {
    Integer(i64),
    Real(f32),
}

pub struct Call<'a> {
    pub stage: i32,
    pub args: Vec<Tensor<'a>>,
    pub results: Vec<Tensor<'a>>,
    pub attributes: Vec<(&'a str, Value)>,
}

/// A code of XLA and a sentence.
pub type Failure = (i32, String);

/// What XLA would know and do.
#[derive(Default)]
pub struct Xla {
    pub ordinal: i32,
    /// Gives device memory.
    pub backend: Option<Backend>,
    pub allocations: Vec<Memory>,
    pub freed: usize,
}

thread_local! {
    pub static XLA: RefCell<Xla> = RefCell::default();
}

impl Call<'_> {
    pub fn run(&self, handler: Handler) -> Result<(), Failure> {
        self.run_with(handler, api(size_of::<Api>()), size_of::<Buffer>())
    }

    /// With this table of functions, and buffers that say this size.
    pub fn run_with(&self, handler: Handler, api: Api, buffer_size: usize) -> Result<(), Failure> {
        let buffer = |tensor: &Tensor| Buffer { struct_size: buffer_size, ..buffer(tensor) };
        let [args, results] = [&self.args, &self.results].map(|tensors| tensors.iter().map(buffer).collect::<Vec<_>>());
        let types = vec![BUFFER; args.len().max(results.len())];
        let [arg_places, result_places] = [&args, &results].map(|buffers| places(buffers));
        let names: Vec<ByteSpan> = self.attributes.iter().map(|(name, _)| span(name)).collect();
        let scalars: Vec<Scalar> = self.attributes.iter().map(|(_, value)| scalar(value)).collect();
        let scalar_types = vec![ATTRIBUTE_SCALAR; scalars.len()];
        let name_places: Vec<*const ByteSpan> = names.iter().map(std::ptr::from_ref).collect();
        let scalar_places = places(&scalars);
        let buffers = |places: &Vec<*const c_void>| Buffers {
            struct_size: size_of::<Buffers>(),
            extension_start: null_mut(),
            size: places.len() as i64,
            types: types.as_ptr(),
            buffers: places.as_ptr(),
        };
        let attributes = Attributes {
            struct_size: size_of::<Attributes>(),
            extension_start: null_mut(),
            size: scalars.len() as i64,
            types: scalar_types.as_ptr(),
            names: name_places.as_ptr(),
            values: scalar_places.as_ptr(),
        };
        let mut frame = frame(&api, self.stage, buffers(&arg_places), buffers(&result_places), attributes);
        // SAFETY: the frame is XLA's in form, and all that it names lives during the call.
        let error = unsafe { handler((&raw mut frame).cast()) };
        // SAFETY: an error is a box that `error_create` made.
        if error.is_null() { Ok(()) } else { Err(*unsafe { Box::from_raw(error.cast::<Failure>()) }) }
    }
}

/// XLA's size of the struct, which ends with the last field.
const METADATA_SIZE: usize = 36;

/// The struct of a question for metadata that is shorter than in XLA.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Short {
    Metadata,
    MetadataExtension,
    Extension,
    Frame,
}

/// What a handler answers to XLA's question for metadata: API version and traits.
pub fn metadata(handler: Handler, api: Option<&Api>) -> (i32, i32, u32) {
    let (metadata, error) = asked(handler, api, None);
    assert!(error.is_null());
    (metadata.api_version.major, metadata.api_version.minor, metadata.traits)
}

/// The handler's error where one struct is too short. The metadata must be as they were.
pub fn metadata_of(handler: Handler, short: Short) -> Failure {
    // Without a table of functions nothing could tell XLA of an error.
    let short_api = api(100);
    let (metadata, error) = asked(handler, Some(&short_api), Some(short));
    assert_eq!((metadata.api_version.major, metadata.traits), (0, u32::MAX), "{short:?}");
    assert!(!error.is_null(), "{short:?}");
    // SAFETY: an error is a box that `error_create` made.
    *unsafe { Box::from_raw(error.cast::<Failure>()) }
}

fn asked(handler: Handler, api: Option<&Api>, short: Option<Short>) -> (Metadata, *mut c_void) {
    let size = |of: Short, whole: usize, less: usize| if short == Some(of) { less } else { whole };
    let struct_size = size(Short::Metadata, METADATA_SIZE, METADATA_SIZE - 1);
    let mut metadata = Metadata { struct_size, api_version: version(0, 0), traits: u32::MAX };
    let extension_size = size(Short::MetadataExtension, size_of::<MetadataExtension>(), size_of::<Extension>());
    let struct_size = size(Short::Extension, extension_size, 8);
    let mut extension = MetadataExtension {
        base: Extension { struct_size, kind: EXTENSION_METADATA, next: null_mut() },
        metadata: &raw mut metadata,
    };
    let none = || Buffers {
        struct_size: size_of::<Buffers>(),
        extension_start: null_mut(),
        size: 0,
        types: null(),
        buffers: null(),
    };
    let attributes = Attributes {
        struct_size: size_of::<Attributes>(),
        extension_start: null_mut(),
        size: 0,
        types: null(),
        names: null(),
        values: null(),
    };
    let api = api.map_or(null(), std::ptr::from_ref);
    let mut frame = frame(api, STAGE_EXECUTE, none(), none(), attributes);
    frame.extension_start = (&raw mut extension).cast();
    if short == Some(Short::Frame) {
        // It ends behind the table of functions, and its list of extensions is not one.
        frame.struct_size = std::mem::offset_of!(CallFrame, context);
        frame.extension_start = null_mut();
    }
    // SAFETY: as in `run_with`.
    let error = unsafe { handler((&raw mut frame).cast()) };
    (metadata, error)
}

/// XLA's table of functions, whose version is 0.3.
pub fn api(struct_size: usize) -> Api {
    Api {
        struct_size,
        extension_start: null_mut(),
        version: version(0, 3),
        internal: null(),
        error_create: Some(error_create),
        error_details: None,
        error_destroy: None,
        handler_register: null(),
        stream_get: Some(stream_get),
        type_register: null(),
        context_get: null(),
        state_set: null(),
        state_get: null(),
        memory_allocate: Some(memory_allocate),
        memory_free: Some(memory_free),
        thread_pool_schedule: null(),
        thread_pool_num_threads: null(),
        future_create: null(),
        future_set_available: null(),
        future_set_error: null(),
        run_id_get: null(),
        device_ordinal_get: Some(device_ordinal_get),
    }
}

fn frame(api: *const Api, stage: i32, args: Buffers, rets: Buffers, attributes: Attributes) -> CallFrame {
    let struct_size = size_of::<CallFrame>();
    CallFrame { struct_size, extension_start: null_mut(), api, context: null_mut(), stage, args, rets, attributes }
}

fn version(major: i32, minor: i32) -> ApiVersion {
    ApiVersion { struct_size: size_of::<ApiVersion>(), extension_start: null_mut(), major, minor }
}

fn buffer(tensor: &Tensor) -> Buffer {
    let (dtype, data, dims) = *tensor;
    let struct_size = size_of::<Buffer>();
    Buffer { struct_size, extension_start: null_mut(), dtype, data, rank: dims.len() as i64, dims: dims.as_ptr() }
}

fn span(name: &str) -> ByteSpan {
    ByteSpan { ptr: name.as_ptr().cast::<c_char>(), len: name.len() }
}

fn scalar(value: &Value) -> Scalar {
    match value {
        Value::Integer(number) => Scalar { dtype: DTYPE_S64, value: std::ptr::from_ref(number).cast() },
        Value::Real(number) => Scalar { dtype: DTYPE_F32, value: std::ptr::from_ref(number).cast() },
    }
}

fn places<T>(items: &[T]) -> Vec<*const c_void> {
    items.iter().map(|item| std::ptr::from_ref(item).cast()).collect()
}

unsafe extern "C" fn error_create(args: *mut ErrorCreateArgs) -> *mut c_void {
    // SAFETY: the handler gives a message that ends in NUL.
    let (code, message) = unsafe { ((*args).code, CStr::from_ptr((*args).message)) };
    Box::into_raw(Box::<Failure>::new((code, message.to_str().unwrap().to_owned()))).cast()
}

/// The default stream.
unsafe extern "C" fn stream_get(args: *mut StreamGetArgs) -> *mut c_void {
    // SAFETY: the handler gives its own struct. The same holds below.
    unsafe { (*args).stream = null_mut() };
    null_mut()
}

unsafe extern "C" fn device_ordinal_get(args: *mut DeviceOrdinalArgs) -> *mut c_void {
    // SAFETY: as above.
    XLA.with_borrow(|xla| unsafe { (*args).ordinal = xla.ordinal });
    null_mut()
}

unsafe extern "C" fn memory_allocate(args: *mut MemoryAllocateArgs) -> *mut c_void {
    // SAFETY: as above.
    let args = unsafe { &mut *args };
    assert!(args.alignment <= 16, "XLA refuses an alignment above 16");
    XLA.with_borrow_mut(|xla| {
        let memory =
            xla.backend.as_ref().expect("device memory is asked for on a GPU alone").allocate(args.size).unwrap();
        args.data = memory.address();
        xla.allocations.push(memory);
    });
    null_mut()
}

/// The memory itself stays, since nothing orders its uses here.
unsafe extern "C" fn memory_free(args: *mut MemoryFreeArgs) -> *mut c_void {
    // SAFETY: as above.
    let (data, size) = unsafe { ((*args).data, (*args).size) };
    XLA.with_borrow_mut(|xla| {
        assert!(xla.allocations.iter().any(|memory| memory.address() == data && memory.bytes() == size));
        xla.freed += 1;
    });
    null_mut()
}
