//! Opening a shared library, keeping account of every place tried, and reading its functions into a table.
//!
//! The account is what `flashtune info` prints and what the message says when nothing was found. A library once
//! opened stays open: its functions are handed out for the life of the process.

use crate::error::{Error, Status};
use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
use std::error::Error as _;
use std::ffi::OsStr;
use std::fmt;

/// A place where a library was looked for, and what came of it.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Attempt {
    pub place: String,
    pub outcome: String,
}

/// The account of a search.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct Search {
    /// Where the library in use was found; None where there is none.
    pub found: Option<String>,
    /// The CUDA version of what was found, as (major, minor). It may be known where the library is of no use (no GPU).
    pub version: Option<(u32, u32)>,
    pub attempts: Vec<Attempt>,
}

impl Search {
    pub(super) fn note(&mut self, place: impl fmt::Display, outcome: impl fmt::Display) {
        self.attempts.push(Attempt { place: place.to_string(), outcome: outcome.to_string() });
    }

    /// The error of a search that found nothing usable, with all places tried.
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
    // SAFETY: opening runs the library's initialisers. Only CUDA's own libraries are named here, whose initialisers
    // have no precondition; RTLD_LOCAL keeps their symbols out of the host program.
    unsafe { Library::open(Some(name), RTLD_NOW | RTLD_LOCAL) }
        .map_err(|error| error.source().map_or_else(|| error.to_string(), ToString::to_string))
}

/// Declares a struct of function pointers, its `load`, and one checked method per function. The method returns
/// `Ok(())` for 0 and else what `self.failure(symbol, code)` makes of the code. Of several symbols the first that
/// exists is taken; a function under `optional` may be missing, and then its method does nothing and succeeds.
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

        // Some are called through their pointer alone, where a code is more than success or failure.
        #[allow(dead_code, clippy::too_many_arguments)]
        impl $table {
            /// Reads every function, or says which one the library lacks.
            fn load(library: &libloading::os::unix::Library) -> std::result::Result<Self, String> {
                Ok($table {
                    $($name: {
                        // SAFETY: the symbol is documented to be a C function of this signature.
                        let found = unsafe { library.get($symbol) };
                        // SAFETY: as above; the other names are the same function under another version suffix.
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
