//! The part of CPython's stable ABI in use, and the structs of DLPack that describe a tensor.
//!
//! Every function of `Python` needs the GIL, which `without_gil` gives up for a while. Objects that
//! are handed in must be alive.
//!
//! CPython unwinds or parks a thread that asks for the GIL while the interpreter ends. Frames of
//! this library must not be unwound so; `parked` waits there for the end of the process.

use std::ffi::{c_char, c_int, c_long, c_longlong, c_ulonglong, c_void};
use std::ptr::{NonNull, null_mut};
use std::sync::OnceLock;

/// An object of Python, which only Python's own functions read.
#[repr(C)]
pub struct PyObject {
    _opaque: [u8; 0],
}

pub type Pointer = *mut PyObject;

/// A built-in function that takes its arguments as an array.
pub type Function = unsafe extern "C" fn(state: Pointer, arguments: *const Pointer, count: isize) -> Pointer;

/// METH_FASTCALL.
const TAKES_ARRAY: c_int = 0x80;

/// PyMethodDef. Python keeps its address.
#[repr(C)]
pub struct Method {
    pub name: *const c_char,
    pub function: Function,
    flags: c_int,
    documentation: *const c_char,
}

impl Method {
    pub const fn new(name: &'static std::ffi::CStr, function: Function) -> Self {
        Method { name: name.as_ptr(), function, flags: TAKES_ARRAY, documentation: std::ptr::null() }
    }
}

// SAFETY: it points to constants alone.
unsafe impl Sync for Method {}

macro_rules! functions {
    ($($name:ident: fn($($argument:ty),*) $(-> $result:ty)?;)*) => {
        #[allow(non_snake_case)]
        struct Functions {
            PyObject_CallFunctionObjArgs: unsafe extern "C-unwind" fn(Pointer, ...) -> Pointer,
            PyEval_RestoreThread: unsafe extern "C-unwind" fn(*mut c_void),
            $($name: unsafe extern "C" fn($($argument),*) $(-> $result)?,)*
        }

        impl Functions {
            /// None where one is missing, as in a program without CPython.
            fn find() -> Option<Self> {
                let program = libloading::os::unix::Library::this();
                // SAFETY: the types are those of Python's stable ABI.
                Some(unsafe {
                    Functions {
                        PyObject_CallFunctionObjArgs: *program.get(b"PyObject_CallFunctionObjArgs\0").ok()?,
                        PyEval_RestoreThread: *program.get(b"PyEval_RestoreThread\0").ok()?,
                        $($name: *program.get(concat!(stringify!($name), "\0").as_bytes()).ok()?,)*
                    }
                })
            }
        }
    };
}

functions! {
    Py_IncRef: fn(Pointer);
    Py_DecRef: fn(Pointer);
    PyBytes_AsString: fn(Pointer) -> *const u8;
    PyBytes_Size: fn(Pointer) -> isize;
    PyCapsule_GetPointer: fn(Pointer, *const c_char) -> *mut c_void;
    PyCapsule_New: fn(*mut c_void, *const c_char, *mut c_void) -> Pointer;
    PyCFunction_NewEx: fn(*const Method, Pointer, Pointer) -> Pointer;
    PyErr_Clear: fn();
    PyErr_Occurred: fn() -> Pointer;
    PyEval_SaveThread: fn() -> *mut c_void;
    PyFloat_AsDouble: fn(Pointer) -> f64;
    PyLong_AsLongLong: fn(Pointer) -> c_longlong;
    PyLong_AsUnsignedLongLong: fn(Pointer) -> c_ulonglong;
    PyLong_FromLong: fn(c_long) -> Pointer;
    PyObject_Type: fn(Pointer) -> Pointer;
    PyTuple_GetItem: fn(Pointer, isize) -> Pointer;
    PyTuple_New: fn(isize) -> Pointer;
    PyTuple_SetItem: fn(Pointer, isize, Pointer) -> c_int;
    PyTuple_Size: fn(Pointer) -> isize;
}

/// CPython as this program has it.
pub struct Python(Functions);

/// A reference that this library owns. Drop it only while the GIL is held.
pub struct Owned(NonNull<PyObject>);

// SAFETY: references are counted with the GIL, or atomically in a Python without one.
unsafe impl Send for Owned {}
// SAFETY: as above.
unsafe impl Sync for Owned {}

