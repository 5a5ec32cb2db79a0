//! Contexts: a device, its plans and its records behind one opaque handle. This file checks the
//! options, opens the backend and describes the device.

use super::panic_boundary::enter;
use super::sized::{self, SizedStruct};
use super::text::{fixed, optional_path};
use crate::backend::Backend;
use crate::cpu::{Cpu, FOR_SMALL_ALLOCATIONS, require_available};
use crate::device::Arch;
use crate::error::{Error, Result};
use crate::fork;
use crate::kernel::pack::{Place, Setting, place};
use crate::kernel::{Gpu, cache_dir, nvrtc_version};
use crate::plan::{Engine, EngineOptions, Policy};
use crate::tune::DEFAULT_TIME_LIMIT;
use std::ffi::{c_char, c_void};
use std::path::PathBuf;
use std::time::Duration;

/// The GPU device_ordinal if it and its compiler or a pack can be used, else the CPU. A log line
/// gives the reason, and flashtune_context_device the backend. On the CPU a launch then checks its
/// tensors: a device pointer returns INVALID_ARGUMENT.
pub const FLASHTUNE_BACKEND_AUTO: i32 = 0;
/// An NVIDIA GPU of compute capability 8.0 or later.
pub const FLASHTUNE_BACKEND_CUDA: i32 = 1;
/// The cores of the host.
pub const FLASHTUNE_BACKEND_CPU: i32 = 2;

/// A problem without a record uses the heuristic's config. Only flashtune_autotune measures.
pub const FLASHTUNE_TUNING_RECORDS: i32 = 0;
/// A problem without a record is measured during prepare, within tuning_time_limit_seconds. The
/// record is kept.
pub const FLASHTUNE_TUNING_TUNE: i32 = 1;

/// A device, its plans and its records. flashtune_context_create makes it, and
/// flashtune_context_destroy frees it. Any number of threads may use one at once. A function whose
/// context is NULL returns INVALID_ARGUMENT, except flashtune_context_destroy.
///
/// A context serves the process that made it. In a child process made by fork, a function returns
/// INVALID_ARGUMENT for it, except flashtune_context_destroy. A child may make CPU contexts of its
/// own. CUDA works in a child only if the parent had not used it before the fork. Otherwise a new
/// CUDA context returns NO_DEVICE, and FLASHTUNE_BACKEND_AUTO opens the CPU.
pub struct flashtune_context {
    pub(super) engine: Engine,
    /// The caller left the choice of the backend to the library.
    pub(super) is_auto: bool,
    /// `fork::generation` in the process that made it.
    forks: u32,
}

/// The options of a new context. Zero is the default of every field except struct_size.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct flashtune_context_options {
    /// sizeof(flashtune_context_options).
    pub struct_size: u64,
    /// A FLASHTUNE_BACKEND_*.
    pub backend: i32,
    /// The GPU's number as the CUDA driver counts, from 0. Ignored with cuda_context and by the CPU
    /// backend.
    pub device_ordinal: i32,
    /// A CUcontext of the caller, which must outlive this context. NULL selects the device's
    /// primary context, which the CUDA runtime uses too. Must be NULL for FLASHTUNE_BACKEND_CPU.
    pub cuda_context: *mut c_void,
    /// Folder of records and compiled kernels. The folder must belong to this user alone. The
    /// string is copied.
    ///
    /// - NULL selects $XDG_CACHE_HOME/flashtune or $HOME/.cache/flashtune.
    /// - "" selects no folder: everything stays in memory.
    /// - The environment variable FLASHTUNE_CACHE_DIR takes precedence over NULL and over a path,
    ///   but not over "".
    pub cache_dir: *const c_char,
    /// A FLASHTUNE_TUNING_*.
    pub tuning_policy: i32,
    /// Threads of the CPU backend, 0 to 1024. 0 means one for each core that this process may use.
    /// Ignored by the CUDA backend.
    pub num_threads: i32,
    /// Limit in seconds for tuning one problem, up to 366 days. 0 means 20 seconds.
    pub tuning_time_limit_seconds: f64,
    /// A pack: a file of kernels that were compiled ahead of time (docs/packs.md). A pack that
    /// cannot be used causes a log line, not a failure; flashtune_context_pack has the reason.
    /// Ignored by the CPU backend. The string is copied.
    ///
    /// - NULL selects libflashtune.pack beside the library, if it exists. That file must belong to
    ///   root, to this user or to the owner of the library, and nobody else may write to it.
    /// - "" selects no pack.
    /// - The environment variable FLASHTUNE_PACK takes precedence over NULL and over a path, but
    ///   not over "".
    pub pack: *const c_char,
}

