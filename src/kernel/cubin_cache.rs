//! Cubins on disk: `<cache>/cubins/<key>/kernel.cubin` with the text it was made from, `kernel.cu`,
//! beside it.
//!
//! The key is a hash of all that determines the cubin, so an entry is never stale. An entry may be
//! damaged, so every read checks it. Every failure in this file is a miss and, once per process,
//! one line of log. No other file knows the folder's layout.
//!
//! `kernel.cubin` is the ELF file with our trailer behind it: metadata as JSON, then the fields
//! that `TRAILER_BYTES` adds up. ELF readers such as cuobjdump ignore whatever follows the
//! sections.

use super::cache_dir::secure;
use super::compile::{Compiled, EntryResources, compile, options};
use super::cubin_limit::{self, Limit};
use crate::cuda::nvrtc::Nvrtc;
use crate::error::Result;
use crate::files;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Once;

/// The last bytes of an entry.
const MAGIC: &[u8; 8] = b"FTCUBIN\n";
/// Goes up when the file format changes. An entry of another version is a miss.
const VERSION: u32 = 1;
/// The trailer: cubin bytes (u64), metadata bytes (u32), version (u32), SHA-256 of all before it,
/// magic.
const TRAILER_BYTES: usize = 8 + 4 + 4 + 32 + 8;
/// The largest kernels have some hundred KB.
const MAX_BYTES: u64 = 256 << 20;

/// A hash of everything that determines a cubin.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Key(String);

impl Key {
    /// `options` hold the target architecture; `nvrtc` is (major, minor).
    pub fn new(text: &TextDigest, options: &[String], nvrtc: (u32, u32)) -> Key {
        let mut hash = Sha256::new();
        hash.update(format!("text {}\nnvrtc {}.{}\n", text.0, nvrtc.0, nvrtc.1));
        for option in options {
            hash.update(format!("option {option}\n"));
        }
        Key(hex(&hash.finalize()))
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// The SHA-256 of a rendered text, in hex.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct TextDigest(String);

impl TextDigest {
    pub fn new(text: &str) -> TextDigest {
        TextDigest(hex(&Sha256::digest(text.as_bytes())))
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }
}

#[derive(Serialize, Deserialize)]
struct Metadata {
    key: String,
    log: String,
    resources: BTreeMap<String, EntryResources>,
}

pub struct CubinCache {
    /// None: the cache keeps nothing.
    folder: Option<PathBuf>,
    limit: Limit,
}

impl CubinCache {
    /// A cache under `cache_dir`, which is created if it is missing. A folder that cannot be
    /// trusted is not used.
    pub fn new(cache_dir: Option<&Path>) -> CubinCache {
        CubinCache::with_limit(cache_dir, Limit::from_environment())
    }

    pub fn with_limit(cache_dir: Option<&Path>, limit: Limit) -> CubinCache {
        let folder = cache_dir.and_then(|cache_dir| {
            let folder = cache_dir.join("cubins");
            match secure(cache_dir).and_then(|()| secure(&folder)) {
                Ok(()) => Some(folder),
                Err(refusal) => {
                    complain(&refusal.to_string());
                    None
                }
            }
        });
        CubinCache { folder, limit }
    }

    /// The cubin of a text for a target: the entry, or what NVRTC makes now and the cache keeps.
    /// Also says whether NVRTC made it.
    pub fn get_or_compile(
        &self,
        nvrtc: &Nvrtc,
        name: &str,
        text: &str,
        digest: &TextDigest,
        target: &str,
    ) -> Result<(Compiled, bool)> {
        let key = Key::new(digest, &options(target, nvrtc.version()), nvrtc.version());
        if let Some(compiled) = self.get(&key) {
            return Ok((compiled, false));
        }
        let compiled = compile(nvrtc, name, text, target)?;
        self.put(&key, text, &compiled);
        Ok((compiled, true))
    }

    pub fn get(&self, key: &Key) -> Option<Compiled> {
        let folder = self.folder.as_ref()?.join(&key.0);
        let file = folder.join("kernel.cubin");
        let own = folder.symlink_metadata().and_then(|metadata| files::require_own_metadata(&metadata));
        let bytes = match own.and_then(|()| files::read_own(&file, MAX_BYTES)) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return None,
            Err(error) => {
                complain(&format!("reading {}: {error}", file.display()));
                return None;
            }
        };
        let compiled = unpack(bytes, key);
        match compiled {
            Some(_) => cubin_limit::mark_used(&file),
            None => complain(&format!("{} is damaged; it will be compiled again", file.display())),
        }
        compiled
    }

    pub fn put(&self, key: &Key, text: &str, compiled: &Compiled) {
        let Some(all) = &self.folder else { return };
        let (folder, cubin) = (all.join(&key.0), pack(compiled, key));
        let publish = |path: &Path, bytes: &[u8]| {
            files::publish_private(path, bytes).map_err(|error| format!("writing {}: {error}", path.display()))
        };
        let written = secure(&folder).map_err(String::from).and_then(|()| {
            // The text goes first: beside every cubin, a person finds the text that it was made
            // from.
            publish(&folder.join("kernel.cu"), text.as_bytes())?;
            publish(&folder.join("kernel.cubin"), &cubin)
        });
        match written {
            Ok(()) => self.limit.keep(all, (text.len() + cubin.len()) as u64),
            Err(reason) => complain(&reason),
        }
    }
}

fn pack(compiled: &Compiled, key: &Key) -> Vec<u8> {
    let metadata = Metadata { key: key.0.clone(), log: compiled.log.clone(), resources: compiled.resources.clone() };
    // Serialising a map of strings and integers to JSON cannot fail.
    let metadata = serde_json::to_vec(&metadata).unwrap_or_default();
    let mut bytes = compiled.cubin.clone();
    bytes.extend(&metadata);
    bytes.extend((compiled.cubin.len() as u64).to_le_bytes());
    bytes.extend((metadata.len() as u32).to_le_bytes());
    bytes.extend(VERSION.to_le_bytes());
    let digest = Sha256::digest(&bytes);
    bytes.extend(digest.as_slice());
    bytes.extend(MAGIC);
    bytes
}

/// Reads what `pack` wrote. None if a single bit differs or the entry belongs to another key.
fn unpack(mut bytes: Vec<u8>, key: &Key) -> Option<Compiled> {
    let body = bytes.len().checked_sub(TRAILER_BYTES)?;
    let hashed = body + 16;
    let (digest, magic) = bytes[hashed..].split_at(32);
    if magic != MAGIC || Sha256::digest(&bytes[..hashed]).as_slice() != digest {
        return None;
    }
    let cubin_bytes = usize::try_from(u64::from_le_bytes(bytes[body..body + 8].try_into().ok()?)).ok()?;
    let metadata_bytes = u32::from_le_bytes(bytes[body + 8..body + 12].try_into().ok()?) as usize;
    let version = u32::from_le_bytes(bytes[body + 12..body + 16].try_into().ok()?);
    if version != VERSION || cubin_bytes.checked_add(metadata_bytes)? != body {
        return None;
    }
    let metadata: Metadata = serde_json::from_slice(&bytes[cubin_bytes..body]).ok()?;
    if metadata.key != key.0 {
        return None;
    }
    bytes.truncate(cubin_bytes);
    Some(Compiled { cubin: bytes, log: metadata.log, resources: metadata.resources })
}

/// One line per process: a broken cache costs time, not results, and must not fill a server's log.
fn complain(reason: &str) {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| log::warn!("the cubin cache does not work, so kernels are compiled when needed: {reason}"));
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