impl Owned {
    pub fn pointer(&self) -> Pointer {
        self.0.as_ptr()
    }

    /// Gives the reference to Python.
    pub fn into_pointer(self) -> Pointer {
        let pointer = self.pointer();
        std::mem::forget(self);
        pointer
    }
}

impl Drop for Owned {
    fn drop(&mut self) {
        if let Some(python) = Python::get() {
            // SAFETY: the reference is owned.
            unsafe { (python.0.Py_DecRef)(self.pointer()) };
        }
    }
}

impl Python {
    /// None in a program without CPython.
    pub fn get() -> Option<&'static Python> {
        static PYTHON: OnceLock<Option<Python>> = OnceLock::new();
        PYTHON.get_or_init(|| Functions::find().map(Python)).as_ref()
    }

    /// A new reference from one that Python gives away; None after an error, which stays set.
    fn owned(&self, pointer: Pointer) -> Option<Owned> {
        NonNull::new(pointer).map(Owned)
    }

    pub fn reference(&self, object: Pointer) -> Option<Owned> {
        let object = NonNull::new(object)?;
        // SAFETY: the object is alive.
        unsafe { (self.0.Py_IncRef)(object.as_ptr()) };
        Some(Owned(object))
    }

    /// The type of an object, which lives as long as the object.
    pub fn type_of(&self, object: Pointer) -> Pointer {
        // SAFETY: the object is alive, and holds its type.
        unsafe {
            let kind = (self.0.PyObject_Type)(object);
            (self.0.Py_DecRef)(kind);
            kind
        }
    }

    /// None past a tuple's end, and for an object of another type. No error is left.
    pub fn item(&self, tuple: Pointer, at: usize) -> Option<Pointer> {
        // SAFETY: PyTuple_GetItem checks the type and the index. A tuple holds its items.
        let item = unsafe { (self.0.PyTuple_GetItem)(tuple, at as isize) };
        if item.is_null() {
            self.clear_error();
        }
        (!item.is_null()).then_some(item)
    }

    /// The items of a tuple; none of an object of another type.
    pub fn items(&self, tuple: Pointer) -> impl Iterator<Item = Pointer> + '_ {
        // SAFETY: PyTuple_Size checks the type.
        let count = unsafe { (self.0.PyTuple_Size)(tuple) };
        if count < 0 {
            self.clear_error();
        }
        (0..count.max(0) as usize).filter_map(move |at| self.item(tuple, at))
    }

    pub fn tuple(&self, items: Vec<Owned>) -> Option<Owned> {
        // SAFETY: every item of the new tuple is set once, to a reference that it takes over.
        unsafe {
            let tuple = self.owned((self.0.PyTuple_New)(items.len() as isize))?;
            for (at, item) in items.into_iter().enumerate() {
                (self.0.PyTuple_SetItem)(tuple.pointer(), at as isize, item.into_pointer());
            }
            Some(tuple)
        }
    }

    /// None if the object is no int of 64 bits; no error is left.
    pub fn integer(&self, object: Pointer) -> Option<i64> {
        // SAFETY: PyLong_AsLongLong checks the type.
        let value = unsafe { (self.0.PyLong_AsLongLong)(object) };
        (value != -1 || !self.had_error()).then_some(value)
    }

    /// As `integer`, from 0 to 2^64 - 1.
    pub fn unsigned(&self, object: Pointer) -> Option<u64> {
        // SAFETY: PyLong_AsUnsignedLongLong checks the type.
        let value = unsafe { (self.0.PyLong_AsUnsignedLongLong)(object) };
        (value != u64::MAX || !self.had_error()).then_some(value)
    }

    pub fn float(&self, object: Pointer) -> Option<f64> {
        // SAFETY: PyFloat_AsDouble checks the type.
        let value = unsafe { (self.0.PyFloat_AsDouble)(object) };
        (value != -1.0 || !self.had_error()).then_some(value)
    }

    pub fn new_integer(&self, value: i32) -> Option<Owned> {
        // SAFETY: it takes a number.
        self.owned(unsafe { (self.0.PyLong_FromLong)(value.into()) })
    }

    /// The bytes of a bytes object; None for another object.
    pub fn bytes(&self, object: Pointer) -> Option<Vec<u8>> {
        // SAFETY: PyBytes_AsString checks the type, and its memory lives as long as the object.
        unsafe {
            let address = (self.0.PyBytes_AsString)(object);
            if address.is_null() {
                self.clear_error();
                return None;
            }
            let size = (self.0.PyBytes_Size)(object) as usize;
            Some(std::slice::from_raw_parts(address, size).to_vec())
        }
    }

    /// Calls with no argument, or with one. None after an error, which stays set.
    pub fn call(&self, callable: Pointer, argument: Option<Pointer>) -> Option<Owned> {
        let end: Pointer = null_mut();
        let call = self.0.PyObject_CallFunctionObjArgs;
        // SAFETY: NULL ends the arguments.
        self.owned(parked(|| unsafe {
            match argument {
                Some(argument) => call(callable, argument, end),
                None => call(callable, end),
            }
        }))
    }

    /// A built-in function whose first argument is a capsule of `state`.
    pub fn function(&self, method: &'static Method, state: Pointer) -> Option<Owned> {
        // SAFETY: the method lives as long as the program.
        self.owned(unsafe { (self.0.PyCFunction_NewEx)(method, state, null_mut()) })
    }

    pub fn capsule<T>(&self, state: &'static T) -> Option<Owned> {
        let address = std::ptr::from_ref(state).cast_mut().cast();
        // SAFETY: there is no name and no destructor.
        self.owned(unsafe { (self.0.PyCapsule_New)(address, std::ptr::null(), null_mut()) })
    }

    /// The address in a capsule of this name; None for another object.
    pub fn in_capsule(&self, capsule: Pointer, name: *const c_char) -> Option<NonNull<c_void>> {
        // SAFETY: PyCapsule_GetPointer checks the type and the name.
        let found = NonNull::new(unsafe { (self.0.PyCapsule_GetPointer)(capsule, name) });
        if found.is_none() {
            self.clear_error();
        }
        found
    }

    /// Runs `work` while other threads may use Python.
    pub fn without_gil<T>(&self, work: impl FnOnce() -> T) -> T {
        struct Held<'a>(&'a Python, *mut c_void);
        impl Drop for Held<'_> {
            fn drop(&mut self) {
                // SAFETY: the state is that of this thread.
                parked(|| unsafe { (self.0.0.PyEval_RestoreThread)(self.1) });
            }
        }
        // SAFETY: this thread holds the GIL.
        let _held = Held(self, unsafe { (self.0.PyEval_SaveThread)() });
        work()
    }

    pub fn clear_error(&self) {
        // SAFETY: it takes nothing.
        unsafe { (self.0.PyErr_Clear)() };
    }

    pub fn has_error(&self) -> bool {
        // SAFETY: it takes nothing.
        unsafe { !(self.0.PyErr_Occurred)().is_null() }
    }

    /// Whether an error was set, which it no longer is.
    fn had_error(&self) -> bool {
        let had = self.has_error();
        if had {
            self.clear_error();
        }
        had
    }
}