/// The device of a context. Text is UTF-8, ends in NUL, and is cut if it is too long.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct flashtune_device_info {
    /// sizeof(flashtune_device_info), set by the caller.
    pub struct_size: u64,
    /// FLASHTUNE_BACKEND_CUDA or FLASHTUNE_BACKEND_CPU.
    pub backend: i32,
    /// Streaming multiprocessors of a GPU, or worker threads of the CPU backend.
    pub sm_count: u32,
    /// The device's name, for example "NVIDIA H200".
    pub name: [c_char; 128],
    /// The architecture, for example "sm_90", or "cpu".
    pub arch: [c_char; 16],
    /// Memory of the device in bytes.
    pub memory_bytes: u64,
    /// The CUDA version that the driver supports: 1000 * major + 10 * minor. 0 on the CPU.
    pub driver_version: u32,
    /// The version of the NVRTC in use, in the same form. 0 on the CPU, and where none is found.
    /// The first flashtune_context_device on a GPU looks for it, unless an earlier call has.
    pub nvrtc_version: u32,
}

const MAX_THREADS: i32 = 1024;
/// Records, threads and tables of a context take less. If the system refuses as much, creation
/// fails here and not in a small allocation, which could only end the process.
const LEAST_FREE_BYTES: usize = 32 << 20;
/// One year. A longer limit is a mistake, and Duration has a maximum.
const MAX_TIME_LIMIT_SECONDS: f64 = 366.0 * 86400.0;

// SAFETY: repr(C), a u64 first, then integers, floats and raw pointers. They have no invalid bytes.
unsafe impl SizedStruct for flashtune_context_options {
    const NAME: &'static str = "flashtune_context_options";
    const OLDEST: usize = 48;
}
// This number grows with the struct. OLDEST stays.
const _: () = assert!(size_of::<flashtune_context_options>() == 56);

// SAFETY: repr(C), a u64 first, then integers.
unsafe impl SizedStruct for flashtune_device_info {
    const NAME: &'static str = "flashtune_device_info";
    const OLDEST: usize = 176;
}
// This number grows with the struct. OLDEST stays.
const _: () = assert!(size_of::<flashtune_device_info>() == 176);

/// Makes a context and writes it to context. The caller frees it with flashtune_context_destroy.
/// options may be NULL for all defaults.
///
/// The default backend is FLASHTUNE_BACKEND_AUTO, which opens the CPU where no GPU can be used. A
/// program whose tensors are in device memory asks for FLASHTUNE_BACKEND_CUDA, and then learns the
/// reason here.
///
/// The caller's current CUDA context is the same after this call, as after every other. A cache
/// folder or a pack that cannot be used causes a log line, not a failure. A missing libnvrtc fails
/// the first call that compiles a kernel, with NO_COMPILER. May be called from any thread, but not
/// during stream capture.
///
/// Statuses: OK, INVALID_ARGUMENT, UNSUPPORTED (the GPU is too old), NO_DEVICE (the message lists
/// the places tried), CUDA, OUT_OF_MEMORY.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flashtune_context_create(
    options: *const flashtune_context_options,
    context: *mut *mut flashtune_context,
) -> i32 {
    enter(|| {
        let context = sized::output("context", context)?;
        // Counts the forks from here on.
        let forks = fork::generation();
        require_available(LEAST_FREE_BYTES).map_err(|error| error.context("making a context"))?;
        let defaults = options.is_null();
        // SAFETY: the C caller promises a struct of the size that it says.
        let options = if defaults { DEFAULTS } else { unsafe { sized::read("options", options)? } };
        // SAFETY: the C caller promises NULL or a terminated string.
        let cache_dir = cache_folder(unsafe { optional_path(options.cache_dir) });
        // SAFETY: the C caller promises NULL or a terminated string.
        let pack = place(&pack_setting(unsafe { optional_path(options.pack) }));
        let backend = open_backend(&options, cache_dir.clone(), pack)?;
        let is_auto = options.backend == FLASHTUNE_BACKEND_AUTO;
        let engine = Engine::new(backend, engine_options(&options, cache_dir)?);
        // SAFETY: not NULL, aligned, and the C caller promises that it may be written.
        unsafe { context.write(Box::into_raw(Box::new(flashtune_context { engine, is_auto, forks }))) };
        Ok(())
    })
}

