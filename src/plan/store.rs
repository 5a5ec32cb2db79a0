//! Store: text by key in a folder that several processes share.
//!
//! A `journal` of all changes is the truth. An `index` in sled saves a process from reading a long
//! journal at its start. A change counts as kept once the journal has it on disk; no fault of the
//! index can lose it. Writers take a lock file with bounded retry. The store knows keys and values
//! as text, not records. A read that fails is a miss. Faults cost one line of log in the life of
//! the store.

use super::index::{Index, Trouble};
use super::journal::{self, Change, Entries, Found, Journal, Position};
use crate::files;
use crate::kernel::cache_dir;
use std::fs::{File, OpenOptions, TryLockError};
use std::hash::{BuildHasher, RandomState};
use std::io::ErrorKind;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// The longest wait of a read for the lock, which the index needs. The journal needs none.
const READ_DEADLINE: Duration = Duration::from_secs(2);
/// A shorter journal is read faster than sled opens.
const INDEX_FROM_BYTES: u64 = 64 << 10;

pub struct Store {
    journal: Journal,
    index: Index,
    /// The database of a library without a journal. Only read: that library may run again.
    older: Index,
    lock: PathBuf,
    /// Where a journal or an older library's database goes of which a part cannot be read.
    set_aside: PathBuf,
    complained: AtomicBool,
    /// What was read last.
    found: Mutex<Option<Found>>,
    begun_anew: AtomicBool,
}

impl Store {
    /// An error, one sentence, if the folder is not safe or cannot be made.
    pub fn in_folder(cache_dir: &Path) -> Result<Store, String> {
        cache_dir::secure(cache_dir)?;
        Ok(Store {
            journal: Journal::new(cache_dir.join("records.journal")),
            index: Index::new(cache_dir.join("records.index")),
            older: Index::new(cache_dir.join("records.sled")),
            lock: cache_dir.join("records.lock"),
            set_aside: cache_dir.join("records.broken"),
            complained: AtomicBool::new(false),
            found: Mutex::new(None),
            begun_anew: AtomicBool::new(false),
        })
    }

    /// All entries; none if they cannot be read.
    pub fn read(&self) -> Entries {
        let found = match (self.journal.exists(), self.older.exists()) {
            (false, false) => return Entries::new(),
            (false, true) => self.acquire(Instant::now() + READ_DEADLINE).and_then(|_lock| self.begin()),
            (true, _) if self.journal.bytes() < INDEX_FROM_BYTES => self.journal_alone().map(|found| self.note(found)),
            (true, _) => self.through_index().map(|found| self.note(found)),
        };
        found.unwrap_or_else(|reason| {
            self.complain(&reason);
            Entries::new()
        })
    }

    /// Applies the changes. Returns the entries afterwards. After an error, the changes are not
    /// known to be kept; the reason names the file.
    pub fn write(&self, changes: &[Change], deadline: Duration) -> Result<Entries, String> {
        let written = self.acquire(Instant::now() + deadline).and_then(|_lock| {
            if !self.journal.exists() {
                let old = self.adopt()?;
                // Without the old entries a journal must not begin: they would never be read again.
                if !self.journal.exists() {
                    self.rewrite(&old, None)?;
                }
            }
            self.journal.append(changes).map_err(|error| self.named(error))?;
            self.follow()
        });
        written.inspect_err(|reason| self.complain(reason))
    }

    /// Whether another journal than the one that was read before has taken its place since the last
    /// call, which took the earlier entries with it.
    pub fn has_begun_anew(&self) -> bool {
        self.begun_anew.swap(false, Ordering::Relaxed)
    }

    /// The entries where there was no journal. Another process may have begun one before this one
    /// had the lock.
    fn begin(&self) -> Result<Entries, String> {
        match self.journal.exists() {
            true => self.journal_alone().map(|found| self.note(found)),
            false => self.adopt(),
        }
    }

    fn journal_alone(&self) -> Result<Found, String> {
        self.journal.entries().map_err(|error| self.named(error))
    }

    fn through_index(&self) -> Result<Found, String> {
        let lock = self.acquire(Instant::now() + READ_DEADLINE);
        let found = lock.and_then(|_lock| self.index.entries(&self.journal).map_err(Trouble::into_reason));
        found.or_else(|reason| {
            log::debug!("the index {}: {reason}", self.index.folder().display());
            self.journal_alone()
        })
    }

    /// Reads what the journal has beyond what this process knows. Makes the journal anew where that
    /// is due.
    fn follow(&self) -> Result<Entries, String> {
        let known = self.found().take();
        let mut found = match known {
            None => self.journal_alone()?,
            Some(mut known) => {
                let lines = self.journal.read(Some(&known.end)).map_err(|error| self.named(error))?;
                if !known.follow(lines) {
                    self.begun_anew.store(true, Ordering::Relaxed);
                }
                known
            }
        };
        let is_damaged = |found: &Found| found.damaged > 0 || found.end.identity().is_empty();
        if is_damaged(&found) || journal::is_rewrite_due(&found.end, &found.entries) {
            // What this process knows may come from lines that their writer took back.
            found = self.journal_alone()?;
        }
        if is_damaged(&found) {
            self.salvage(&found).unwrap_or_else(|reason| self.complain(&reason));
        } else if journal::is_rewrite_due(&found.end, &found.entries)
            && let Err(reason) = self.rewrite(&found.entries, Some(&found.end))
        {
            // The longer journal serves as well.
            log::debug!("{reason}");
        }
        Ok(self.note(found))
    }