/// Runs a function of CPython that may wait for the GIL. If CPython ends the thread meanwhile, the
/// thread waits here for the end of the process.
fn parked<T>(work: impl FnOnce() -> T) -> T {
    struct Park;
    impl Drop for Park {
        fn drop(&mut self) {
            loop {
                std::thread::park();
            }
        }
    }
    let park = Park;
    let result = work();
    std::mem::forget(park);
    result
}

/// DLTensor of dlpack.h, the same in all versions 1.
#[repr(C)]
pub struct DlTensor {
    pub data: *mut c_void,
    pub device_type: i32,
    pub device_id: i32,
    pub dims: i32,
    pub dtype: DlDtype,
    pub shape: *const i64,
    pub strides: *const i64,
    pub byte_offset: u64,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct DlDtype {
    pub code: u8,
    pub bits: u8,
    pub lanes: u16,
}

/// The start of DLPackExchangeAPI, up to the one function in use. The functions before it are
/// addresses.
#[repr(C)]
pub struct DlExchange {
    pub major: u32,
    pub minor: u32,
    pub older: *const DlExchange,
    allocator: *const c_void,
    from_object: *const c_void,
    to_object: *const c_void,
    /// Fills in a description of a tensor that lives as long as the tensor. 0 is success. NULL
    /// where an array library has no such function.
    pub describe: Option<unsafe extern "C" fn(object: Pointer, tensor: *mut DlTensor) -> c_int>,
}

/// The name of the capsule that holds a `DlExchange`.
pub const EXCHANGE_NAME: &std::ffi::CStr = c"dlpack_exchange_api";
