//! Index: the entries of a journal in a sled database, up to a position of the journal.
//!
//! A start reads the entries here, and only the journal's last lines. The index has nothing that
//! the journal lacks: an index that cannot be read, or that disagrees with its own checksum, is
//! removed and made anew. The store's lock is held around every call. `entries_alone` also reads
//! the database of a library that had no journal.
//!
//! What other users may write to is not read. sled makes its files with the modes that the umask
//! leaves, so they get their mode when the database is closed.
//!
//! sled 0.34.7 takes a file that it did not finish for a damaged database (`snap.*.generating`,
//! from a full disk or a killed process), so such files go before it opens. It waits for ever if
//! the disk fails in a batch (`Log::exit_reservation` wakes nobody), so there are no batches. It
//! runs on a thread of its own, for which callers wait `LONGEST_WORK` at most.

use super::journal::{Change, Entries, Found, Journal, Position};
use crate::files;
use std::fs::{DirBuilder, Metadata};
use std::io::ErrorKind;
use std::ops::Deref;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

/// A few thousand records are a few megabytes; sled's default is a gigabyte.
const SLED_CACHE_BYTES: u64 = 16 << 20;
/// How long a call waits for sled. A few thousand records take a small part of it, even on a slow
/// disk.
const LONGEST_WORK: Duration = Duration::from_secs(10);
/// The index stays behind by no more than this when it is read.
const MOST_LAG_BYTES: u64 = 64 << 10;
/// The key of the position. Those of entries begin with a letter.
const POSITION: &str = "\0position";

/// The process that first opened sled here. A forked child must not open it: sled's worker threads
/// do not survive a fork, and without them an open waits for ever.
static OPENED_BY: AtomicU32 = AtomicU32::new(0);

#[derive(Clone)]
pub struct Index {
    folder: PathBuf,
}

/// Why a database did not open, read or write.
#[derive(Debug)]
pub enum Trouble {
    /// This process may not open it now.
    Busy(String),
    /// Its content makes no sense.
    Broken(String),
    /// The file system refuses; the database may be fine.
    Refused(String),
}

impl Trouble {
    pub fn into_reason(self) -> String {
        let (Trouble::Busy(reason) | Trouble::Broken(reason) | Trouble::Refused(reason)) = self;
        reason
    }
}

impl Index {
    pub fn new(folder: PathBuf) -> Index {
        Index { folder }
    }

    /// The journal's entries. Makes the index catch up with the journal if it is far behind.
    pub fn entries(&self, journal: &Journal) -> Result<Found, Trouble> {
        let (index, journal) = (self.clone(), journal.clone());
        let result = SLED.run(move || {
            index.require_own().map_err(Trouble::Broken)?;
            let database = index.open()?;
            let mut entries = read_all(&database)?;
            let position = entries.remove(POSITION).and_then(|text| position_of(&text, &entries));
            let lines = journal.read(position.as_ref()).map_err(|error| Trouble::Refused(error.to_string()))?;
            let (is_whole, changes) = (lines.is_whole, lines.changes.clone());
            let before = position.unwrap_or_default();
            let mut found = Found { entries, end: before.clone(), damaged: 0 };
            found.follow(lines);
            if is_whole {
                database.clear().map_err(trouble)?;
            }
            if is_whole || found.end.bytes - before.bytes > MOST_LAG_BYTES {
                write(&database, &changes, &position_text(&found))?;
            }
            Ok(found)
        });
        if let Err(Trouble::Broken(reason)) = &result {
            log::debug!("the index {} is made anew: {reason}", self.folder.display());
            self.remove();
        }
        result
    }

    /// The entries of a database without a journal, from a library that kept them here alone.
    pub fn entries_alone(&self) -> Result<Entries, Trouble> {
        let index = self.clone();
        let (sender, read) = channel();
        // A database that is closed writes, and panics or waits for ever on a failing disk. What
        // was read counts.
        let closed = SLED.run(move || {
            let database = index.open()?;
            let _ = sender.send(read_all(&database)?);
            Ok(())
        });
        let mut entries = read.try_recv().or_else(|_| closed.map(|()| Entries::new()))?;
        entries.remove(POSITION);
        Ok(entries)
    }

