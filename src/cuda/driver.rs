//! The CUDA driver: libcuda opened once per process, its functions, and its result codes as errors.
//!
//! `Driver::get` is cheap to call again. The rest of `cuda` wraps these functions safely.

use super::library::{Search, function_table, open};
use crate::error::{Error, Result, Status};
use crate::fork;
use cudarc::driver::sys::{CUcontext, CUdevice, CUdeviceptr, CUevent, CUfunction, CUlaunchConfig, CUmodule, CUstream};
use libloading::os::unix::Library;
use std::ffi::{CStr, OsStr, c_char, c_int, c_uchar, c_uint, c_void};
use std::sync::OnceLock;

/// CUDA_ERROR_OUT_OF_MEMORY
const OUT_OF_MEMORY: c_int = 2;
/// CUDA_ERROR_NOT_INITIALIZED: every call of a process whose parent used CUDA before the fork.
const NOT_INITIALIZED: c_int = 3;
const NO_FORK: &str = "CUDA does not survive a fork: a child process may use it only if the parent had not";
/// CUDA_ERROR_STREAM_CAPTURE_IMPLICIT: a query of the legacy stream while a stream that it waits
/// for is capturing.
pub(super) const STREAM_CAPTURE_IMPLICIT: c_int = 906;

function_table! {
    /// The functions in use. Results are integers; enumerators are passed as integers.
    Driver {
        init ["cuInit"] (flags: c_uint);
        driver_get_version ["cuDriverGetVersion"] (version: *mut c_int);
        get_error_name ["cuGetErrorName"] (code: c_int, name: *mut *const c_char);
        get_error_string ["cuGetErrorString"] (code: c_int, text: *mut *const c_char);
        device_get_count ["cuDeviceGetCount"] (count: *mut c_int);
        device_get ["cuDeviceGet"] (device: *mut CUdevice, ordinal: c_int);
        device_get_name ["cuDeviceGetName"] (name: *mut c_char, bytes: c_int, device: CUdevice);
        device_get_attribute ["cuDeviceGetAttribute"] (value: *mut c_int, attribute: c_int, device: CUdevice);
        device_total_mem ["cuDeviceTotalMem_v2"] (bytes: *mut usize, device: CUdevice);
        primary_ctx_retain ["cuDevicePrimaryCtxRetain"] (context: *mut CUcontext, device: CUdevice);
        primary_ctx_release ["cuDevicePrimaryCtxRelease_v2"] (device: CUdevice);
        ctx_get_current ["cuCtxGetCurrent"] (context: *mut CUcontext);
        ctx_push_current ["cuCtxPushCurrent_v2"] (context: CUcontext);
        ctx_pop_current ["cuCtxPopCurrent_v2"] (context: *mut CUcontext);
        ctx_get_device ["cuCtxGetDevice"] (device: *mut CUdevice);
        exchange_capture_mode ["cuThreadExchangeStreamCaptureMode"] (mode: *mut c_int);
        mem_alloc ["cuMemAlloc_v2"] (address: *mut CUdeviceptr, bytes: usize);
        mem_free ["cuMemFree_v2"] (address: CUdeviceptr);
        memcpy_to_device ["cuMemcpyHtoDAsync_v2"] (to: CUdeviceptr, from: *const c_void, bytes: usize, stream: CUstream);
        memcpy_to_host ["cuMemcpyDtoHAsync_v2"] (to: *mut c_void, from: CUdeviceptr, bytes: usize, stream: CUstream);
        memset ["cuMemsetD8Async"] (address: CUdeviceptr, value: c_uchar, bytes: usize, stream: CUstream);
        stream_create ["cuStreamCreate"] (stream: *mut CUstream, flags: c_uint);
        stream_destroy ["cuStreamDestroy_v2"] (stream: CUstream);
        stream_synchronize ["cuStreamSynchronize"] (stream: CUstream);
        stream_is_capturing ["cuStreamIsCapturing"] (stream: CUstream, status: *mut c_int);
        // In driver 12.0 and later. Every NVRTC in use is of CUDA 12 or later too: see
        // `nvrtc_places::OLDEST_MAJOR`.
        stream_get_id ["cuStreamGetId"] (stream: CUstream, id: *mut u64);
        tensor_map_encode_tiled ["cuTensorMapEncodeTiled"] (
            map: *mut c_void, element: c_int, rank: c_uint, address: *mut c_void,
            extents: *const u64, strides: *const u64, box_extents: *const c_uint, element_strides: *const c_uint,
            interleave: c_int, swizzle: c_int, l2_promotion: c_int, fill: c_int
        );
        event_create ["cuEventCreate"] (event: *mut CUevent, flags: c_uint);
        event_destroy ["cuEventDestroy_v2"] (event: CUevent);
        event_record ["cuEventRecord"] (event: CUevent, stream: CUstream);
        event_synchronize ["cuEventSynchronize"] (event: CUevent);
        // Driver 12.8 has a second version with the same signature; older drivers have only the
        // first.
        event_elapsed_time ["cuEventElapsedTime_v2", "cuEventElapsedTime"] (ms: *mut f32, start: CUevent, stop: CUevent);
        module_load_data ["cuModuleLoadData"] (module: *mut CUmodule, image: *const c_void);
        module_unload ["cuModuleUnload"] (module: CUmodule);
        module_get_function ["cuModuleGetFunction"] (function: *mut CUfunction, module: CUmodule, name: *const c_char);
        func_get_attribute ["cuFuncGetAttribute"] (value: *mut c_int, attribute: c_int, function: CUfunction);
        func_set_attribute ["cuFuncSetAttribute"] (function: CUfunction, attribute: c_int, value: c_int);
        launch_kernel_ex ["cuLaunchKernelEx"] (
            config: *const CUlaunchConfig, function: CUfunction, params: *mut *mut c_void, extra: *mut *mut c_void
        );
    } optional {
        // In driver 12.4 and later.
        func_load ["cuFuncLoad"] (function: CUfunction);
    }
}

