//! Opens a shared library, keeps an account of the places tried, and reads its functions into a
//! table.
//!
//! `flashtune info` prints the account, and so does the error when nothing was found. An opened
//! library stays open: its functions are handed out for the life of the process.

use crate::error::{Error, Status};
use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
use std::error::Error as _;
use std::ffi::{CStr, OsStr};
use std::fmt;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

/// A place where a library was looked for, and the result.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Attempt {
    pub place: String,
    pub outcome: String,
}

/// The account of a search.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct Search {
    /// The place of the library in use; None if there is none.
    pub found: Option<String>,
    /// The CUDA version of the library found, as (major, minor). It may be known even if the
    /// library is of no use (no GPU).
    pub version: Option<(u32, u32)>,
    pub attempts: Vec<Attempt>,
}

impl Search {
    pub(super) fn note(&mut self, place: impl fmt::Display, outcome: impl fmt::Display) {
        self.attempts.push(Attempt { place: place.to_string(), outcome: outcome.to_string() });
    }

    /// The error of a search that found nothing usable. It lists all places tried.
    pub(super) fn failed(&self, status: Status, what: &str) -> Error {
        let mut message = format!("{what}; tried");
        for (index, attempt) in self.attempts.iter().enumerate() {
            message.push_str(if index == 0 { " " } else { "; " });
            message.push_str(&format!("{} ({})", attempt.place, attempt.outcome));
        }
        Error::new(status, message)
    }
}

pub(super) fn open(name: &OsStr) -> Result<Library, String> {
    // SAFETY: opening runs the library's initialisers. Only CUDA's own libraries are named here,
    // whose initialisers have no precondition; RTLD_LOCAL keeps their symbols out of the host
    // program.
    unsafe { Library::open(Some(name), RTLD_NOW | RTLD_LOCAL) }
        .map_err(|error| error.source().map_or_else(|| error.to_string(), ToString::to_string))
}

/// The file that an address of this process was loaded from.
pub fn path_of(address: *const ()) -> Option<PathBuf> {
    // SAFETY: plain pointers and integers, for which zeros are valid.
    let mut info: libc::Dl_info = unsafe { std::mem::zeroed() };
    // SAFETY: any address may be asked; writes one Dl_info.
    if unsafe { libc::dladdr(address.cast(), &mut info) } == 0 || info.dli_fname.is_null() {
        return None;
    }
    // SAFETY: a C string that lives as long as the library, which is never closed.
    let name = unsafe { CStr::from_ptr(info.dli_fname) };
    Some(PathBuf::from(OsStr::from_bytes(name.to_bytes())))
}

/// Declares a struct of function pointers, its `load`, and one checked method for each function.
/// The method returns `Ok(())` for 0, and otherwise the error that `self.failure(symbol, code)`
/// makes of the code. `load` takes the first of several symbols that exists. A function under
/// `optional` may be missing; its method then does nothing and succeeds.
macro_rules! function_table {
    ($(#[$meta:meta])* $table:ident {
        $($name:ident [$symbol:literal $(, $other:literal)*] ($($arg:ident: $type:ty),*);)*
    } optional {
        $($optional:ident [$optional_symbol:literal] ($($optional_arg:ident: $optional_type:ty),*);)*
    }) => {
        $(#[$meta])*
        pub struct $table {
            $($name: unsafe extern "C" fn($($type),*) -> std::ffi::c_int,)*
            $($optional: Option<unsafe extern "C" fn($($optional_type),*) -> std::ffi::c_int>,)*
        }

        // Some functions are called through their pointer alone, since their code says more than
        // success or failure.
        #[allow(dead_code, clippy::too_many_arguments)]
        impl $table {
            /// Reads every function. The error names the one that the library lacks.
            fn load(library: &libloading::os::unix::Library) -> std::result::Result<Self, String> {
                Ok($table {
                    $($name: {
                        // SAFETY: the symbol is documented to be a C function of this signature.
                        let found = unsafe { library.get($symbol) };
                        // SAFETY: as above; the other names are the same function under another
                        // version suffix.
                        $(let found = found.or_else(|_| unsafe { library.get($other) });)*
                        *found.map_err(|_| format!("it has no {}", $symbol))?
                    },)*
                    // SAFETY: as above.
                    $($optional: unsafe { library.get($optional_symbol) }.ok().map(|function| *function),)*
                })
            }

            $(
                /// # Safety
                /// The contract of the C function of this name.
                pub(super) unsafe fn $name(&self, $($arg: $type),*) -> $crate::error::Result<()> {
                    // SAFETY: the caller's promise.
                    match unsafe { (self.$name)($($arg),*) } {
                        0 => Ok(()),
                        code => Err(self.failure($symbol, code)),
                    }
                }
            )*
            $(
                /// # Safety
                /// The contract of the C function of this name.
                pub(super) unsafe fn $optional(&self, $($optional_arg: $optional_type),*) -> $crate::error::Result<()> {
                    // SAFETY: the caller's promise.
                    match self.$optional.map_or(0, |function| unsafe { function($($optional_arg),*) }) {
                        0 => Ok(()),
                        code => Err(self.failure($optional_symbol, code)),
                    }
                }
            )*
        }
    };
}
pub(super) use function_table;
