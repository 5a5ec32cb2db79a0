//! Places: whether the files that a command is to write may lie where the user says.
//!
//! A command asks before its work: tuning takes hours, and a file that is replaced is gone.

use crate::failure::{Failure, usage};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// An error if no file can be written there.
pub fn require_place(output: &Path) -> Result<(), Failure> {
    let reason = match output.symlink_metadata() {
        Ok(found) if !found.is_file() && !found.is_symlink() => "it is not a regular file",
        _ if !folder_of(output).is_dir() => "its folder does not exist",
        _ => return Ok(()),
    };
    Err(Failure::Failed(format!("{}: {reason}", output.display())))
}

/// An error if two options name one file. Each has its name and its file, if it is given.
pub fn require_apart(files: &[(&str, Option<&Path>)]) -> Result<(), Failure> {
    let given: Vec<(&str, &Path)> = files.iter().filter_map(|(name, file)| Some((*name, (*file)?))).collect();
    for (index, (name, file)) in given.iter().enumerate() {
        if let Some((other, _)) = given[..index].iter().find(|(_, before)| is_one_file(before, file)) {
            return Err(usage(format_args!("{} is the file of {other} and of {name}; give two", file.display())));
        }
    }
    Ok(())
}

/// The same file under two names, or the same place of a file that does not exist yet.
fn is_one_file(one: &Path, other: &Path) -> bool {
    match (one.metadata(), other.metadata()) {
        (Ok(one), Ok(other)) => (one.dev(), one.ino()) == (other.dev(), other.ino()),
        _ => place(one) == place(other),
    }
}

/// The file's name in its folder without links.
fn place(file: &Path) -> PathBuf {
    let folder = folder_of(file);
    let folder = folder.canonicalize().unwrap_or_else(|_| folder.to_owned());
    file.file_name().map_or_else(|| file.to_owned(), |name| folder.join(name))
}

fn folder_of(file: &Path) -> &Path {
    file.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."))
}