/// Frees a context and all it holds, and ends its threads before it returns. NULL does nothing. No
/// other call may be using the context. On a GPU, all work that it enqueued must be done. May be
/// called from any thread, but not during stream capture. In a child process made by fork, the call
/// frees nothing and returns OK.
///
/// Statuses: OK.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flashtune_context_destroy(context: *mut flashtune_context) -> i32 {
    enter(|| {
        // SAFETY: the C caller promises a live context or NULL.
        let forks = unsafe { context.as_ref() }.map(|context| context.forks);
        // A forked child has no threads to join, and CUDA does not work there: the memory stays.
        if forks == Some(fork::generation()) {
            // SAFETY: the pointer came from Box::into_raw in create, and the C caller promises that
            // nobody uses it any more.
            drop(unsafe { Box::from_raw(context) });
        }
        Ok(())
    })
}

/// Forbids further preparation: from now on, no call compiles or measures. A problem without a plan
/// uses a loaded config of its class or returns NOT_PREPARED, as flashtune_forward_prepare says.
/// This suits servers that prepare at start. It cannot be undone. May be called from any thread,
/// also during stream capture.
///
/// Statuses: OK, INVALID_ARGUMENT.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flashtune_context_seal(context: *mut flashtune_context) -> i32 {
    enter(|| {
        // SAFETY: the C caller promises a live context or NULL.
        unsafe { flashtune_context::of(context)? }.engine.seal();
        Ok(())
    })
}

/// Describes the device of the context. The caller sets info->struct_size to
/// sizeof(flashtune_device_info). May be called from any thread, also during stream capture. If
/// the process has not looked for NVRTC before, as where a pack has all kernels, the first call on
/// a GPU searches for it and loads it, which may take 0.2 s.
///
/// Statuses: OK, INVALID_ARGUMENT, OUT_OF_MEMORY.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flashtune_context_device(
    context: *mut flashtune_context,
    info: *mut flashtune_device_info,
) -> i32 {
    enter(|| {
        // SAFETY: the C caller promises a live context or NULL.
        let context = unsafe { flashtune_context::of(context)? };
        // SAFETY: the C caller promises a struct of the size that it says.
        let size = unsafe { sized::output_size("info", info)? };
        if !context.is_cpu() {
            context.require_memory("looking for NVRTC")?;
        }
        let described = flashtune_device_info::of(context.engine.backend());
        // SAFETY: `size` came from this pointer.
        unsafe { sized::write(info, size, &described) };
        Ok(())
    })
}

impl flashtune_context {
    /// OUT_OF_MEMORY if the system would refuse the small allocations of a call. A launch on a GPU
    /// that has its plan allocates nothing and must not wait for the system, so it does not ask.
    pub(super) fn require_memory(&self, doing: &str) -> Result<()> {
        let bytes = match self.engine.backend() {
            Backend::Cpu(_) => FOR_SMALL_ALLOCATIONS,
            // Kernels are rendered and compiled.
            Backend::Cuda(_) => LEAST_FREE_BYTES,
        };
        require_available(bytes).map_err(|error| error.context(doing))
    }

    pub(super) fn is_cpu(&self) -> bool {
        matches!(self.engine.backend(), Backend::Cpu(_))
    }

    /// # Safety
    /// `context` is NULL or live for as long as the reference is used.
    pub(super) unsafe fn of<'a>(context: *mut flashtune_context) -> Result<&'a flashtune_context> {
        // SAFETY: by the caller's promise.
        let context = unsafe { context.as_ref() }
            .ok_or_else(|| Error::invalid("context is NULL; it must come from flashtune_context_create"))?;
        match context.forks == fork::generation() {
            true => Ok(context),
            false => Err(Error::invalid(
                "context was made before this process was forked; threads and CUDA do not survive a fork, so make one after the fork",
            )),
        }
    }
}

impl flashtune_device_info {
    fn of(backend: &Backend) -> Self {
        let device = backend.device();
        let (nvrtc_major, nvrtc_minor) = if device.arch == Arch::Cpu { (0, 0) } else { nvrtc_version() };
        flashtune_device_info {
            struct_size: size_of::<Self>() as u64,
            backend: match backend {
                Backend::Cuda(_) => FLASHTUNE_BACKEND_CUDA,
                Backend::Cpu(_) => FLASHTUNE_BACKEND_CPU,
            },
            sm_count: device.sm_count,
            name: fixed(&device.name),
            arch: fixed(&device.arch.to_string()),
            memory_bytes: device.memory_bytes,
            driver_version: device.driver_version,
            nvrtc_version: 1000 * nvrtc_major + 10 * nvrtc_minor,
        }
    }
}

