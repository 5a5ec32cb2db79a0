//! Store: text by key in a sled database that several processes share, each for moments at a time.
//!
//! sled locks its folder for one process. So each access takes a lock file of ours with bounded
//! retry, opens the database, reads it whole or writes one batch, and closes it. The store knows
//! keys and values as text, not records. No error leaves this file: a failure is a miss, and one
//! line of log in the life of the store.

use crate::kernel::cache_dir;
use std::collections::BTreeMap;
use std::fs::{File, OpenOptions, TryLockError};
use std::hash::{BuildHasher, RandomState};
use std::os::unix::fs::OpenOptionsExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// The longest wait of a read for other processes. They hold the lock for some 20 ms.
const READ_DEADLINE: Duration = Duration::from_secs(2);

/// A few thousand records are a few megabytes; sled's default is a gigabyte.
const SLED_CACHE_BYTES: u64 = 16 << 20;

/// The process that first opened sled here. A forked child must not open it: sled's worker threads
/// do not survive a fork, and without them an open waits for ever.
static OPENED_BY: AtomicU32 = AtomicU32::new(0);

pub type Entries = BTreeMap<String, String>;
/// A key and its new value, or None to remove it.
pub type Change = (String, Option<String>);

pub struct Store {
    database: PathBuf,
    lock: PathBuf,
    /// The place for a database that cannot be read. It replaces an earlier one.
    set_aside: PathBuf,
    complained: AtomicBool,
    /// Whether a database was set aside since `has_begun_anew` was last asked.
    begun_anew: AtomicBool,
}

/// Why a database did not open or read.
enum Trouble {
    /// Another process has it, or a thread of ours that is still closing it.
    Busy,
    /// Its content makes no sense. It is set aside.
    Broken(String),
    /// The file system refuses; the database may be fine.
    Refused(String),
}

impl Store {
    /// None if the folder is not safe or cannot be made.
    pub fn in_folder(cache_dir: &Path) -> Option<Store> {
        if let Err(reason) = cache_dir::secure(cache_dir) {
            log::warn!("records are kept in memory only: {reason}");
            return None;
        }
        Some(Store {
            database: cache_dir.join("records.sled"),
            lock: cache_dir.join("records.lock"),
            set_aside: cache_dir.join("records.broken"),
            complained: AtomicBool::new(false),
            begun_anew: AtomicBool::new(false),
        })
    }

    /// All entries; none if they cannot be read.
    pub fn read(&self) -> Entries {
        if !self.database.exists() {
            return Entries::new();
        }
        self.with_database(READ_DEADLINE, read_all).unwrap_or_default()
    }

    /// Applies the changes as one batch. Returns the entries afterwards, or None if nothing was
    /// written.
    pub fn write(&self, changes: &[Change], deadline: Duration) -> Option<Entries> {
        let mut batch = sled::Batch::default();
        for (key, value) in changes {
            match value {
                Some(value) => batch.insert(key.as_bytes(), value.as_bytes()),
                None => batch.remove(key.as_bytes()),
            }
        }
        self.with_database(deadline, |database| {
            // The read comes first: it finds a broken database before anything is added to it.
            read_all(database)?;
            database.apply_batch(batch.clone()).and_then(|()| database.flush()).map_err(trouble)?;
            read_all(database)
        })
    }

    /// Whether a damaged database was set aside since the last call, which took the earlier entries
    /// with it.
    pub fn has_begun_anew(&self) -> bool {
        self.begun_anew.swap(false, Ordering::Relaxed)
    }

    /// Runs `work` on the open database while no other process has it. Sets a broken database aside
    /// once, and repeats the work on a new one.
    fn with_database<T>(&self, wait: Duration, work: impl Fn(&sled::Db) -> Result<T, Trouble>) -> Option<T> {
        if !may_open() {
            return self.complain("this process was forked from one that had the records open");
        }
        let deadline = Instant::now() + wait;
        let _lock = match self.acquire(deadline) {
            Ok(lock) => lock,
            Err(reason) => return self.complain(reason),
        };
        let mut was_set_aside = false;
        loop {
            // sled is meant to return errors. A panic on a damaged file must not end the host
            // program either.
            let attempt = || open(&self.database).and_then(|database| work(&database));
            let result = catch_unwind(AssertUnwindSafe(attempt))
                .unwrap_or_else(|_| Err(Trouble::Broken("sled panicked".into())));
            match result {
                Ok(value) => return Some(value),
                Err(Trouble::Busy) if Instant::now() < deadline => pause(),
                Err(Trouble::Busy) => return self.complain("the database is in use"),
                Err(Trouble::Refused(reason)) => return self.complain(reason),
                Err(Trouble::Broken(reason)) if was_set_aside => return self.complain(reason),
                Err(Trouble::Broken(reason)) => {
                    self.set_aside(&reason)?;
                    was_set_aside = true;
                }
            }
        }
    }

