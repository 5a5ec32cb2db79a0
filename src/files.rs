//! Files: how the library opens files that others may have put in its way, and how it publishes its
//! own.
//!
//! A name may stand for a pipe, a device or an endless file. So a file is read only if it is a
//! regular one, and only up to a limit. A published file appears whole or not at all, and no link
//! that somebody planted beside it is followed.

use std::fs::{File, Metadata, OpenOptions};
use std::io::{Error, ErrorKind, Read, Result, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

/// Temporary files begin with this. A killed process may leave one.
pub const TEMPORARY_PREFIX: &str = ".flashtune.";

/// Opens a regular file for reading. An open of a pipe would otherwise wait for its other end.
pub fn open(path: &Path) -> Result<File> {
    let file = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path)?;
    require_regular(&file)?;
    Ok(file)
}

/// Reads a regular file of at most `limit` bytes.
pub fn read(path: &Path, limit: u64) -> Result<Vec<u8>> {
    read_up_to(open(path)?, limit)
}

/// The same for UTF-8 text.
pub fn read_text(path: &Path, limit: u64) -> Result<String> {
    let invalid = |_| Error::new(ErrorKind::InvalidData, "it is not UTF-8 text");
    String::from_utf8(read(path, limit)?).map_err(invalid)
}

/// Reads a file that must belong to this user, and that no other user may write to.
pub fn read_own(path: &Path, limit: u64) -> Result<Vec<u8>> {
    let file = open(path)?;
    require_own(&file)?;
    read_up_to(file, limit)
}

/// An error unless the file belongs to this user and no other user may write to it.
pub fn require_own(file: &File) -> Result<()> {
    require_own_metadata(&file.metadata()?)
}

/// The same for what the system says of a file or a folder.
pub fn require_own_metadata(metadata: &Metadata) -> Result<()> {
    // SAFETY: geteuid takes no arguments and cannot fail.
    let user = unsafe { libc::geteuid() };
    let (owner, mode) = (metadata.uid(), metadata.mode() & 0o7777);
    match (owner == user, mode & 0o022) {
        (true, 0) => Ok(()),
        (false, _) => Err(denied(format!("it belongs to user {owner}, but this process runs as user {user}"))),
        (true, _) => Err(denied(format!("it has mode {mode:04o}; no other user may write to it"))),
    }
}

/// An error for a folder, a pipe, a socket or a device.
pub fn require_regular(file: &File) -> Result<()> {
    match file.metadata()?.is_file() {
        true => Ok(()),
        false => Err(not_regular()),
    }
}

/// Opens a regular file that is there, to add to its end. A link in its place is not followed.
pub fn open_to_append(path: &Path) -> Result<File> {
    let file = OpenOptions::new().append(true).custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK).open(path)?;
    require_regular(&file)?;
    Ok(file)
}

/// Writes a file beside its place, syncs it and renames it: a reader sees all of it or nothing, and
/// after Ok it survives a power cut. It keeps the permissions of the file that it replaces; a new
/// file is private. A symbolic link in its place is replaced, not followed.
pub fn publish(path: &Path, bytes: &[u8]) -> Result<()> {
    let mode = match path.symlink_metadata() {
        Ok(found) if found.is_file() => found.mode() & 0o777,
        Ok(found) if found.is_symlink() => 0o600,
        Ok(_) => return Err(not_regular()),
        Err(error) if error.kind() == ErrorKind::NotFound => 0o600,
        Err(error) => return Err(error),
    };
    publish_with(path, bytes, mode)
}

/// The same for a file that must be this user's alone, whatever it replaces.
pub fn publish_private(path: &Path, bytes: &[u8]) -> Result<()> {
    publish_with(path, bytes, 0o600)
}

/// Runs work that writes files. A write past RLIMIT_FSIZE sends its thread SIGXFSZ, which ends the
/// process by default. Here such a write only fails.
pub fn without_size_signal<T>(work: impl FnOnce() -> T) -> T {
    let mut size = std::mem::MaybeUninit::uninit();
    let mut before = std::mem::MaybeUninit::uninit();
    // SAFETY: the first two calls make `size` the set of one signal, and the third fills `before`.
    let (size, before) = unsafe {
        libc::sigemptyset(size.as_mut_ptr());
        libc::sigaddset(size.as_mut_ptr(), libc::SIGXFSZ);
        libc::pthread_sigmask(libc::SIG_BLOCK, size.as_ptr(), before.as_mut_ptr());
        (size.assume_init(), before.assume_init())
    };
    let was_pending = is_size_signal_pending();
    let result = work();
    // SAFETY: both sets are initialised. sigwait returns at once, since the signal is pending.
    unsafe {
        if !was_pending && is_size_signal_pending() {
            libc::sigwait(&size, &mut 0);
        }
        libc::pthread_sigmask(libc::SIG_SETMASK, &before, std::ptr::null_mut());
    }
    result
}

fn is_size_signal_pending() -> bool {
    let mut pending = std::mem::MaybeUninit::uninit();
    // SAFETY: sigpending fills the set.
    unsafe { libc::sigpending(pending.as_mut_ptr()) == 0 && libc::sigismember(pending.as_ptr(), libc::SIGXFSZ) == 1 }
}

