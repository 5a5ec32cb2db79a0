//! Journal: the changes of a store in the order in which they were made, as lines of text.
//!
//! The journal is the truth about a store. A change counts as kept once its line is on disk. Lines
//! are only appended, and each has a checksum, so that damage or a killed writer costs the lines
//! that it hits and no other. A rewrite, which drops what later lines replaced, publishes a whole
//! new file. Writers hold the store's lock; a reader needs none.

use crate::files;
use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::hash::{BuildHasher, RandomState};
use std::io::{Error, ErrorKind, Read, Result, Seek, SeekFrom, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

/// The journal of some hundred thousand records. A larger file is not one.
const MAX_BYTES: u64 = 1 << 30;
/// A rewrite is due when lines that were replaced take more than this beside as much as the rest.
const SLACK_BYTES: u64 = 256 << 10;
const FORMAT: &str = "flashtune records 1";
/// What a journal of every version begins with. The version follows.
const ANY_FORMAT: &str = "flashtune records ";
const VERSION: u64 = 1;
/// The format, 16 digits and a number.
const MAX_HEADER_BYTES: u64 = 80;
/// A journal that lost its first line, or some of its lines, is kept beside the new one.
const MAX_SET_ASIDE: usize = 100;

pub type Entries = BTreeMap<String, String>;
/// A key and its new value, or None to remove it.
pub type Change = (String, Option<String>);

#[derive(Clone)]
pub struct Journal {
    path: PathBuf,
}

/// A place in a journal: the lines before it, as long as the journal has this first line.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Position {
    /// The format, the store's identity and the number of the rewrite.
    pub header: String,
    pub bytes: u64,
}

/// What a journal has to say after a position, or as a whole.
pub struct Lines {
    /// Whether these are all changes of the journal, because the position was not one of it.
    pub is_whole: bool,
    pub changes: Vec<Change>,
    pub end: Position,
    /// Lines whose checksum is wrong.
    pub damaged: usize,
}

/// The entries that the changes of a journal lead to.
#[derive(Clone, Debug)]
pub struct Found {
    pub entries: Entries,
    pub end: Position,
    /// Lines whose checksum is wrong.
    pub damaged: usize,
}

impl Position {
    /// The store's identity, which rewrites keep. A journal that lost its first line has none.
    pub fn identity(&self) -> &str {
        self.header.strip_prefix(FORMAT).and_then(|rest| rest.split_whitespace().next()).unwrap_or_default()
    }

    fn generation(&self) -> u64 {
        self.header.rsplit(' ').next().and_then(|number| number.parse().ok()).unwrap_or(0)
    }
}

impl Found {
    /// Adds what the journal says after them. Returns whether these are still the entries of the
    /// same store, and not those of another one in its place.
    pub fn follow(&mut self, lines: Lines) -> bool {
        let is_same = self.end.identity() == lines.end.identity();
        if lines.is_whole {
            (self.entries, self.damaged) = (Entries::new(), 0);
        }
        apply(&mut self.entries, &lines.changes);
        self.end = lines.end;
        self.damaged += lines.damaged;
        is_same
    }
}

