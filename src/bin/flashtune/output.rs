//! Output: `print`, `println` and `eprintln` of a program that must not panic where a stream cannot
//! be written, as the macros of the standard library do.
//!
//! A result that nobody gets is a failure. A message that nobody gets is none: a tuning run whose
//! reader is gone, or whose log file is on a full disk, goes on.

use std::fmt::Arguments;
use std::io::Write;

macro_rules! print {
    ($($text:tt)*) => { $crate::output::print(format_args!($($text)*)) };
}

macro_rules! println {
    () => { $crate::output::print(format_args!("\n")) };
    ($($text:tt)*) => { $crate::output::print(format_args!("{}\n", format_args!($($text)*))) };
}

macro_rules! eprintln {
    ($($text:tt)*) => { $crate::output::tell(format_args!("{}\n", format_args!($($text)*))) };
}

/// Writes to standard output, or ends the process with the status of a failure.
pub fn print(text: Arguments) {
    if let Err(error) = std::io::stdout().write_fmt(text) {
        tell(format_args!("flashtune: standard output: {error}\n"));
        std::process::exit(1);
    }
}

/// Writes to standard error if that can be written.
pub fn tell(text: Arguments) {
    let _ = std::io::stderr().write_fmt(text);
}
