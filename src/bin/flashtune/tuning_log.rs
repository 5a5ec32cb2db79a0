//! The log of `autotune --log`: each problem with all its candidates, as lines of JSON.
//!
//! A record keeps the winner alone, for lookups and for shipping. A log keeps what a person wants
//! to see afterwards, with the day, and no lookup reads it. `report` shows it. An entry's record is
//! read as strictly as a line of a record file.

use crate::records::MAX_FILE_BYTES;
use flashtune::config::Config;
use flashtune::device::{Arch, Device};
use flashtune::family;
use flashtune::files;
use flashtune::plan::{Record, key, record};
use flashtune::problem::Problem;
use flashtune::tune::{Trial, Verdict};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs::{File, TryLockError};
use std::io::{ErrorKind, Write};
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

/// Changes when an entry's meaning does.
const VERSION: u32 = 1;
/// Candidates of an entry that is read: a page shows them all.
const MOST_CANDIDATES: usize = 10_000;

/// Those of times that are plausible.
const PLAUSIBLE_RATIO: RangeInclusive<f64> = 1e-12..=1e12;

/// One problem on one device.
#[derive(Clone, Debug)]
pub struct Entry {
    pub device: String,
    pub arch: Arch,
    pub sm_count: u32,
    pub problem: Problem,
    pub result: Result<Box<Record>, String>,
    /// What the run tells beside its result; None if no candidate was tried, or none was kept.
    pub run: Option<Run>,
}

/// What a tuning run did for one problem.
#[derive(Clone, Debug)]
pub struct Run {
    /// Seconds since 1970, in UTC.
    pub ended_at: u64,
    pub took: Duration,
    /// The heuristic's config.
    pub default: Config,
    pub candidates: Vec<Candidate>,
}

/// A config that the run tried, or that it passed over because of an earlier run.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Candidate {
    #[serde(flatten)]
    pub trial: Trial,
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub earlier_run: bool,
}

/// An entry as it is written.
#[derive(Serialize, Deserialize)]
struct Line {
    flashtune_log: u32,
    key: String,
    device: String,
    arch: Arch,
    sm_count: u32,
    problem: Problem,
    /// One of these two.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    record: Option<Value>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    failure: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    run: Option<RunLine>,
}

#[derive(Serialize, Deserialize)]
struct RunLine {
    ended_at: u64,
    seconds: f64,
    default: Config,
    candidates: Vec<Candidate>,
}

impl Entry {
    pub fn of_record(record: Record) -> Entry {
        Entry {
            device: record.device.clone(),
            arch: record.arch,
            sm_count: record.sm_count,
            problem: record.problem,
            result: Ok(Box::new(record)),
            run: None,
        }
    }

    /// A problem without a winner.
    pub fn failed(problem: &Problem, device: &Device, reason: String) -> Entry {
        Entry {
            device: device.name.clone(),
            arch: device.arch,
            sm_count: device.sm_count,
            problem: *problem,
            result: Err(reason),
            run: None,
        }
    }

    /// The device and the problem: a log has one entry for each, as a file of records does.
    pub fn id(&self) -> String {
        let device = key::device_key_of(self.arch, &self.device, self.sm_count);
        format!("{device} | {}", key::record_key(&self.problem))
    }

    /// Reads one line; the error says why it is no entry.
    pub fn from_line(text: &str) -> Result<Entry, String> {
        let value: Value = serde_json::from_str(text).map_err(|error| error.to_string())?;
        match value.get("flashtune_log").map(Value::as_u64) {
            Some(Some(version)) if version == u64::from(VERSION) => {}
            Some(_) => return Err("it is of a log of another version of flashtune".to_owned()),
            None if value.get("config").is_some() => {
                return Err("it is a record, not an entry of a tuning log".to_owned());
            }
            None => return Err("it is no entry of a tuning log".to_owned()),
        }
        let line: Line = serde_json::from_value(value).map_err(|error| error.to_string())?;
        let candidates = line.run.as_ref().map_or(0, |run| run.candidates.len());
        if candidates > MOST_CANDIDATES {
            return Err(format!("it has {candidates} candidates; at most {MOST_CANDIDATES} are read"));
        }
        line.problem.validate().map_err(|error| error.message)?;
        let result = match (&line.record, line.failure) {
            (Some(record), None) => Ok(Box::new(Record::from_line(&record.to_string())?)),
            (None, Some(reason)) => Err(reason),
            _ => return Err("it must have either a record or a failure".to_owned()),
        };
        let (device, arch, sm_count) = (line.device, line.arch, line.sm_count);
        let entry = Entry { device, arch, sm_count, problem: line.problem, result, run: line.run.map(Run::from) };
        let id = entry.id();
        if entry.result.as_ref().is_ok_and(|record| record.id() != id) {
            return Err("its record is of another problem or device".to_owned());
        }
        entry.with_younger_knobs().require_plausible()
    }