fn publish_with(path: &Path, bytes: &[u8], mode: u32) -> Result<()> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let (temporary, mut file) = create_temporary(folder)?;
    let written = without_size_signal(|| file.write_all(bytes))
        .and_then(|()| file.set_permissions(PermissionsExt::from_mode(mode)))
        .and_then(|()| file.sync_all())
        .and_then(|()| std::fs::rename(&temporary, path));
    if written.is_err() {
        let _ = std::fs::remove_file(&temporary);
    }
    // The rename itself is durable once the folder is synced. Some file systems cannot sync one.
    written.map(|()| drop(File::open(folder).and_then(|folder| folder.sync_all())))
}

/// A new file of mode 0600, which nothing that already has its name can redirect.
fn create_temporary(folder: &Path) -> Result<(PathBuf, File)> {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    loop {
        let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
        let count = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("{TEMPORARY_PREFIX}{}.{}.{count}", std::process::id(), since.as_nanos());
        let path = folder.join(name);
        match OpenOptions::new().write(true).create_new(true).mode(0o600).open(&path) {
            Ok(file) => return Ok((path, file)),
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
            Err(error) => return Err(error),
        }
    }
}

/// The rest of a file, of at most `limit` bytes.
pub fn read_up_to(file: File, limit: u64) -> Result<Vec<u8>> {
    // One byte more shows the end of the file without another allocation.
    let expected = file.metadata()?.len().min(limit).saturating_add(1);
    let mut bytes = Vec::new();
    bytes.try_reserve_exact(usize::try_from(expected).unwrap_or(usize::MAX))?;
    file.take(limit.saturating_add(1)).read_to_end(&mut bytes)?;
    match bytes.len() as u64 > limit {
        true => Err(Error::new(ErrorKind::FileTooLarge, format!("it has more than {limit} bytes"))),
        false => Ok(bytes),
    }
}

fn not_regular() -> Error {
    Error::new(ErrorKind::InvalidInput, "it is not a regular file")
}

fn denied(reason: String) -> Error {
    Error::new(ErrorKind::PermissionDenied, reason)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mode(path: &Path) -> u32 {
        path.symlink_metadata().unwrap().mode() & 0o777
    }

    #[test]
    fn a_published_file_is_private_or_keeps_the_mode_of_the_file_it_replaces() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        publish(&path, b"one").unwrap();
        assert_eq!((std::fs::read(&path).unwrap(), mode(&path)), (b"one".to_vec(), 0o600));
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o644)).unwrap();
        publish(&path, b"two").unwrap();
        assert_eq!((std::fs::read(&path).unwrap(), mode(&path)), (b"two".to_vec(), 0o644));
        publish_private(&path, b"three").unwrap();
        assert_eq!((std::fs::read(&path).unwrap(), mode(&path)), (b"three".to_vec(), 0o600));
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
    }

    #[test]
    fn publishing_replaces_a_link_and_leaves_the_file_that_it_names() {
        let folder = tempfile::tempdir().unwrap();
        let (victim, path) = (folder.path().join("victim"), folder.path().join("file"));
        std::fs::write(&victim, "precious").unwrap();
        std::os::unix::fs::symlink(&victim, &path).unwrap();
        publish(&path, b"new").unwrap();
        assert_eq!(std::fs::read_to_string(&victim).unwrap(), "precious");
        assert!(path.symlink_metadata().unwrap().is_file());
    }

    #[test]
    fn appending_follows_no_link_and_takes_no_device() {
        let folder = tempfile::tempdir().unwrap();
        let (file, link) = (folder.path().join("file"), folder.path().join("link"));
        std::fs::write(&file, "one").unwrap();
        open_to_append(&file).unwrap().write_all(b"two").unwrap();
        assert_eq!(std::fs::read(&file).unwrap(), b"onetwo");
        std::os::unix::fs::symlink(&file, &link).unwrap();
        assert!(open_to_append(&link).is_err());
        assert_eq!(open_to_append(Path::new("/dev/null")).unwrap_err().kind(), ErrorKind::InvalidInput);
    }

    #[test]
    fn a_device_is_neither_read_nor_replaced() {
        let device = Path::new("/dev/zero");
        assert_eq!(read(device, 100).unwrap_err().kind(), ErrorKind::InvalidInput);
        assert_eq!(publish(device, b"x").unwrap_err().kind(), ErrorKind::InvalidInput);
    }

    #[test]
    fn a_file_past_the_limit_is_an_error() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        std::fs::write(&path, [0; 100]).unwrap();
        assert_eq!(read(&path, 100).unwrap().len(), 100);
        assert_eq!(read(&path, 99).unwrap_err().kind(), ErrorKind::FileTooLarge);
    }

    #[test]
    fn a_file_that_others_may_write_to_is_not_ones_own() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        publish(&path, b"x").unwrap();
        assert_eq!(read_own(&path, 10).unwrap(), b"x");
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o620)).unwrap();
        assert!(read_own(&path, 10).unwrap_err().to_string().contains("0620"));
    }
}