    /// Remembers what was read.
    fn note(&self, found: Found) -> Entries {
        if found.damaged > 0 {
            self.complain(&self.named(format_args!("{} lines are damaged", found.damaged)));
        }
        self.found().insert(found).entries.clone()
    }

    fn found(&self) -> MutexGuard<'_, Option<Found>> {
        self.found.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes over the database of an older library, which had no journal. What cannot be read of it
    /// is kept for a person to look at.
    fn adopt(&self) -> Result<Entries, String> {
        let named = |reason: &str| format!("{}: {reason}", self.older.folder().display());
        if !self.older.exists() {
            return Ok(Entries::new());
        }
        if let Err(reason) = self.older.require_own() {
            // It stays, and so does what it holds. A journal begins without it.
            self.complain(&named(&format!("its records are not taken over: {reason}")));
            return Ok(Entries::new());
        }
        match self.older.entries_alone() {
            Ok(entries) => {
                // On a full disk the database goes on serving until there is room.
                let _ = self.rewrite(&entries, None).inspect_err(|reason| self.complain(reason));
                Ok(entries)
            }
            Err(Trouble::Broken(reason)) => {
                let place = journal::free_name(&self.set_aside).map_err(|error| named(&error.to_string()))?;
                std::fs::rename(self.older.folder(), &place).map_err(|error| named(&error.to_string()))?;
                self.complain(&named(&format!(
                    "the database is damaged ({reason}); it was moved to {}",
                    place.display()
                )));
                Ok(Entries::new())
            }
            Err(trouble) => Err(named(&trouble.into_reason())),
        }
    }

    /// Makes a damaged journal whole again with the lines that can be read. The damaged one stays
    /// under another name.
    fn salvage(&self, found: &Found) -> Result<(), String> {
        let place = self.journal.set_aside(&self.set_aside).map_err(|error| self.named(error))?;
        self.rewrite(&found.entries, Some(&found.end)).inspect_err(|_| drop(std::fs::remove_file(&place)))?;
        let damaged = found.damaged.max(1);
        self.complain(
            &self.named(format_args!("{damaged} lines are damaged; the damaged file is {}", place.display())),
        );
        Ok(())
    }

    fn rewrite(&self, entries: &Entries, before: Option<&Position>) -> Result<(), String> {
        self.remove_temporaries();
        self.journal.rewrite(entries, before).map_err(|error| self.named(error))
    }

    /// Those of killed processes. Only holders of the lock publish files in this folder.
    fn remove_temporaries(&self) {
        for entry in std::fs::read_dir(self.folder()).into_iter().flatten().flatten() {
            if entry.file_name().to_string_lossy().starts_with(files::TEMPORARY_PREFIX) {
                let _ = std::fs::remove_file(entry.path());
            }
        }
    }

    fn folder(&self) -> &Path {
        self.lock.parent().unwrap_or(Path::new("."))
    }

    /// The lock ends with the guard, or if the process is killed.
    fn acquire(&self, deadline: Instant) -> Result<Lock, String> {
        let named = |error: std::io::Error| format!("{}: {error}", self.lock.display());
        // A pipe in the lock's place must not make the open wait.
        let flags = libc::O_NONBLOCK | libc::O_NOFOLLOW;
        let mut options = OpenOptions::new();
        options.write(true).create(true).truncate(false).mode(0o600).custom_flags(flags);
        let file = match options.open(&self.lock) {
            // Somebody removed the cache folder while this process ran.
            Err(error) if error.kind() == ErrorKind::NotFound => {
                cache_dir::secure(self.folder())?;
                options.open(&self.lock)
            }
            opened => opened,
        };
        let file = file.map_err(named)?;
        files::require_regular(&file).and_then(|()| files::require_own(&file)).map_err(named)?;
        loop {
            match file.try_lock() {
                Ok(()) => return Ok(Lock(file)),
                Err(TryLockError::WouldBlock) if Instant::now() < deadline => pause(),
                Err(TryLockError::WouldBlock) => {
                    return Err(format!("{} is held by another process", self.lock.display()));
                }
                Err(TryLockError::Error(error)) => return Err(named(error)),
            }
        }
    }

    fn named(&self, reason: impl std::fmt::Display) -> String {
        format!("{}: {reason}", self.journal.path().display())
    }

    /// One line, once.
    fn complain(&self, reason: &str) {
        if !self.complained.swap(true, Ordering::Relaxed) {
            log::warn!("records: {reason}");
        }
    }
}

/// Releases the lock when dropped. A close alone would not: a forked child shares the open file.
struct Lock(File);

impl Drop for Lock {
    fn drop(&mut self) {
        let _ = self.0.unlock();
    }
}

/// Sleeps 2 to 10 ms, out of step with other processes.
fn pause() {
    let jitter = RandomState::new().hash_one(0) % 8;
    std::thread::sleep(Duration::from_millis(2 + jitter));
}