    pub fn to_line(&self) -> Result<String, String> {
        let record = match &self.result {
            Ok(record) => Some(serde_json::to_value(record).map_err(|error| error.to_string())?),
            Err(_) => None,
        };
        let line = Line {
            flashtune_log: VERSION,
            key: key::record_key(&self.problem),
            device: self.device.clone(),
            arch: self.arch,
            sm_count: self.sm_count,
            problem: self.problem,
            record,
            failure: self.result.as_ref().err().cloned(),
            run: self.run.clone().map(RunLine::from),
        };
        serde_json::to_string(&line).map_err(|error| error.to_string())
    }

    /// As in records, so that the winner is found among the candidates.
    fn with_younger_knobs(mut self) -> Entry {
        let pass = self.problem.pass;
        if let Some(run) = &mut self.run {
            run.default = family::with_younger_knobs(run.default.clone(), pass);
            for candidate in &mut run.candidates {
                let trial = &mut candidate.trial;
                trial.config = family::with_younger_knobs(trial.config.clone(), pass);
            }
        }
        self
    }

    fn require_plausible(self) -> Result<Entry, String> {
        for candidate in self.run.iter().flat_map(|run| &run.candidates) {
            let Verdict::Measured { median_us, over_default, .. } = candidate.trial.verdict else { continue };
            if !record::PLAUSIBLE_US.contains(&median_us) {
                let (least, most) = (record::PLAUSIBLE_US.start(), record::PLAUSIBLE_US.end());
                return Err(format!("a candidate's median_us is {median_us:e}; it must be from {least} to {most}"));
            }
            if over_default.is_some_and(|ratio| !PLAUSIBLE_RATIO.contains(&ratio)) {
                return Err("a candidate's over_default is not that of a measurement".to_owned());
            }
        }
        Ok(self)
    }
}

impl Run {
    pub fn new(default: Config, candidates: Vec<Candidate>, took: Duration) -> Run {
        let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        Run { ended_at: since.as_secs(), took, default, candidates }
    }
}

impl From<RunLine> for Run {
    fn from(line: RunLine) -> Run {
        let took = Duration::try_from_secs_f64(line.seconds).unwrap_or_default();
        Run { ended_at: line.ended_at, took, default: line.default, candidates: line.candidates }
    }
}

impl From<Run> for RunLine {
    fn from(run: Run) -> RunLine {
        // A tenth of a second is enough for people.
        let seconds = (run.took.as_secs_f64() * 10.0).round() / 10.0;
        RunLine { ended_at: run.ended_at, seconds, default: run.default, candidates: run.candidates }
    }
}

/// The entries of a text of lines; for each other line its number and why it is none.
pub fn read_lines(text: &str) -> (Vec<Entry>, Vec<(usize, String)>) {
    let (mut entries, mut ignored) = (Vec::new(), Vec::new());
    for (number, line) in (1..).zip(text.lines()).filter(|(_, line)| !line.trim().is_empty()) {
        match Entry::from_line(line) {
            Ok(entry) => entries.push(entry),
            Err(reason) => ignored.push((number, reason)),
        }
    }
    (entries, ignored)
}

/// The file of `--log`. A run adds a line for each problem, so a killed run loses one at most. The
/// next run, and the end of this one, leave a sorted line for each id.
pub struct Log {
    path: PathBuf,
    /// For adding at the end.
    file: File,
    /// The size of the file, with the lines that newer ones replace.
    bytes: u64,
    /// By id, whether the entry has a record, and its line.
    lines: BTreeMap<String, (bool, String)>,
}

impl Log {
    /// Reads the log that is there. A file of anything else stays as it is, and that is an error.
    /// So is the log of a run that has not ended: each would replace the other's lines.
    pub fn open(path: &Path) -> Result<Log, String> {
        let named = |reason: &dyn std::fmt::Display| format!("{}: {reason}", path.display());
        let before = files::open(path).ok();
        if let Some(Err(TryLockError::WouldBlock)) = before.as_ref().map(File::try_lock) {
            return Err(named(&"another run writes this log; give --log another file"));
        }
        let text = match files::read_text(path, MAX_FILE_BYTES) {
            Ok(text) => text,
            Err(error) if error.kind() == ErrorKind::NotFound => String::new(),
            Err(error) => return Err(named(&error)),
        };
        let mut lines = BTreeMap::new();
        for (number, line) in (1..).zip(text.split_inclusive('\n')).filter(|(_, line)| !line.trim().is_empty()) {
            match Entry::from_line(line.trim_end()) {
                Ok(entry) if is_kept(&lines, &entry) => {
                    lines.insert(entry.id(), (entry.result.is_ok(), line.trim_end().to_owned()));
                }
                Ok(_) => {}
                // A killed run may leave the beginning of a line.
                Err(_) if number > 1 && !line.ends_with('\n') => {}
                Err(reason) => return Err(named(&format_args!("line {number}: {reason}"))),
            }
        }
        let (file, bytes) = publish(path, &lines)?;
        // The lock ends with the file. Without locks, two runs are not told apart.
        let _ = file.try_lock();
        Ok(Log { path: path.to_owned(), file, bytes, lines })
    }

