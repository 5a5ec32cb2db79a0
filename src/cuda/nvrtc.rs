//! NVRTC: finds and opens libnvrtc once per process, and compiles a text to a cubin.
//!
//! A cubin of a newer major version than the driver's does not load. If there is a driver, the
//! search skips such libraries and says so in its account.

use super::driver::Driver;
use super::library::{Search, function_table, open, path_of};
use super::nvrtc_places::{Place, places, version_in_name};
use crate::environment;
use crate::error::{Error, Result, Status};
use cudarc::nvrtc::sys::nvrtcProgram;
use libloading::os::unix::Library;
use std::ffi::{CString, c_char, c_int};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

pub use super::nvrtc_places::OLDEST_MAJOR;

/// NVRTC_ERROR_COMPILATION: the text is wrong, and the log says where.
const ERROR_COMPILATION: c_int = 6;
/// NVRTC_ERROR_BUILTIN_OPERATION_FAILURE: libnvrtc-builtins was not found.
const ERROR_BUILTINS: c_int = 7;

function_table! {
    Functions {
        version ["nvrtcVersion"] (major: *mut c_int, minor: *mut c_int);
        num_supported_archs ["nvrtcGetNumSupportedArchs"] (count: *mut c_int);
        supported_archs ["nvrtcGetSupportedArchs"] (archs: *mut c_int);
        create_program ["nvrtcCreateProgram"] (
            program: *mut nvrtcProgram, text: *const c_char, name: *const c_char,
            num_headers: c_int, headers: *const *const c_char, header_names: *const *const c_char
        );
        destroy_program ["nvrtcDestroyProgram"] (program: *mut nvrtcProgram);
        compile_program ["nvrtcCompileProgram"] (program: nvrtcProgram, count: c_int, options: *const *const c_char);
        program_log_size ["nvrtcGetProgramLogSize"] (program: nvrtcProgram, bytes: *mut usize);
        program_log ["nvrtcGetProgramLog"] (program: nvrtcProgram, log: *mut c_char);
        cubin_size ["nvrtcGetCUBINSize"] (program: nvrtcProgram, bytes: *mut usize);
        cubin ["nvrtcGetCUBIN"] (program: nvrtcProgram, cubin: *mut c_char);
    } optional {
    }
}

impl Functions {
    fn failure(&self, call: &str, code: c_int) -> Error {
        let status = if code == ERROR_BUILTINS { Status::NoCompiler } else { Status::CompileFailed };
        Error::new(status, format!("{call} returned {code}"))
    }
}

/// The result of a compilation.
pub struct Output {
    pub cubin: Vec<u8>,
    /// The log as NVRTC wrote it, with the lines that the options asked for.
    pub log: String,
}

pub struct Nvrtc {
    functions: Functions,
    version: (u32, u32),
    archs: Vec<u32>,
    path: PathBuf,
}

struct Loaded {
    search: Search,
    nvrtc: Result<Nvrtc>,
}

impl Nvrtc {
    /// The library, found and opened at the first call of the process. Later calls return the same
    /// result.
    pub fn get() -> Result<&'static Nvrtc> {
        loaded().nvrtc.as_ref().map_err(Error::clone)
    }

    /// The places where libnvrtc was looked for.
    pub fn search() -> &'static Search {
        &loaded().search
    }

    /// (major, minor)
    pub fn version(&self) -> (u32, u32) {
        self.version
    }

    /// The architectures it makes cubins for, ascending: 80 is sm_80.
    pub fn archs(&self) -> &[u32] {
        &self.archs
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Compiles a text to a cubin. Several threads may call it at once. The log names the text
    /// `name`.
    pub fn compile(&self, name: &str, text: &str, options: &[String]) -> Result<Output> {
        let c_string = |what: &str, text: &str| {
            CString::new(text).map_err(|_| Error::new(Status::CompileFailed, format!("the {what} holds a NUL byte")))
        };
        let (c_name, c_text) = (c_string("name", name)?, c_string("kernel's text", text)?);
        let c_options = options.iter().map(|option| c_string("option", option)).collect::<Result<Vec<_>>>()?;
        let option_pointers: Vec<*const c_char> = c_options.iter().map(|option| option.as_ptr()).collect();

        let mut program = Program { functions: &self.functions, raw: std::ptr::null_mut() };
        // SAFETY: C strings that outlive the call, no headers; NVRTC copies the text. Destroyed in
        // drop.
        unsafe {
            self.functions.create_program(
                &mut program.raw,
                c_text.as_ptr(),
                c_name.as_ptr(),
                0,
                std::ptr::null(),
                std::ptr::null(),
            )
        }?;
        let count = option_pointers.len() as c_int;
        // SAFETY: a live program and `count` C strings.
        let code = unsafe { (self.functions.compile_program)(program.raw, count, option_pointers.as_ptr()) };
        let log = program.log()?;
        match code {
            0 => Ok(Output { cubin: program.cubin()?, log }),
            ERROR_COMPILATION => {
                Err(Error::new(Status::CompileFailed, format!("NVRTC refused {name}: {}", head(&log))))
            }
            code => {
                let error = self.functions.failure("nvrtcCompileProgram", code);
                Err(Error::new(error.status, format!("{name}: {}: {}", error.message, head(&log))))
            }
        }
    }

    fn from_library(library: &Library) -> Result<Nvrtc, String> {
        let functions = Functions::load(library)?;
        let (mut major, mut minor) = (0, 0);
        // SAFETY: writes two ints.
        unsafe { functions.version(&mut major, &mut minor) }.map_err(|error| error.message)?;
        let mut count = 0;
        // SAFETY: writes one int.
        unsafe { functions.num_supported_archs(&mut count) }.map_err(|error| error.message)?;
        let mut archs: Vec<c_int> = vec![0; count.max(0) as usize];
        // SAFETY: writes as many ints as it has just said.
        unsafe { functions.supported_archs(archs.as_mut_ptr()) }.map_err(|error| error.message)?;
        let mut archs: Vec<u32> = archs.into_iter().map(|arch| arch.max(0) as u32).collect();
        archs.sort_unstable();
        let path = path_of(functions.version as *const ()).unwrap_or_default();
        Ok(Nvrtc { functions, version: (major as u32, minor as u32), archs, path })
    }

    /// Opens libnvrtc-builtins beside the library and keeps it. NVRTC asks for it by name at its
    /// first compilation and then gets this one. pip's package of 13.0 has no RUNPATH and would not
    /// find its own sibling.
    fn open_builtins(&self) {
        let file = format!("libnvrtc-builtins.so.{}.{}", self.version.0, self.version.1);
        let real = self.path.canonicalize().ok();
        for folder in [Some(self.path.as_path()), real.as_deref()].into_iter().flatten().filter_map(Path::parent) {
            if folder.is_absolute()
                && let Ok(library) = open(folder.join(&file).as_os_str())
            {
                std::mem::forget(library);
                return;
            }
        }
    }
}

