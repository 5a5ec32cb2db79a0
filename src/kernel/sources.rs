//! The template files: the library's own, and those of a user's folder that replace them.
//!
//! `FLASHTUNE_TEMPLATES` names a folder of the same shape as `templates/`. A file there replaces
//! the library's file of the same name or adds a new one, so a kernel can be changed without
//! building the library. The rendered text is part of a cubin's key, so an override never meets the
//! cubins of the original.

use crate::error::{Error, Result, Status};
use crate::files;
use std::collections::BTreeMap;
use std::path::Path;

include!(concat!(env!("OUT_DIR"), "/templates.rs"));

/// File names relative to `templates/` and their text.
pub type Sources = BTreeMap<String, String>;

/// The library's own files.
pub fn embedded() -> Sources {
    TEMPLATES.iter().map(|(name, text)| (name.to_string(), text.to_string())).collect()
}

/// The library's own files, replaced by those of `folder` that have the same names.
pub fn overridden(folder: &Path) -> Result<Sources> {
    let mut sources = embedded();
    add(&mut sources, folder, "")?;
    Ok(sources)
}

/// Folders inside of folders. A link to a folder above it would go on for ever.
const MAX_DEPTH: usize = 8;
const MAX_FILES: usize = 4096;
const MAX_FILE_BYTES: u64 = 4 << 20;

fn add(sources: &mut Sources, folder: &Path, prefix: &str) -> Result<()> {
    let failed = |path: &Path, reason: &dyn std::fmt::Display| {
        Error::new(Status::Io, format!("FLASHTUNE_TEMPLATES: {}: {reason}", path.display()))
    };
    if prefix.matches('/').count() > MAX_DEPTH {
        return Err(failed(folder, &format_args!("it lies more than {MAX_DEPTH} folders deep")));
    }
    for entry in std::fs::read_dir(folder).map_err(|error| failed(folder, &error))? {
        let entry = entry.map_err(|error| failed(folder, &error))?;
        let (path, name) = (entry.path(), format!("{prefix}{}", entry.file_name().to_string_lossy()));
        if path.is_dir() {
            add(sources, &path, &format!("{name}/"))?;
        } else if name.ends_with(".cuh") || name.ends_with(".tera") {
            let text = files::read_text(&path, MAX_FILE_BYTES).map_err(|error| failed(&path, &error))?;
            sources.insert(name, text);
            if sources.len() > MAX_FILES {
                return Err(failed(folder, &format_args!("there are more than {MAX_FILES} files")));
            }
        }
    }
    Ok(())
}