    /// Adds the entry in place of that of its id. A record that is there stays if this run failed
    /// or measured nothing.
    pub fn add(&mut self, entry: &Entry) -> Result<(), String> {
        if !is_kept(&self.lines, entry) {
            return Ok(());
        }
        let line = entry.to_line()? + "\n";
        let bytes = self.bytes + line.len() as u64;
        if bytes > MAX_FILE_BYTES {
            return Err(format!(
                "{}: it would have {bytes} bytes, and a log is read up to {MAX_FILE_BYTES}; give --log another file",
                self.path.display()
            ));
        }
        files::without_size_signal(|| self.file.write_all(line.as_bytes()))
            .map_err(|error| format!("{}: {error}", self.path.display()))?;
        self.bytes = bytes;
        self.lines.insert(entry.id(), (entry.result.is_ok(), line.trim_end().to_owned()));
        Ok(())
    }

    /// Leaves a sorted line for each id.
    pub fn finish(self) -> Result<(), String> {
        publish(&self.path, &self.lines).map(drop)
    }
}

/// Whether the entry replaces that of its id, if there is one.
fn is_kept(lines: &BTreeMap<String, (bool, String)>, entry: &Entry) -> bool {
    let has_news = entry.result.is_ok() && entry.run.is_some();
    has_news || !lines.get(&entry.id()).is_some_and(|(has_record, _)| *has_record)
}

/// Replaces the file, and opens it for adding lines. A folder that is not there shows before hours
/// of tuning.
fn publish(path: &Path, lines: &BTreeMap<String, (bool, String)>) -> Result<(File, u64), String> {
    let text: String = lines.values().flat_map(|(_, line)| [line, "\n"]).collect();
    let opened = files::publish(path, text.as_bytes()).and_then(|()| files::open_to_append(path));
    opened.map(|file| (file, text.len() as u64)).map_err(|error| format!("{}: {error}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use flashtune::cpu::Cpu;
    use flashtune::problem::{Dtype, Pass};

    fn entry(seqlen: i64) -> Entry {
        let problem = Problem::dense(Pass::Forward, Dtype::Fp32, 1, 1, seqlen, 32);
        Entry::failed(&problem, Cpu::new(1).unwrap().device(), "on purpose".to_owned())
    }

    fn ids(path: &Path) -> Vec<String> {
        let (entries, ignored) = read_lines(&std::fs::read_to_string(path).unwrap());
        assert!(ignored.is_empty(), "{ignored:?}");
        entries.iter().map(Entry::id).collect()
    }

    #[test]
    fn a_log_that_was_cut_keeps_its_whole_lines_and_goes_on() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("log.jsonl");
        let mut log = Log::open(&path).unwrap();
        log.add(&entry(256)).unwrap();
        log.add(&entry(128)).unwrap();
        log.add(&entry(256)).unwrap();
        // Each line is there at once, before the run ends.
        assert_eq!(ids(&path).len(), 3);
        drop(log);
        let whole = std::fs::read_to_string(&path).unwrap();
        std::fs::write(&path, &whole[..whole.len() - 20]).unwrap();
        let mut log = Log::open(&path).unwrap();
        let mut expected = vec![entry(128).id(), entry(256).id()];
        expected.sort();
        assert_eq!(ids(&path), expected);
        log.add(&entry(64)).unwrap();
        log.finish().unwrap();
        expected.push(entry(64).id());
        expected.sort();
        assert_eq!(ids(&path), expected);
        // A file of one such beginning may be anything.
        std::fs::write(&path, &whole[..20]).unwrap();
        assert!(Log::open(&path).is_err());
        assert_eq!(std::fs::read_to_string(&path).unwrap(), whole[..20]);
    }

    #[test]
    fn two_runs_do_not_write_one_log() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("log.jsonl");
        let mut log = Log::open(&path).unwrap();
        log.add(&entry(128)).unwrap();
        let second = Log::open(&path).err().unwrap();
        assert!(second.contains("log.jsonl: another run writes this log"), "{second}");
        log.add(&entry(256)).unwrap();
        log.finish().unwrap();
        assert_eq!(ids(&path).len(), 2);
        Log::open(&path).unwrap();
    }

    #[test]
    fn a_log_that_its_reader_would_refuse_is_not_written() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("log.jsonl");
        let mut log = Log::open(&path).unwrap();
        log.bytes = MAX_FILE_BYTES - 10;
        assert!(log.add(&entry(128)).unwrap_err().contains("give --log another file"));
        assert_eq!(ids(&path), Vec::<String>::new());
    }
}