/// A program of NVRTC, destroyed on drop.
struct Program<'a> {
    functions: &'a Functions,
    raw: nvrtcProgram,
}

impl Program<'_> {
    fn log(&self) -> Result<String> {
        let mut bytes = 0;
        // SAFETY: a live program; writes one size_t.
        unsafe { self.functions.program_log_size(self.raw, &mut bytes) }?;
        let mut log = vec![0u8; bytes];
        if bytes > 0 {
            // SAFETY: writes as many bytes as it has just said, NUL included.
            unsafe { self.functions.program_log(self.raw, log.as_mut_ptr().cast()) }?;
        }
        Ok(String::from_utf8_lossy(&log).trim_end_matches('\0').to_owned())
    }

    fn cubin(&self) -> Result<Vec<u8>> {
        let mut bytes = 0;
        // SAFETY: a compiled program; writes one size_t.
        unsafe { self.functions.cubin_size(self.raw, &mut bytes) }?;
        let mut cubin = vec![0u8; bytes];
        // SAFETY: writes as many bytes as it has just said.
        unsafe { self.functions.cubin(self.raw, cubin.as_mut_ptr().cast()) }?;
        Ok(cubin)
    }
}

impl Drop for Program<'_> {
    fn drop(&mut self) {
        if !self.raw.is_null() {
            // SAFETY: created once, destroyed once.
            let _ = unsafe { self.functions.destroy_program(&mut self.raw) };
        }
    }
}

/// The lines of a log that a person needs first: at most four errors.
fn head(log: &str) -> String {
    let errors: Vec<&str> = log.lines().filter(|line| line.contains("error")).take(4).collect();
    let lines =
        if errors.is_empty() { log.lines().filter(|line| !line.trim().is_empty()).take(4).collect() } else { errors };
    lines.join("\n")
}

fn loaded() -> &'static Loaded {
    static LOADED: OnceLock<Loaded> = OnceLock::new();
    LOADED.get_or_init(|| {
        let driver_version = {
            // A driver may be there without a GPU; its version counts all the same.
            let _ = Driver::get();
            Driver::search().version
        };
        let places = places(driver_version.map(|(major, _)| major), &environment::variable);
        let mut search = Search::default();
        let nvrtc = find(&places, driver_version, &mut search);
        Loaded { search, nvrtc }
    })
}

fn find(places: &[Place], driver: Option<(u32, u32)>, search: &mut Search) -> Result<Nvrtc> {
    let too_new = |major: u32| {
        driver
            .filter(|driver| major > driver.0)
            .map(|(d, m)| format!("{major} is newer than the driver's CUDA {d}.{m}"))
    };
    for place in places {
        if place.files.is_empty() {
            search.note(&place.name, "none there");
        }
        for file in &place.files {
            let shown = if file.is_absolute() { file.display().to_string() } else { place.name.clone() };
            // A library whose name tells its version is not opened: it would stay in the process
            // for nothing.
            let named = version_in_name(file).and_then(|version| version.first().copied());
            if let Some(reason) = named.and_then(too_new) {
                search.note(shown, reason);
                continue;
            }
            let opened = open(file.as_os_str()).and_then(|library| {
                let nvrtc = Nvrtc::from_library(&library)?;
                let (major, minor) = nvrtc.version;
                if major < OLDEST_MAJOR {
                    return Err(format!("{major}.{minor} is older than {OLDEST_MAJOR}.0"));
                }
                too_new(major).map_or(Ok(()), Err)?;
                std::mem::forget(library);
                Ok(nvrtc)
            });
            match opened {
                Ok(nvrtc) => {
                    nvrtc.open_builtins();
                    search.note(shown, format!("in use, {}.{}", nvrtc.version.0, nvrtc.version.1));
                    search.version = Some(nvrtc.version);
                    search.found = Some(nvrtc.path.display().to_string());
                    return Ok(nvrtc);
                }
                Err(reason) => search.note(shown, reason),
            }
        }
    }
    Err(search
        .failed(Status::NoCompiler, "no usable NVRTC (libnvrtc) on this machine; set FLASHTUNE_NVRTC to its path"))
}
