//! Pack: an opened pack, and why a pack was refused.
//!
//! A pack is read into memory once and checked as a whole. A cubin is inflated when it is asked
//! for. Nothing here changes a file.

use super::contents::{Manifest, PackedKernel, PackedPlan};
use super::format::{Decoded, MAX_PACK_BYTES, decode, inflate};
use super::place::Place;
use crate::device::{Arch, Device};
use crate::files;
use crate::kernel::compile::Compiled;
use crate::kernel::cubin_cache::TextDigest;
use crate::kernel::render::Renderer;
use std::collections::HashMap;
use std::fs::Metadata;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

pub struct Pack {
    path: PathBuf,
    decoded: Decoded,
    bytes: Vec<u8>,
    /// The kernels by the digest of their text.
    by_text: HashMap<String, Vec<usize>>,
}

/// A context's pack.
#[derive(Clone, Default)]
pub enum PackStatus {
    /// No pack was named, and none lies beside the library.
    #[default]
    None,
    Loaded(Arc<Pack>),
    /// The context goes on without it.
    Refused(Box<Refusal>),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    pub path: PathBuf,
    /// One clause.
    pub reason: String,
}

impl Pack {
    /// Reads and checks a file. The error is one clause: why this is no pack, or what is damaged.
    /// It does not compare the pack with this library (`check_library`).
    pub fn open(path: &Path) -> Result<Pack, String> {
        Pack::from_bytes(path, read(path, None)?)
    }

    /// As `open`. A file that nobody named is refused unless root, this user or the library's owner
    /// owns it, and nobody may write to it but its owner and a group that may write to the library.
    pub fn open_at(place: &Place) -> Result<Pack, String> {
        Pack::open_beside(place, || ())
    }

    /// As `open_at`. `after_checksum` is as in `decode`.
    pub(super) fn open_beside(place: &Place, after_checksum: impl Fn() + Sync) -> Result<Pack, String> {
        let bytes = read(&place.path, place.found_beside.as_deref())?;
        Pack::decoded(&place.path, bytes, after_checksum)
    }

    /// The same for bytes that are in memory. Messages call them `path`.
    pub fn from_bytes(path: &Path, bytes: Vec<u8>) -> Result<Pack, String> {
        Pack::decoded(path, bytes, || ())
    }

    fn decoded(path: &Path, bytes: Vec<u8>, after_checksum: impl Fn() + Sync) -> Result<Pack, String> {
        let decoded = decode(&bytes, after_checksum)?;
        let mut by_text: HashMap<String, Vec<usize>> = HashMap::new();
        for (index, kernel) in decoded.manifest.kernels.iter().enumerate() {
            by_text.entry(kernel.text.clone()).or_default().push(index);
        }
        Ok(Pack { path: path.to_owned(), decoded, bytes, by_text })
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    pub fn manifest(&self) -> &Manifest {
        &self.decoded.manifest
    }

    /// Bytes of the file.
    pub fn bytes(&self) -> usize {
        self.bytes.len()
    }

    /// The file itself.
    pub fn as_bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Whether this library renders the texts that the pack was made from; else the reason in one
    /// clause.
    pub fn check_library(&self) -> Result<(), String> {
        let origin = &self.manifest().origin;
        if origin.library_version != env!("CARGO_PKG_VERSION") {
            return Err(format!(
                "it was made by flashtune {}; this is {}",
                origin.library_version,
                env!("CARGO_PKG_VERSION")
            ));
        }
        let digest = Renderer::shared().map_err(|error| error.message)?.digest();
        if origin.templates_digest != digest {
            return Err(format!(
                "it was made from the templates {}; this library has {digest}",
                origin.templates_digest
            ));
        }
        Ok(())
    }

    /// Whether it has kernels for an architecture.
    pub fn has_arch(&self, arch: Arch) -> bool {
        self.manifest().archs().contains(&arch)
    }

    /// Whether its cubins run on a device; else the reason in one clause.
    pub fn check_device(&self, device: &Device) -> Result<(), String> {
        if !self.has_arch(device.arch) {
            let names: Vec<String> = self.manifest().archs().iter().map(Arch::to_string).collect();
            let names = if names.is_empty() { "no kernels".to_owned() } else { names.join(" ") };
            return Err(format!("it has no kernels for {} ({}); it has {names}", device.name, device.arch));
        }
        // Cubins of a newer major version have another ELF ABI than the driver knows.
        let (major, minor) = self.manifest().origin.nvrtc_version;
        let (driver_major, driver_minor) = (device.driver_version / 1000, device.driver_version % 1000 / 10);
        match major > driver_major {
            true => Err(format!(
                "its kernels were compiled by NVRTC {major}.{minor}; the driver is of CUDA {driver_major}.{driver_minor}"
            )),
            false => Ok(()),
        }
    }

    /// The kernels for the GPUs of an architecture.
    pub fn kernels(&self, arch: Arch) -> impl Iterator<Item = &PackedKernel> {
        self.manifest().kernels.iter().filter(move |kernel| kernel.arch == arch)
    }

    /// The plans for the GPUs of an architecture.
    pub fn plans(&self, arch: Arch) -> impl Iterator<Item = &PackedPlan> {
        self.manifest().plans.iter().filter(move |plan| plan.arch == arch)
    }

    /// The cubin of a text, if the pack has it for one of these targets.
    pub fn cubin(&self, text: &TextDigest, targets: &[String]) -> Option<Compiled> {
        let index = self.index(text, targets)?;
        let kernel = &self.decoded.manifest.kernels[index];
        match inflate(&self.bytes[self.decoded.cubins[index].clone()], kernel.cubin_bytes as usize) {
            Ok(cubin) => Some(Compiled { cubin, log: kernel.log.clone(), resources: kernel.resources.clone() }),
            Err(reason) => {
                // The checksum was right, so the pack was written like this.
                log::warn!("{}: the cubin of {} cannot be inflated: {reason}", self.path.display(), kernel.name);
                None
            }
        }
    }

    /// Whether `cubin` has one.
    pub fn has(&self, text: &TextDigest, targets: &[String]) -> bool {
        self.index(text, targets).is_some()
    }

    fn index(&self, text: &TextDigest, targets: &[String]) -> Option<usize> {
        let kernels = &self.decoded.manifest.kernels;
        let of_text = self.by_text.get(text.as_str())?;
        of_text.iter().copied().find(|index| targets.contains(&kernels[*index].target))
    }
}

impl PackStatus {
    /// The pack at a place, for a device. A refusal is logged: the context goes on without it.
    pub fn load(place: Option<Place>, device: &Device) -> PackStatus {
        let Some(place) = place else { return PackStatus::None };
        // Parsing the templates takes milliseconds. `check_library` needs them, and so does every
        // kernel that a call looks up.
        let opened = Pack::open_beside(&place, || drop(Renderer::shared()));
        let opened = opened.and_then(|pack| pack.check_library().map(|()| pack));
        let (reason, level) = match opened.map(|pack| (pack.check_device(device), pack)) {
            Ok((Ok(()), pack)) => return PackStatus::Loaded(Arc::new(pack)),
            // A wheel has its pack on every GPU.
            Ok((Err(reason), pack)) if place.found_beside.is_some() && !pack.has_arch(device.arch) => {
                (reason, log::Level::Info)
            }
            Ok((Err(reason), _)) | Err(reason) => (reason, log::Level::Warn),
        };
        let Place { path, named_by, .. } = place;
        log::log!(level, "the pack {} ({named_by}) is not used: {reason}", path.display());
        PackStatus::Refused(Box::new(Refusal { path, reason }))
    }