    /// The lock ends when the file is closed, also if the process is killed.
    fn acquire(&self, deadline: Instant) -> Result<File, String> {
        let named = |error: std::io::Error| format!("{}: {error}", self.lock.display());
        let file =
            OpenOptions::new().write(true).create(true).truncate(false).mode(0o600).open(&self.lock).map_err(named)?;
        loop {
            match file.try_lock() {
                Ok(()) => return Ok(file),
                Err(TryLockError::WouldBlock) if Instant::now() < deadline => pause(),
                Err(TryLockError::WouldBlock) => {
                    return Err(format!("{} is held by another process", self.lock.display()));
                }
                Err(TryLockError::Error(error)) => return Err(named(error)),
            }
        }
    }

    fn set_aside(&self, reason: &str) -> Option<()> {
        // Only the newest broken one is kept.
        if std::fs::remove_dir_all(&self.set_aside).is_err() {
            let _ = std::fs::remove_file(&self.set_aside);
        }
        let moved = std::fs::rename(&self.database, &self.set_aside);
        let outcome = match &moved {
            Ok(()) => format!("it was moved to {} and a new one begun", self.set_aside.display()),
            Err(error) => format!("and it cannot be moved: {error}"),
        };
        let _: Option<()> = self.complain(format!("the database is damaged ({reason}); {outcome}"));
        self.begun_anew.fetch_or(moved.is_ok(), Ordering::Relaxed);
        moved.ok()
    }

    /// One line, once; always a miss.
    fn complain<T>(&self, reason: impl std::fmt::Display) -> Option<T> {
        if !self.complained.swap(true, Ordering::Relaxed) {
            log::warn!("records in {}: {reason}", self.database.display());
        }
        None
    }
}

fn may_open() -> bool {
    let me = std::process::id();
    match OPENED_BY.compare_exchange(0, me, Ordering::Relaxed, Ordering::Relaxed) {
        Ok(_) => true,
        Err(opened_by) => opened_by == me,
    }
}

fn open(path: &Path) -> Result<sled::Db, Trouble> {
    sled::Config::new().path(path).flush_every_ms(None).cache_capacity(SLED_CACHE_BYTES).open().map_err(trouble)
}

fn read_all(database: &sled::Db) -> Result<Entries, Trouble> {
    let mut entries = Entries::new();
    for item in database.iter() {
        // A damaged database may yield errors without end, so the first one ends the loop.
        let (key, value) = item.map_err(|error| Trouble::Broken(error.to_string()))?;
        if let (Ok(key), Ok(value)) = (std::str::from_utf8(&key), std::str::from_utf8(&value)) {
            entries.insert(key.to_owned(), value.to_owned());
        }
    }
    Ok(entries)
}

fn trouble(error: sled::Error) -> Trouble {
    use std::io::ErrorKind::{
        AlreadyExists, InvalidData, InvalidInput, IsADirectory, NotADirectory, Other, UnexpectedEof,
    };
    match &error {
        // The only sign of a folder that another process has open (sled 0.34.7).
        sled::Error::Io(io) if io.to_string().contains("could not acquire lock") => Trouble::Busy,
        // Errors that only wrong content gives, or a file where a folder belongs and the other way
        // round.
        sled::Error::Io(io)
            if matches!(
                io.kind(),
                Other | UnexpectedEof | InvalidData | InvalidInput | AlreadyExists | NotADirectory | IsADirectory
            ) =>
        {
            Trouble::Broken(error.to_string())
        }
        sled::Error::Io(_) => Trouble::Refused(error.to_string()),
        _ => Trouble::Broken(error.to_string()),
    }
}

/// Sleeps 2 to 10 ms, out of step with other processes.
fn pause() {
    let jitter = RandomState::new().hash_one(0) % 8;
    std::thread::sleep(Duration::from_millis(2 + jitter));
}
