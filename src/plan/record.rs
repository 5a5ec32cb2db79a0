//! Record: the result of tuning one problem on one device, as one line of JSON.
//!
//! Fields are named, and new ones may be added: unknown ones are ignored. A line is ignored as a
//! whole if it may mean something else here: a key of another version, an unknown field of the
//! problem, an unknown family. The check at lookup finds unknown knobs. A knob that is younger than
//! the record gets the value that the record was measured with. Lines are sorted and byte-stable:
//! no dates, no hosts.

use super::canonical;
use super::key;
use crate::config::{Config, Family};
use crate::device::{Arch, Device};
use crate::error::{Error, Status};
use crate::family;
use crate::files;
use crate::kernel;
use crate::problem::Problem;
use crate::tune::{Outcome, Timed};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::ops::RangeInclusive;
use std::path::Path;

/// Microseconds of a measurement: no launch is shorter, and no run longer than three hours.
pub const PLAUSIBLE_US: RangeInclusive<f64> = 0.01..=1e10;
/// Some hundred times what a GPU of 2025 does in 16 bits.
const MOST_FLOPS: f64 = 1e18;
const MOST_RATIO: f64 = 100.0;

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Record {
    /// `key::record_key(problem)`. It is written for people to grep, and compared on reading.
    pub key: String,
    /// The name as the driver spells it; for the CPU its model name.
    pub device: String,
    pub arch: Arch,
    pub sm_count: u32,
    /// The winner.
    pub config: Config,
    pub median_us: f64,
    /// The least time that the device could take over the measured one (`tune::utilisation`). None
    /// if that was not known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub utilisation: Option<f64>,
    /// Half the interquartile range over the median.
    pub spread: f64,
    /// Relative error against the reference.
    pub check_error: f64,
    pub runner_up: Option<Timed>,
    /// Time of the heuristic's config in the same run.
    pub default_us: Option<f64>,
    /// The shape that was measured.
    pub problem: Problem,
    pub driver_version: u32,
    pub nvrtc_version: (u32, u32),
    pub library_version: String,
    /// Only the heuristic's config and proven ones were tried. A run that may try all measures the
    /// problem again.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub proven_only: bool,
    /// The kernel families measured beside the winner's. The record says nothing about other
    /// families.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub also_tried: BTreeSet<Family>,
}

impl Record {
    pub fn new(problem: &Problem, device: &Device, outcome: Outcome) -> Record {
        Record {
            key: key::record_key(problem),
            device: device.name.clone(),
            arch: device.arch,
            sm_count: device.sm_count,
            median_us: rounded(outcome.winner.median_us),
            utilisation: outcome.winner.utilisation.map(rounded),
            config: outcome.winner.config,
            spread: rounded(outcome.spread),
            check_error: rounded(outcome.check_error),
            runner_up: outcome.runner_up.map(|t| Timed {
                median_us: rounded(t.median_us),
                utilisation: t.utilisation.map(rounded),
                ..t
            }),
            default_us: outcome.default_us.map(rounded),
            problem: *problem,
            driver_version: device.driver_version,
            nvrtc_version: if device.arch == Arch::Cpu { (0, 0) } else { kernel::nvrtc_version() },
            library_version: env!("CARGO_PKG_VERSION").to_owned(),
            proven_only: false,
            also_tried: BTreeSet::new(),
        }
    }

    /// Whether a config of the family was measured, so that the winner beat it.
    pub fn has_tried(&self, family: Family) -> bool {
        self.config.family == family || self.also_tried.contains(&family)
    }

    /// The device and the problem: one record is kept for each.
    pub fn id(&self) -> String {
        format!("{} | {}", self.device_key(), self.key)
    }

    pub fn device_key(&self) -> String {
        key::device_key_of(self.arch, &self.device, self.sm_count)
    }

    /// Reads one line; the error says why it is ignored.
    pub fn from_line(line: &str) -> Result<Record, String> {
        let mut record: Record = serde_json::from_str(line).map_err(|error| error.to_string())?;
        record.problem.validate().map_err(|error| error.message)?;
        if let Some(why) = record.problem.follows_no_record() {
            return Err(format!("its problem is {why}, and such a one follows no record"));
        }
        let (own, most) = (record.problem.layout.elements(), record.problem.access_elements());
        // Older libraries wrote layouts of more than 16 bytes. No call would find them now.
        if own > most {
            let dtype = record.problem.dtype.name();
            return Err(format!("its layout is vec{own}; of {dtype} no call has more than vec{most}"));
        }
        let key = key::record_key(&record.problem);
        if record.key != key {
            return Err(format!("its key is {:?} where this library writes {key:?}", record.key));
        }
        record.require_plausible()?;
        let pass = record.problem.pass;
        record.config = family::with_younger_knobs(record.config, pass);
        record.runner_up =
            record.runner_up.map(|timed| Timed { config: family::with_younger_knobs(timed.config, pass), ..timed });
        Ok(record)
    }

