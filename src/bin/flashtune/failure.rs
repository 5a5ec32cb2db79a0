//! Failure: how a command ends when it does not succeed, and the output that can fail.

use flashtune::error::Error;
use std::io::Write;

/// Why a command did not succeed, which decides its exit code.
pub enum Failure {
    /// The arguments are wrong: 2.
    Usage(String),
    /// The arguments are right and the command failed: 1.
    Failed(String),
    /// The command did its work, and this machine keeps nothing of it: 3.
    NotKept(String),
}

impl From<Error> for Failure {
    fn from(error: Error) -> Failure {
        Failure::Failed(error.message)
    }
}

/// An error in the arguments.
pub fn usage(error: impl std::fmt::Display) -> Failure {
    Failure::Usage(error.to_string())
}

/// Prints one line of JSON on standard output.
pub fn print_json(value: &impl serde::Serialize) -> Result<(), Failure> {
    let text = serde_json::to_string(value).map_err(|error| Failure::Failed(error.to_string()))?;
    writeln!(std::io::stdout(), "{text}").map_err(|error| Failure::Failed(format!("standard output: {error}")))
}