impl Journal {
    pub fn new(path: PathBuf) -> Journal {
        Journal { path }
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    pub fn exists(&self) -> bool {
        self.path.symlink_metadata().is_ok()
    }

    /// The length of the file; 0 if it cannot be read.
    pub fn bytes(&self) -> u64 {
        self.path.metadata().map_or(0, |metadata| metadata.len())
    }

    /// The lines after `from`. A last line without an end is one that is being written, or whose
    /// writer was killed; it does not count.
    pub fn read(&self, from: Option<&Position>) -> Result<Lines> {
        let mut file = files::open(&self.path)?;
        files::require_own(&file)?;
        let header = read_header(&mut file)?;
        let after_header = if header.is_empty() { 0 } else { header.len() as u64 + 1 };
        let mut known = from.filter(|from| from.header == header && !header.is_empty());
        // A writer whose append failed takes its lines back, and others may be in their place.
        if let Some(from) = known
            && !is_line_end(&mut file, from.bytes)?
        {
            known = None;
        }
        let is_whole = known.is_none();
        let start = known.map_or(after_header, |from| from.bytes);
        file.seek(SeekFrom::Start(start))?;
        let text = files::read_up_to(file, MAX_BYTES)?;
        let end = text.iter().rposition(|byte| *byte == b'\n').map_or(0, |last| last + 1);
        let (mut changes, mut damaged) = (Vec::new(), 0);
        for line in text[..end].split(|byte| *byte == b'\n').filter(|line| !line.is_empty()) {
            match change_of(line) {
                Some(change) => changes.push(change),
                None => damaged += 1,
            }
        }
        Ok(Lines { is_whole, changes, end: Position { header, bytes: start + end as u64 }, damaged })
    }

    /// What the whole journal leads to.
    pub fn entries(&self) -> Result<Found> {
        let mut found = Found { entries: Entries::new(), end: Position::default(), damaged: 0 };
        found.follow(self.read(None)?);
        Ok(found)
    }

    /// Appends changes, which are on disk after Ok. After an error, some of them may be.
    pub fn append(&self, changes: &[Change]) -> Result<()> {
        let mut file = OpenOptions::new()
            .read(true)
            .append(true)
            .custom_flags(libc::O_NONBLOCK | libc::O_NOFOLLOW)
            .open(&self.path)?;
        files::require_regular(&file)?;
        files::require_own(&file)?;
        read_header(&mut file)?;
        let end = end_of_last_line(&mut file)?;
        if file.metadata()?.len() > end {
            file.set_len(end)?;
        }
        let lines = lines_of(changes);
        let written = files::without_size_signal(|| file.write_all(lines.as_bytes())).and_then(|()| file.sync_all());
        if written.is_err() {
            // On a full disk this gives back what the part of a line took.
            let _ = file.set_len(end);
        }
        written
    }

    /// Begins a journal with these entries, in the place of none or of the one that ends `before`.
    pub fn rewrite(&self, entries: &Entries, before: Option<&Position>) -> Result<()> {
        let identity = before.map(Position::identity).filter(|identity| !identity.is_empty());
        let identity = identity.map_or_else(|| format!("{:016x}", RandomState::new().hash_one(0)), str::to_owned);
        let generation = before.map_or(0, |before| before.generation() + 1);
        let changes: Vec<Change> = entries.iter().map(|(key, value)| (key.clone(), Some(value.clone()))).collect();
        let text = format!("{FORMAT} {identity} {generation}\n{}", lines_of(&changes));
        files::publish(&self.path, text.as_bytes())
    }

    /// Keeps this journal under a name of its own too, for a person to look at. An earlier one that
    /// was kept stays.
    pub fn set_aside(&self, names: &Path) -> Result<PathBuf> {
        let place = free_name(names)?;
        std::fs::hard_link(&self.path, &place).map(|()| place)
    }
}

/// `names`, or the first of `names.1`, `names.2` and so on that does not exist.
pub fn free_name(names: &Path) -> Result<PathBuf> {
    let numbered = |number: usize| match number {
        0 => names.to_owned(),
        _ => PathBuf::from(format!("{}.{number}", names.display())),
    };
    let free = (0..MAX_SET_ASIDE).map(numbered).find(|name| name.symlink_metadata().is_err());
    free.ok_or_else(|| std::io::Error::other(format!("{} and {MAX_SET_ASIDE} more exist", names.display())))
}

/// Whether a journal of this length should be rewritten with the entries alone.
pub fn is_rewrite_due(end: &Position, entries: &Entries) -> bool {
    let live: u64 = entries.iter().map(|(key, value)| (key.len() + value.len()) as u64).sum();
    end.bytes > 2 * live + SLACK_BYTES
}

fn apply(entries: &mut Entries, changes: &[Change]) {
    for (key, value) in changes {
        match value {
            Some(value) => drop(entries.insert(key.clone(), value.clone())),
            None => drop(entries.remove(key)),
        }
    }
}

/// The first line if it is a journal's, else nothing. An error for a journal of another version,
/// which must stay as it is.
fn read_header(file: &mut File) -> Result<String> {
    let mut text = Vec::new();
    Read::by_ref(file).take(MAX_HEADER_BYTES).read_to_end(&mut text)?;
    let first = text.split(|byte| *byte == b'\n').next().unwrap_or_default();
    let is_complete = first.len() < text.len();
    let line = String::from_utf8_lossy(first);
    let version = line.strip_prefix(ANY_FORMAT).and_then(|rest| rest.split(' ').next()?.parse().ok());
    match version {
        Some(VERSION) if is_complete => Ok(std::str::from_utf8(first).unwrap_or_default().to_owned()),
        Some(VERSION) | None => Ok(String::new()),
        Some(other) => Err(Error::new(
            ErrorKind::InvalidData,
            format!("it has version {other} of the format; this library knows version {VERSION} alone"),
        )),
    }
}

/// Whether a line of the file ends before this place.
fn is_line_end(file: &mut File, place: u64) -> Result<bool> {
    let mut last = [0];
    let Some(before) = place.checked_sub(1) else { return Ok(false) };
    file.seek(SeekFrom::Start(before))?;
    Ok(file.read(&mut last)? == 1 && last == *b"\n")
}

/// `checksum ["key","value"]`, where a value of null removes the key.
fn lines_of(changes: &[Change]) -> String {
    let mut text = String::new();
    for change in changes {
        // Serialising strings to JSON cannot fail.
        let json = serde_json::to_string(change).unwrap_or_default();
        text += &format!("{:08x} {json}\n", crc32fast::hash(json.as_bytes()));
    }
    text
}

fn change_of(line: &[u8]) -> Option<Change> {
    let (sum, json) = line.split_at_checked(9)?;
    let sum = u32::from_str_radix(std::str::from_utf8(sum).ok()?.trim_end(), 16).ok()?;
    (crc32fast::hash(json) == sum).then(|| serde_json::from_slice(json).ok())?
}

/// The length of the file up to its last complete line.
fn end_of_last_line(file: &mut File) -> Result<u64> {
    let mut end = file.metadata()?.len();
    let mut block = [0; 4096];
    while end > 0 {
        let start = end.saturating_sub(block.len() as u64);
        let part = &mut block[..(end - start) as usize];
        file.seek(SeekFrom::Start(start))?;
        file.read_exact(part)?;
        if let Some(last) = part.iter().rposition(|byte| *byte == b'\n') {
            return Ok(start + last as u64 + 1);
        }
        end = start;
    }
    Ok(0)
}