    pub fn pack(&self) -> Option<&Arc<Pack>> {
        match self {
            PackStatus::Loaded(pack) => Some(pack),
            PackStatus::None | PackStatus::Refused(_) => None,
        }
    }

    /// What a person should know where a kernel is missing: that a pack was refused, or lacks it.
    pub fn note(&self) -> Option<String> {
        match self {
            PackStatus::None => None,
            PackStatus::Loaded(pack) => Some(format!("the pack {} does not have it", pack.path.display())),
            PackStatus::Refused(refusal) => {
                Some(format!("the pack {} is not used: {}", refusal.path.display(), refusal.reason))
            }
        }
    }
}

/// The bytes of a regular file of a pack's size. `found_beside` is as in `Place`. The error is one
/// clause.
fn read(path: &Path, found_beside: Option<&Path>) -> Result<Vec<u8>, String> {
    let file = files::open(path).map_err(|error| error.to_string())?;
    let metadata = file.metadata().map_err(|error| error.to_string())?;
    if metadata.mode() & 0o002 != 0 {
        return Err(format!(
            "its mode is {:04o}; it holds code, so not every user may write to it",
            metadata.mode() & 0o7777
        ));
    }
    if let Some(library) = found_beside {
        check_found(&metadata, library)?;
    }
    // A sparse file may say any length.
    if metadata.len() > MAX_PACK_BYTES {
        return Err(format!("it has {} bytes; a pack has at most {MAX_PACK_BYTES}", metadata.len()));
    }
    files::read_up_to(file, MAX_PACK_BYTES).map_err(|error| error.to_string())
}

/// Refuses a file that somebody else may have put beside the library, as in a folder that every
/// user may write to. Any user may name a file; this one was found. Its group may write to it where
/// the same group may write to the library: pip gives both files the mode that the umask leaves.
fn check_found(metadata: &Metadata, library: &Path) -> Result<(), String> {
    let mode = metadata.mode() & 0o7777;
    let owner = metadata.uid();
    let beside = std::fs::metadata(library).ok();
    let is_writable_alike =
        |beside: &Metadata| (beside.uid(), beside.gid()) == (owner, metadata.gid()) && beside.mode() & 0o020 != 0;
    if mode & 0o022 != 0 && !beside.as_ref().is_some_and(is_writable_alike) {
        return Err(format!(
            "its mode is {mode:04o}; nobody named it, so only its owner may write to it; FLASHTUNE_PACK would name it"
        ));
    }
    // SAFETY: geteuid takes no arguments and cannot fail.
    let user = unsafe { libc::geteuid() };
    let is_trusted = owner == 0 || owner == user || beside.is_some_and(|library| library.uid() == owner);
    match is_trusted {
        true => Ok(()),
        false => Err(format!(
            "it belongs to user {owner}; nobody named it, so it must belong to root, user {user} or the owner of {}; FLASHTUNE_PACK would name it",
            library.display()
        )),
    }
}
