//! The bound on the folder of cubins: where it has grown past its limit, what was used longest ago goes.
//!
//! An entry is a folder, and the modification time of its cubin says when it was last used. One process trims at a time;
//! who reads meanwhile and meets a half removed entry has a miss and compiles. Whatever fails here is left for the next
//! time.

use std::fs::{File, TryLockError};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

/// Some ten thousand kernels with their texts: the candidates of a hundred problems.
const DEFAULT_MB: u64 = 1024;

/// The folder is walked at a process's first entry, and then each time that this share of the limit was added.
const SLACK: u64 = 16;

/// A use is marked no more often: a service that starts a thousand times a day does not write as often.
const MARK_INTERVAL: Duration = Duration::from_secs(3600);

pub struct Limit {
    bytes: u64,
    /// Added by this process since the folder was last walked.
    added: AtomicU64,
}

impl Limit {
    /// `FLASHTUNE_CACHE_LIMIT_MB`, if it is a number.
    pub fn from_environment() -> Limit {
        let setting = std::env::var("FLASHTUNE_CACHE_LIMIT_MB").ok().filter(|text| !text.is_empty());
        let megabytes = setting.map_or(DEFAULT_MB, |text| {
            text.parse().unwrap_or_else(|_| {
                log::warn!("FLASHTUNE_CACHE_LIMIT_MB is {text:?}; it must be a whole number; {DEFAULT_MB} is taken");
                DEFAULT_MB
            })
        });
        Limit::of_bytes(megabytes.saturating_mul(1 << 20))
    }

    pub fn of_bytes(bytes: u64) -> Limit {
        // Due at once: what earlier processes left counts too.
        Limit { bytes, added: AtomicU64::new(bytes / SLACK) }
    }

    /// Called after `bytes` were added to `folder`.
    pub fn keep(&self, folder: &Path, bytes: u64) {
        if self.added.fetch_add(bytes, Ordering::Relaxed) + bytes < self.bytes / SLACK {
            return;
        }
        self.added.store(0, Ordering::Relaxed);
        // Of two that trim side by side each would remove its own share. The lock is the folder's own and ends with `lock`.
        let Ok(lock) = File::open(folder) else { return };
        if let Err(TryLockError::WouldBlock) = lock.try_lock() {
            return;
        }
        // Where the file system has no locks, `trim` still counts what others removed.
        self.trim(entries(folder));
    }

    /// Removes the oldest of the entries until what is left is within the limit.
    fn trim(&self, mut entries: Vec<Entry>) {
        let mut total: u64 = entries.iter().map(|entry| entry.bytes).sum();
        if total <= self.bytes {
            return;
        }
        entries.sort_by_key(|entry| entry.used);
        for entry in entries {
            // Room for what is added before the next walk.
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

/// Notes that a cubin was used just now.
pub fn mark_used(cubin: &Path) {
    let now = SystemTime::now();
    let used = cubin.metadata().and_then(|metadata| metadata.modified());
    if used.is_ok_and(|used| now.duration_since(used).is_ok_and(|age| age > MARK_INTERVAL))
        && let Ok(file) = std::fs::File::options().append(true).open(cubin)
    {
        // In a folder that cannot be written nothing is removed either.
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
            // The cubin is the newest of its files. Where there is none yet, another process may be about to write it.
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
        // Of 640 bytes six entries fit, with the slack left free.
        Limit::of_bytes(640).trim(listed);
        let mut left: Vec<_> = std::fs::read_dir(folder.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
        left.sort();
        assert_eq!(left, ["5", "6", "7", "8", "9"]);
    }
}