/// The first driver with all functions of the table, by its CUDA version.
const OLDEST_MAJOR: u32 = 12;

/// Says so if a library that lacks a function is the driver of an older CUDA version.
fn too_old(library: &Library) -> Option<String> {
    let mut version = 0;
    // SAFETY: the symbol is documented to be a C function of this signature, and writes one int.
    let code =
        unsafe { library.get::<unsafe extern "C" fn(*mut c_int) -> c_int>(b"cuDriverGetVersion").ok()?(&mut version) };
    let (major, minor) = (version as u32 / 1000, version as u32 % 1000 / 10);
    let is_older = code == 0 && major < OLDEST_MAJOR;
    is_older.then(|| format!("it is of CUDA {major}.{minor}; the library needs {OLDEST_MAJOR}.0 or later"))
}

struct Loaded {
    search: Search,
    driver: Result<Driver>,
    /// `fork::generation` in the process that opened it.
    forks: u32,
}

impl Driver {
    /// The driver, opened and initialised at the first call of the process. Later calls return the
    /// same result, and an error in a forked child.
    pub fn get() -> Result<&'static Driver> {
        let loaded = loaded();
        let driver = loaded.driver.as_ref().map_err(Error::clone)?;
        match loaded.forks == fork::generation() {
            true => Ok(driver),
            false => Err(Error::new(Status::NoDevice, format!("{NO_FORK}, and this one's opened it before the fork"))),
        }
    }

    /// The places where libcuda was looked for. Its version is there even without a GPU.
    pub fn search() -> &'static Search {
        &loaded().search
    }

    fn open(search: &mut Search) -> Result<Driver> {
        // The versioned name comes first: toolkits ship a stub under the other name, and every call
        // of the stub fails.
        for name in ["libcuda.so.1", "libcuda.so"] {
            let found = open(OsStr::new(name)).and_then(|library| {
                let driver = Driver::load(&library).map_err(|reason| too_old(&library).unwrap_or(reason))?;
                // This call is allowed before cuInit. A toolkit's stub fails here, as in every
                // call.
                let version = driver.version().map_err(|error| error.message)?;
                std::mem::forget(library);
                Ok((driver, version))
            });
            match found {
                Ok((driver, version)) => {
                    search.version = Some((version / 1000, version % 1000 / 10));
                    // SAFETY: cuInit may be called any number of times, from any thread.
                    if let Err(error) = unsafe { driver.init(0) } {
                        search.note(name, &error);
                        return Err(Error::new(Status::NoDevice, error.message).context("the CUDA driver found no GPU"));
                    }
                    search.note(name, "in use");
                    search.found = Some(name.to_owned());
                    return Ok(driver);
                }
                Err(reason) => search.note(name, reason),
            }
        }
        Err(search.failed(Status::NoDevice, "no usable CUDA driver (libcuda) on this machine"))
    }

    /// `major * 1000 + minor * 10`
    pub fn version(&self) -> Result<u32> {
        let mut version = 0;
        // SAFETY: writes one int.
        unsafe { self.driver_get_version(&mut version) }?;
        Ok(version as u32)
    }

    fn failure(&self, call: &str, code: c_int) -> Error {
        let status = if code == OUT_OF_MEMORY { Status::OutOfMemory } else { Status::Cuda };
        let name = self.text_of(self.get_error_name, code).unwrap_or("an error that this driver has no name for");
        let text = self.text_of(self.get_error_string, code).unwrap_or("");
        let separator = if text.is_empty() { "" } else { ": " };
        let error = Error::new(status, format!("{call} returned {name} ({code}){separator}{text}"));
        if code == NOT_INITIALIZED { error.context(NO_FORK) } else { error }
    }

    fn text_of(
        &self,
        function: unsafe extern "C" fn(c_int, *mut *const c_char) -> c_int,
        code: c_int,
    ) -> Option<&'static str> {
        let mut text = std::ptr::null();
        // SAFETY: both functions write a pointer to a static string, or NULL for a code they do not
        // know.
        let result = unsafe { function(code, &mut text) };
        if result != 0 || text.is_null() {
            return None;
        }
        // SAFETY: a NUL-terminated string in the driver's constant data; the driver is never
        // unloaded.
        unsafe { CStr::from_ptr(text) }.to_str().ok()
    }

    /// `stream_is_capturing` that returns the code itself, since one of its errors is an answer.
    pub(super) fn capture_status(&self, stream: CUstream) -> Result<bool> {
        let mut status = 0;
        // SAFETY: the handle is the caller's live stream or one of the special ones; writes one
        // int.
        match unsafe { (self.stream_is_capturing)(stream, &mut status) } {
            0 => Ok(status != 0),
            STREAM_CAPTURE_IMPLICIT => Ok(true),
            code => Err(self.failure("cuStreamIsCapturing", code)),
        }
    }
}

fn loaded() -> &'static Loaded {
    static LOADED: OnceLock<Loaded> = OnceLock::new();
    LOADED.get_or_init(|| {
        let mut search = Search::default();
        // Counts the forks from here on.
        let forks = fork::generation();
        let driver = Driver::open(&mut search);
        Loaded { search, driver, forks }
    })
}