    /// An error if its figures cannot come from a measurement.
    fn require_plausible(&self) -> Result<(), String> {
        let within = |name: &str, value: f64, range: RangeInclusive<f64>| match range.contains(&value) {
            true => Ok(()),
            false => Err(format!("{name} is {value:e}; it must be from {} to {}", range.start(), range.end())),
        };
        let time = |name: &str, us: Option<f64>| us.map_or(Ok(()), |us| within(name, us, PLAUSIBLE_US));
        time("median_us", Some(self.median_us))?;
        time("default_us", self.default_us)?;
        time("the runner-up's median_us", self.runner_up.as_ref().map(|timed| timed.median_us))?;
        within("spread", self.spread, 0.0..=MOST_RATIO)?;
        within("check_error", self.check_error, 0.0..=MOST_RATIO)?;
        within("utilisation", self.utilisation.unwrap_or(0.0), 0.0..=MOST_RATIO)?;
        let rate = self.problem.flops() / self.median_us * 1e6;
        match rate <= MOST_FLOPS {
            true => Ok(()),
            false => Err(format!("median_us is {}, which is {rate:.1e} FLOP/s; no device does that", self.median_us)),
        }
    }

    /// Whether this library accepts its config on the device that it names, as far as the device is
    /// known `here`.
    pub fn check(&self, here: &Device) -> Result<(), String> {
        let device = self.device_as_known(here)?;
        family::supported(&self.problem, &device).map_err(|error| error.message)?;
        canonical::check(&self.problem, &self.config, &device)
    }

    /// The same for the config of its runner-up, if it has one.
    pub fn check_runner_up(&self, here: &Device) -> Result<(), String> {
        let device = self.device_as_known(here)?;
        self.runner_up.as_ref().map_or(Ok(()), |timed| canonical::check(&self.problem, &timed.config, &device))
    }

    /// Whether it goes before another record of its id. A record that did not try the family
    /// preferred now is used after the heuristic, so it is worth less, however fast.
    pub fn is_better_than(&self, other: &Record, here: &Device) -> bool {
        let Ok(device) = self.device_as_known(here) else { return false };
        let preferred = family::heuristic(&key::canonical(&self.problem), &device).family;
        let rank = |record: &Record| (!record.has_tried(preferred), record.median_us);
        rank(self) < rank(other)
    }

    fn device_as_known(&self, here: &Device) -> Result<Device, String> {
        match self.arch {
            _ if self.device_key() == key::device_key(here) => Ok(here.clone()),
            // The cache size of another host is not known and rules nothing out.
            Arch::Cpu => Ok(Device { arch: Arch::Cpu, sm_count: self.sm_count, l2_bytes: u64::MAX, ..here.clone() }),
            arch => Device::typical(arch).ok_or_else(|| format!("the kernels do not run on {arch}")),
        }
    }

    pub fn to_line(&self) -> Result<String, String> {
        serde_json::to_string(self).map_err(|error| error.to_string())
    }
}

/// The records of a text of lines; for each other line its number and the reason why it is ignored.
pub fn read_lines(text: &str) -> (Vec<Record>, Vec<(usize, String)>) {
    let (mut records, mut ignored) = (Vec::new(), Vec::new());
    for (number, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
        match Record::from_line(line) {
            Ok(record) => records.push(record),
            Err(reason) => ignored.push((number + 1, reason)),
        }
    }
    (records, ignored)
}

/// Sorted lines. The same records give the same bytes.
pub fn write_lines(mut records: Vec<Record>) -> Result<String, String> {
    records.sort_by_key(Record::id);
    records.dedup_by_key(|record| record.id());
    records.iter().try_fold(String::new(), |text, record| Ok(text + &record.to_line()? + "\n"))
}

/// Writes records to a file and returns their number. A reader finds the old lines or the new ones,
/// never half.
pub fn write_file(path: &Path, records: Vec<Record>) -> Result<usize, Error> {
    let text = write_lines(records).map_err(|reason| Error::new(Status::Internal, reason))?;
    files::publish(path, text.as_bytes()).map_err(|error| Error::from(error).context(path.display()))?;
    Ok(text.lines().count())
}

/// Four significant digits: more is noise, and four survive writing and reading unchanged.
fn rounded(value: f64) -> f64 {
    format!("{value:.3e}").parse().unwrap_or(value)
}