    /// An error if another user may have written to the database: the reason.
    pub fn require_own(&self) -> Result<(), String> {
        match self.exists() {
            true => every_file(&self.folder, &mut |path, metadata| {
                files::require_own_metadata(metadata).map_err(|error| format!("{}: {error}", path.display()))
            }),
            false => Ok(()),
        }
    }

    pub fn exists(&self) -> bool {
        self.folder.symlink_metadata().is_ok()
    }

    pub fn folder(&self) -> &Path {
        &self.folder
    }

    fn remove(&self) {
        if std::fs::remove_dir_all(&self.folder).is_err() {
            let _ = std::fs::remove_file(&self.folder);
        }
    }

    fn open(&self) -> Result<Database<'_>, Trouble> {
        if !may_open() {
            return Err(Trouble::Busy("this process was forked from one that had the records open".into()));
        }
        // sled would make its folders with the modes that the umask leaves.
        let made = DirBuilder::new().recursive(true).mode(0o700).create(self.folder.join("blobs"));
        made.map_err(|error| io_trouble(&error))?;
        for entry in std::fs::read_dir(&self.folder).map_err(|error| io_trouble(&error))?.flatten() {
            if entry.file_name().to_string_lossy().ends_with(".generating") {
                std::fs::remove_file(entry.path()).map_err(|error| Trouble::Refused(error.to_string()))?;
            }
        }
        let config = sled::Config::new().path(&self.folder).flush_every_ms(None).cache_capacity(SLED_CACHE_BYTES);
        let database = config.open().map_err(trouble)?;
        Ok(Database { database: Some(database), folder: &self.folder })
    }
}

/// An open database. When it is closed, its files are this user's alone.
struct Database<'a> {
    database: Option<sled::Db>,
    folder: &'a Path,
}

impl Deref for Database<'_> {
    type Target = sled::Db;

    fn deref(&self) -> &sled::Db {
        self.database.as_ref().expect("there until the drop")
    }
}

impl Drop for Database<'_> {
    fn drop(&mut self) {
        // Closing writes files.
        drop(self.database.take());
        let _ = every_file(self.folder, &mut |path, metadata| {
            if metadata.is_file() && metadata.mode() & 0o022 != 0 {
                let _ = std::fs::set_permissions(path, PermissionsExt::from_mode(0o600));
            }
            Ok(())
        });
    }
}

/// Calls `visit` for a folder and all in it. Links are not followed.
fn every_file(path: &Path, visit: &mut dyn FnMut(&Path, &Metadata) -> Result<(), String>) -> Result<(), String> {
    let named = |error: std::io::Error| format!("{}: {error}", path.display());
    let metadata = path.symlink_metadata().map_err(named)?;
    visit(path, &metadata)?;
    if metadata.is_dir() {
        for entry in std::fs::read_dir(path).map_err(named)? {
            every_file(&entry.map_err(named)?.path(), visit)?;
        }
    }
    Ok(())
}

/// Writes the position last. It has the checksum of all, so what was written in part does not
/// count.
fn write(database: &sled::Db, changes: &[Change], position: &str) -> Result<(), Trouble> {
    for (key, value) in changes {
        match value {
            Some(value) => database.insert(key.as_bytes(), value.as_bytes()).map_err(trouble)?,
            None => database.remove(key.as_bytes()).map_err(trouble)?,
        };
    }
    database.insert(POSITION.as_bytes(), position.as_bytes()).map_err(trouble)?;
    database.flush().map(drop).map_err(trouble)
}

/// Length, checksum of the entries, first line of the journal. sled may lose pages without a word;
/// the checksum tells.
fn position_text(found: &Found) -> String {
    format!("{} {:08x} {}", found.end.bytes, checksum(&found.entries), found.end.header)
}

fn position_of(text: &str, entries: &Entries) -> Option<Position> {
    let mut words = text.splitn(3, ' ');
    let bytes = words.next()?.parse().ok()?;
    let sum = u32::from_str_radix(words.next()?, 16).ok()?;
    (sum == checksum(entries)).then(|| Some(Position { header: words.next()?.to_owned(), bytes }))?
}

