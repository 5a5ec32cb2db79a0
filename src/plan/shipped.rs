//! Shipped records: `tuning-db/<arch>/<gpu>.jsonl`, embedded by the build script.
//!
//! `FLASHTUNE_TUNING_DB` names a folder of the same form that is read instead of the embedded one.

use super::record::{self, Record};
use crate::device::Arch;
use crate::environment;
use crate::files;
use std::borrow::Cow;
use std::ffi::OsString;
use std::path::Path;

/// (path under `tuning-db/`, content), sorted by path.
pub const EMBEDDED: &[(&str, &str)] = include!(concat!(env!("OUT_DIR"), "/tuning_db.rs"));

const OVERRIDE: &str = "FLASHTUNE_TUNING_DB";

/// Some ten thousand records.
const MAX_FILE_BYTES: u64 = 64 << 20;

/// The shipped records of an architecture, of all its GPUs.
pub fn records(arch: Arch) -> Vec<Record> {
    texts(arch).iter().flat_map(|(name, text)| read(name, text)).collect()
}

/// The files of an architecture: the name in messages, and the text.
pub fn texts(arch: Arch) -> Vec<(String, Cow<'static, str>)> {
    let folder = arch.to_string();
    match environment::variable(OVERRIDE) {
        Some(database) => from_folder(&database, &folder),
        None => {
            let texts = EMBEDDED.iter().filter(|(path, _)| path.split('/').next() == Some(folder.as_str()));
            texts.map(|(path, text)| (path.to_string(), Cow::Borrowed(*text))).collect()
        }
    }
}

fn from_folder(database: &OsString, folder: &str) -> Vec<(String, Cow<'static, str>)> {
    let folder = Path::new(database).join(folder);
    let entries = match std::fs::read_dir(&folder) {
        Ok(entries) => entries,
        Err(error) => {
            log::warn!("{OVERRIDE}: {}: {error}", folder.display());
            return Vec::new();
        }
    };
    let mut paths: Vec<_> = entries.filter_map(|entry| Some(entry.ok()?.path())).collect();
    paths.retain(|path| path.extension().is_some_and(|extension| extension == "jsonl"));
    paths.sort();
    paths
        .iter()
        .filter_map(|path| match files::read_text(path, MAX_FILE_BYTES) {
            Ok(text) => Some((path.display().to_string(), Cow::Owned(text))),
            Err(error) => {
                log::warn!("{}: {error}", path.display());
                None
            }
        })
        .collect()
}

fn read(name: &str, text: &str) -> Vec<Record> {
    let (records, ignored) = record::read_lines(text);
    if let Some((line, reason)) = ignored.first() {
        log::warn!("{name}: {} records ignored; line {line}: {reason}", ignored.len());
    }
    records
}