const DEFAULTS: flashtune_context_options = flashtune_context_options {
    struct_size: size_of::<flashtune_context_options>() as u64,
    backend: FLASHTUNE_BACKEND_AUTO,
    device_ordinal: 0,
    cuda_context: std::ptr::null_mut(),
    cache_dir: std::ptr::null(),
    tuning_policy: FLASHTUNE_TUNING_RECORDS,
    num_threads: 0,
    tuning_time_limit_seconds: 0.0,
    pack: std::ptr::null(),
};

fn open_backend(
    options: &flashtune_context_options,
    cache_dir: Option<PathBuf>,
    pack: Option<Place>,
) -> Result<Backend> {
    if !(0..=MAX_THREADS).contains(&options.num_threads) {
        return Err(Error::invalid(format!(
            "options.num_threads is {}; it must be from 0 (all cores) to {MAX_THREADS}",
            options.num_threads
        )));
    }
    if options.device_ordinal < 0 {
        return Err(Error::invalid(format!(
            "options.device_ordinal is {}; it must be 0 or more",
            options.device_ordinal
        )));
    }
    let num_threads = options.num_threads as usize;
    match options.backend {
        FLASHTUNE_BACKEND_CPU if !options.cuda_context.is_null() => Err(Error::invalid(format!(
            "options.cuda_context is {:p}; it must be NULL for FLASHTUNE_BACKEND_CPU",
            options.cuda_context
        ))),
        FLASHTUNE_BACKEND_CPU => Cpu::new(num_threads).map(Backend::Cpu),
        FLASHTUNE_BACKEND_CUDA => open_gpu(options, cache_dir, pack),
        // A caller that passes a CUDA context wants that GPU and no fallback.
        FLASHTUNE_BACKEND_AUTO if !options.cuda_context.is_null() => open_gpu(options, cache_dir, pack),
        FLASHTUNE_BACKEND_AUTO => Backend::open_auto(options.device_ordinal, cache_dir, pack, num_threads),
        other => Err(Error::invalid(format!(
            "options.backend is {other}; it must be FLASHTUNE_BACKEND_AUTO (0), _CUDA (1) or _CPU (2)"
        ))),
    }
}

fn open_gpu(options: &flashtune_context_options, cache_dir: Option<PathBuf>, pack: Option<Place>) -> Result<Backend> {
    let given = (!options.cuda_context.is_null()).then_some(options.cuda_context);
    let gpu = Gpu::new(options.device_ordinal, given, cache_dir)?;
    Ok(Backend::Cuda(gpu.with_pack(pack)))
}

/// An empty setting selects no pack, whatever the environment says.
fn pack_setting(setting: Option<PathBuf>) -> Setting {
    match setting {
        None => Setting::Default,
        Some(name) if name.as_os_str().is_empty() => Setting::None,
        Some(path) => Setting::Path(path),
    }
}

/// The folder of records and cubins. An empty setting selects none, whatever the environment says.
fn cache_folder(setting: Option<PathBuf>) -> Option<PathBuf> {
    match setting {
        Some(name) if name.as_os_str().is_empty() => None,
        setting => cache_dir::resolve(setting.as_deref()),
    }
}

fn engine_options(options: &flashtune_context_options, cache_dir: Option<PathBuf>) -> Result<EngineOptions> {
    let policy = match options.tuning_policy {
        FLASHTUNE_TUNING_RECORDS => Policy::Records,
        FLASHTUNE_TUNING_TUNE => Policy::Tune,
        other => {
            return Err(Error::invalid(format!(
                "options.tuning_policy is {other}; it must be FLASHTUNE_TUNING_RECORDS (0) or _TUNE (1)"
            )));
        }
    };
    let limit = time_limit("options.tuning_time_limit_seconds", options.tuning_time_limit_seconds)?;
    Ok(EngineOptions { cache_dir, policy, time_limit: limit.unwrap_or(DEFAULT_TIME_LIMIT) })
}

/// A time limit in seconds. None stands for 0, the default.
pub(super) fn time_limit(argument: &str, seconds: f64) -> Result<Option<Duration>> {
    if !(0.0..=MAX_TIME_LIMIT_SECONDS).contains(&seconds) {
        return Err(Error::invalid(format!(
            "{argument} is {seconds}; it must be from 0 (the default) to {MAX_TIME_LIMIT_SECONDS} seconds"
        )));
    }
    Ok((seconds > 0.0).then(|| Duration::from_secs_f64(seconds)))
}
