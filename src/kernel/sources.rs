//! The template files: the library's own, and those of a user's folder that replace them.
//!
//! `FLASHTUNE_TEMPLATES` names a folder of the same shape as `templates/`. A file there replaces
//! the library's file of the same name or adds a new one, so a kernel can be changed without
//! building the library. The rendered text is part of a cubin's key, so an override never meets the
//! cubins of the original.

use crate::error::{Error, Result, Status};
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
    add(&mut sources, folder, "").map_err(|error| {
        Error::new(Status::Io, format!("FLASHTUNE_TEMPLATES is {}; reading it: {error}", folder.display()))
    })?;
    Ok(sources)
}

fn add(sources: &mut Sources, folder: &Path, prefix: &str) -> std::io::Result<()> {
    for entry in std::fs::read_dir(folder)? {
        let (path, name) = entry.map(|entry| (entry.path(), entry.file_name()))?;
        let name = format!("{prefix}{}", name.to_string_lossy());
        if path.is_dir() {
            add(sources, &path, &format!("{name}/"))?;
        } else if name.ends_with(".cuh") || name.ends_with(".tera") {
            sources.insert(name, std::fs::read_to_string(&path)?);
        }
    }
    Ok(())
}
