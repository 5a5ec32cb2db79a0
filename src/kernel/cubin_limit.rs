//! The limit of the cubin folder: past it, the entries that were used longest ago are removed.
//!
//! An entry is a folder, and its cubin's modification time says when it was last used. One process
//! trims at a time. A reader that meets a half-removed entry has a miss and compiles. After a
//! failure the next trim tries again.

use crate::environment;
use std::fs::{File, TryLockError};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

/// Room for some ten thousand kernels with their texts: the candidates of a hundred problems.
const DEFAULT_MB: u64 = 1024;

/// A process walks the folder when it first adds an entry, and again whenever it has added limit /
/// SLACK bytes.
const SLACK: u64 = 16;

/// A use is marked at most this often, so that a service that starts a thousand times a day writes
/// little.
const MARK_INTERVAL: Duration = Duration::from_secs(3600);

pub struct Limit {
    bytes: u64,
    /// Bytes that this process added since it last walked the folder.
    added: AtomicU64,
}

impl Limit {
    /// `FLASHTUNE_CACHE_LIMIT_MB`, if it is a number.
    pub fn from_environment() -> Limit {
        let setting = environment::variable("FLASHTUNE_CACHE_LIMIT_MB").filter(|text| !text.is_empty());
        let megabytes = setting.map_or(DEFAULT_MB, |text| {
            text.to_str().and_then(|text| text.parse().ok()).unwrap_or_else(|| {
                log::warn!("FLASHTUNE_CACHE_LIMIT_MB is {text:?}; it must be a whole number; the default of {DEFAULT_MB} applies");
                DEFAULT_MB
            })
        });
        Limit::of_bytes(megabytes.saturating_mul(1 << 20))
    }

    pub fn of_bytes(bytes: u64) -> Limit {
        // The first walk is due at once, since the entries of earlier processes count too.
        Limit { bytes, added: AtomicU64::new(bytes / SLACK) }
    }

    /// Call this after adding `bytes` to `folder`.
    pub fn keep(&self, folder: &Path, bytes: u64) {
        if self.added.fetch_add(bytes, Ordering::Relaxed) + bytes < self.bytes / SLACK {
            return;
        }
        self.added.store(0, Ordering::Relaxed);
        // Two processes that trim side by side would each remove the whole excess. The lock is on
        // the folder itself and ends with `lock`.
        let Ok(lock) = File::open(folder) else { return };
        if let Err(TryLockError::WouldBlock) = lock.try_lock() {
            return;
        }
        // Without file locks `trim` still counts entries that another process has removed.
        self.trim(entries(folder));
    }

    /// Removes the oldest entries until the rest is within the limit.
    fn trim(&self, mut entries: Vec<Entry>) {
        let mut total: u64 = entries.iter().map(|entry| entry.bytes).sum();
        if total <= self.bytes {
            return;
        }
        entries.sort_by_key(|entry| entry.used);
        for entry in entries {
            // Leaves room for what is added before the next walk.
            if total <= self.bytes - self.bytes / SLACK {
                break;
            }
            match std::fs::remove_dir_all(&entry.folder) {
                Ok(()) => total -= entry.bytes,
                Err(error) if error.kind() == ErrorKind::NotFound => total -= entry.bytes,
                Err(_) => {}
            }
        }
    }
}

/// Marks a cubin as used now.
pub fn mark_used(cubin: &Path) {
    let now = SystemTime::now();
    let used = cubin.metadata().and_then(|metadata| metadata.modified());
    if used.is_ok_and(|used| now.duration_since(used).is_ok_and(|age| age > MARK_INTERVAL))
        && let Ok(file) = std::fs::File::options().append(true).open(cubin)
    {
        // A failure is harmless: in a read-only folder nothing is removed either.
        let _ = file.set_modified(now);
    }
}

struct Entry {
    folder: PathBuf,
    bytes: u64,
    used: SystemTime,
}

fn entries(folder: &Path) -> Vec<Entry> {
    let listed = std::fs::read_dir(folder).into_iter().flatten().flatten();
    listed
        .filter_map(|entry| {
            let folder = entry.path();
            let files: Vec<_> = std::fs::read_dir(&folder).ok()?.flatten().filter_map(|f| f.metadata().ok()).collect();
            // The cubin is the newest file of its entry. If it is missing, another process may be
            // about to write it.
            let newest = files.iter().filter_map(|file| file.modified().ok()).max();
            let used = newest.or_else(|| folder.metadata().ok()?.modified().ok())?;
            Some(Entry { folder, bytes: files.iter().map(std::fs::Metadata::len).sum(), used })
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_another_process_removed_after_the_listing_counts_as_removed() {
        let folder = tempfile::tempdir().unwrap();
        for day in 0..10 {
            let entry = folder.path().join(format!("{day}"));
            std::fs::create_dir(&entry).unwrap();
            std::fs::write(entry.join("kernel.cubin"), [0; 100]).unwrap();
            let file = File::options().append(true).open(entry.join("kernel.cubin")).unwrap();
            file.set_modified(SystemTime::UNIX_EPOCH + Duration::from_secs(86400 * day)).unwrap();
        }
        let listed = entries(folder.path());
        for day in 0..5 {
            std::fs::remove_dir_all(folder.path().join(format!("{day}"))).unwrap();
        }
        // Six entries fit into 640 bytes while the slack stays free.
        Limit::of_bytes(640).trim(listed);
        let mut left: Vec<_> = std::fs::read_dir(folder.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
        left.sort();
        assert_eq!(left, ["5", "6", "7", "8", "9"]);
    }
}