fn checksum(entries: &Entries) -> u32 {
    let mut hasher = crc32fast::Hasher::new();
    for (key, value) in entries {
        hasher.update(key.as_bytes());
        hasher.update(&[0]);
        hasher.update(value.as_bytes());
        hasher.update(&[0]);
    }
    hasher.finalize()
}

/// Keeps sled's panics and endless waits from the host program.
struct Guard {
    limit: Duration,
    /// The thread of work that did not end in time. It has the folder locked until it does.
    abandoned: Mutex<Option<JoinHandle<()>>>,
}

static SLED: Guard = Guard { limit: LONGEST_WORK, abandoned: Mutex::new(None) };

impl Guard {
    /// Runs `work` on a thread of its own, unless that of earlier work still runs.
    fn run<T: Send + 'static>(&self, work: impl FnOnce() -> Result<T, Trouble> + Send + 'static) -> Result<T, Trouble> {
        let stuck = || Trouble::Busy(format!("sled did not answer within {} s", self.limit.as_secs_f64()));
        if self.abandoned().as_ref().is_some_and(|thread| !thread.is_finished()) {
            return Err(stuck());
        }
        let (sender, receiver) = channel();
        // The threads that sled starts inherit the mask of signals.
        let work = || files::without_size_signal(work);
        let run = move || drop(sender.send(catch_unwind(AssertUnwindSafe(work))));
        // The panic hook of the C face knows our threads by their names.
        let thread = std::thread::Builder::new().name("flashtune-index".into()).spawn(run);
        let thread = thread.map_err(|error| Trouble::Refused(format!("cannot start a thread: {error}")))?;
        match receiver.recv_timeout(self.limit) {
            Ok(result) => {
                let _ = thread.join();
                result.unwrap_or_else(|_| Err(Trouble::Broken("sled panicked".into())))
            }
            Err(_) => {
                *self.abandoned() = Some(thread);
                Err(stuck())
            }
        }
    }

    fn abandoned(&self) -> MutexGuard<'_, Option<JoinHandle<()>>> {
        self.abandoned.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn may_open() -> bool {
    let me = std::process::id();
    match OPENED_BY.compare_exchange(0, me, Ordering::Relaxed, Ordering::Relaxed) {
        Ok(_) => true,
        Err(opened_by) => opened_by == me,
    }
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
    match &error {
        // The only sign of a folder that another process has open (sled 0.34.7).
        sled::Error::Io(io) if io.to_string().contains("could not acquire lock") => Trouble::Busy(error.to_string()),
        sled::Error::Io(io) => io_trouble(io),
        _ => Trouble::Broken(error.to_string()),
    }
}

fn io_trouble(error: &std::io::Error) -> Trouble {
    use ErrorKind::{AlreadyExists, InvalidData, InvalidInput, IsADirectory, NotADirectory, Other, UnexpectedEof};
    match error.kind() {
        // Errors that only wrong content gives, or a file where a folder belongs and the other way
        // round.
        Other | UnexpectedEof | InvalidData | InvalidInput | AlreadyExists | NotADirectory | IsADirectory => {
            Trouble::Broken(error.to_string())
        }
        _ => Trouble::Refused(error.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn guard(limit: Duration) -> Guard {
        Guard { limit, abandoned: Mutex::new(None) }
    }

    #[test]
    fn work_that_does_not_end_is_waited_for_once() {
        let guard = guard(Duration::from_millis(20));
        let (sender, receiver) = channel::<()>();
        let endless = move || {
            let _ = receiver.recv();
            Ok(())
        };
        assert!(matches!(guard.run(endless), Err(Trouble::Busy(_))));
        // The first one would still hold the folder.
        assert!(matches!(guard.run(|| Ok(())), Err(Trouble::Busy(_))));
        drop(sender);
        let runs_again = || {
            std::thread::sleep(Duration::from_millis(5));
            guard.run(|| Ok(())).is_ok()
        };
        assert!((0..1000).any(|_| runs_again()));
    }

    #[test]
    fn a_panic_is_a_broken_database() {
        let guard = guard(Duration::from_secs(10));
        let broken: Result<(), Trouble> = guard.run(|| panic!("of sled"));
        assert!(matches!(broken, Err(Trouble::Broken(_))));
        assert_eq!(guard.run(|| Ok(7)).unwrap(), 7);
    }
}
