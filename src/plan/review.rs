//! Review: whether a record from somebody else's machine may ship with the library.
//!
//! An import takes what this library understands and accepts. A review asks more: figures that the
//! device can reach, the versions that the kernels need, and no text beside the known fields, since
//! a shipped file is public. Each complaint is one sentence.

use super::record::Record;
use crate::config::{Config, Family};
use crate::device::{Arch, Device};
use crate::family;
use crate::problem::{BlockMask, Features, Varlen, Window};
use crate::tune::{self, Timed};
use serde_json::Value;

/// The record of a line, if it is one, and all complaints about it. `here` describes the CPU of
/// this host.
pub fn review(line: &str, here: &Device) -> (Option<Record>, Vec<String>) {
    let record = match Record::from_line(line) {
        Ok(record) => record,
        Err(reason) => return (None, vec![reason]),
    };
    let mut complaints = unknown_fields(line);
    complaints.extend(name_fault(&record.device).map(|fault| format!("device is {:?}; {fault}", record.device)));
    complaints.extend(version_fault(&record.library_version));
    complaints.extend(record.check(here).err());
    complaints.extend(record.check_runner_up(here).err().map(|reason| format!("the runner-up: {reason}")));
    complaints.extend(built_by_fault(&record));
    complaints.extend(rate_fault(&record));
    if record.arch != Arch::Cpu {
        complaints.extend(measurement_faults(&record));
    }
    (Some(record), complaints)
}

/// The highest clock of an architecture's chips, rounded up: 1.98 GHz for the H100 and H200, less
/// for the A100, B200 and Jetson; 3.2 GHz for GeForce boards that are overclocked. Processors reach
/// 6.2 GHz.
const fn highest_clock_hz(arch: Arch) -> f64 {
    match arch {
        Arch::Sm(8, 0 | 7) | Arch::Sm(9..=11, _) => 2.2e9,
        Arch::Sm(..) => 3.5e9,
        Arch::Cpu => 6.5e9,
    }
}

/// Two multiply-adds of 512 bits in fp32: the most of one core in a cycle.
const CPU_FLOPS_PER_CYCLE: u32 = 64;

/// The events that time a launch have a resolution of half a microsecond (CUDA driver API,
/// cuEventElapsedTime).
const LEAST_GPU_US: f64 = 0.5;
/// Half the interquartile range over the median. On a GPU without other work it stays below 0.05.
pub const MOST_SPREAD: f64 = 0.2;
/// A winner may be behind others by the noise between laps. In the shipped records it is by 2 %.
const MOST_BEHIND: f64 = 1.2;
/// The ceiling's clock is measured, with an error of a few percent.
const MOST_UTILISATION: f64 = 1.05;
/// The first CUDA version whose driver and NVRTC the library uses.
const OLDEST_CUDA: u32 = 12;
const MOST_SMS: u32 = 1024;

/// Operations per second that the matrix products need at the shortest time of the record.
fn rate_fault(record: &Record) -> Option<String> {
    let us = times(record).map(|(_, us)| us).fold(f64::INFINITY, f64::min);
    let rate = record.problem.least_flops()? / us * 1e6;
    let per_cycle = match record.arch {
        Arch::Cpu => CPU_FLOPS_PER_CYCLE,
        arch => Device::typical(arch)?.tensor_flops_per_cycle(),
    };
    let most = f64::from(record.sm_count) * f64::from(per_cycle) * highest_clock_hz(record.arch);
    (rate > most)
        .then(|| format!("{us} us are {:.1} TFLOP/s; {} does at most {:.1}", rate * 1e-12, record.device, most * 1e-12))
}

/// The measured times with their names.
fn times(record: &Record) -> impl Iterator<Item = (&'static str, f64)> {
    let runner_up = record.runner_up.as_ref().map(|timed| ("the runner-up's median_us", timed.median_us));
    let default = record.default_us.map(|us| ("default_us", us));
    [("median_us", record.median_us)].into_iter().chain(runner_up).chain(default)
}

/// A tuning run on a GPU of its own gives such figures. Those of a CPU depend on its other work.
fn measurement_faults(record: &Record) -> Vec<String> {
    let mut faults = Vec::new();
    for (name, us) in times(record) {
        if us < LEAST_GPU_US {
            faults.push(format!("{name} is {us}; a launch on a GPU takes at least {LEAST_GPU_US} us"));
        } else if record.median_us > MOST_BEHIND * us {
            faults.push(format!("median_us is {}, and {name} is {us}; the winner is the fastest", record.median_us));
        }
    }
    if record.spread > MOST_SPREAD {
        faults.push(format!("spread is {}; above {MOST_SPREAD} the GPU had other work to do", record.spread));
    }
    if let Some((reached, counted)) = record.utilisation.zip(counted_in_utilisation(record))
        && reached * counted > MOST_UTILISATION
    {
        faults.push(format!("utilisation is {reached}; a device does not exceed its ceiling"));
    }
    let bound = tune::error_bound(record.problem.dtype);
    if record.check_error > bound {
        let dtype = record.problem.dtype.name();
        faults.push(format!(
            "check_error is {}; in {dtype} a kernel passes the check up to {bound:.1e}",
            record.check_error
        ));
    }
    faults
}

/// The utilisation counts work by convention (`Problem::flops`). This is the share of it that no
/// kernel leaves out; None if that is not known.
fn counted_in_utilisation(record: &Record) -> Option<f64> {
    let problem = &record.problem;
    match family::is_bound_by_keys(problem) {
        true => problem.features.varlen.is_none().then_some(1.0),
        false => Some(problem.least_flops()? / problem.flops()),
    }
}

/// Versions and processors that no run has.
fn built_by_fault(record: &Record) -> Option<String> {
    let (driver, (major, minor)) = (record.driver_version, record.nvrtc_version);
    let (driver_major, driver_minor) = (driver / 1000, driver % 1000 / 10);
    match record.arch {
        _ if !(1..=MOST_SMS).contains(&record.sm_count) => {
            Some(format!("sm_count is {}; it must be from 1 to {MOST_SMS}", record.sm_count))
        }
        Arch::Cpu if (driver, major, minor) != (0, 0, 0) => {
            Some("driver_version and nvrtc_version are 0 in records of a CPU".to_owned())
        }
        Arch::Cpu => None,
        Arch::Sm(..) if driver_major < OLDEST_CUDA || driver % 10 != 0 || driver > 99_990 => {
            Some(format!("driver_version is {driver}; it is 1000 * major + 10 * minor, of CUDA 12.0 or later"))
        }
        // A pack's kernels need no NVRTC.
        Arch::Sm(..) if (major, minor) == (0, 0) => None,
        Arch::Sm(..) if major < OLDEST_CUDA || major > driver_major => Some(format!(
            "nvrtc_version is {major}.{minor}; it must be from 12.0 to the major version of the driver, {driver_major}.{driver_minor}"
        )),
        Arch::Sm(..) => None,
    }
}

const MOST_NAME_CHARS: usize = 64;
/// The longest words of names have 14, as in A100-SXM4-80GB. Serial numbers and UUIDs have more.
const MOST_WORD_CHARS: usize = 24;

/// Why a name is not that of a GPU's or CPU's model, but may tell whose it is.
fn name_fault(name: &str) -> Option<String> {
    let is_of_names = |c: char| c.is_ascii_alphanumeric() || " ()+-.,@_".contains(c);
    if let Some(other) = name.chars().find(|c| !is_of_names(*c)) {
        return Some(format!("no model's name has {other:?}"));
    }
    if name.trim().is_empty() || name.len() > MOST_NAME_CHARS {
        return Some(format!("a model's name has 1 to {MOST_NAME_CHARS} characters"));
    }
    let is_private = |word: &&str| {
        let labels: Vec<&str> = word.split('.').collect();
        let is_number = |label: &&str| !label.is_empty() && label.chars().all(|c| c.is_ascii_digit());
        let last = labels.last().copied().unwrap_or_default();
        let ends_in_letters = last.len() >= 2 && last.chars().all(|c| c.is_ascii_alphabetic());
        let is_host = labels.len() >= 2 && ends_in_letters && !labels[0].is_empty();
        let is_address = labels.len() == 4 && labels.iter().all(is_number);
        is_host || is_address || word.len() > MOST_WORD_CHARS || (word.contains('@') && *word != "@")
    };
    name.split(' ').find(is_private).map(|word| format!("{word:?} looks like the name of a host, a user or a part"))
}

/// A library's version is `1.2.3` or `1.2.3-rc1`.
fn version_fault(version: &str) -> Option<String> {
    let (numbers, suffix) = version.split_once('-').unwrap_or((version, "rc1"));
    let is_number = |part: &str| (1..=4).contains(&part.len()) && part.chars().all(|c| c.is_ascii_digit());
    let is_suffix = (1..=12).contains(&suffix.len()) && suffix.chars().all(|c| c.is_ascii_alphanumeric() || c == '.');
    let is_version = numbers.split('.').count() == 3 && numbers.split('.').all(is_number) && is_suffix;
    (!is_version).then(|| format!("library_version is {version:?}; it must be a version such as 0.1.0"))
}

/// Fields that a reader ignores and that would be published all the same. Reading refuses unknown
/// features, and the check of configs unknown knobs.
fn unknown_fields(line: &str) -> Vec<String> {
    let (Ok(given), Some(known)) = (serde_json::from_str::<Value>(line), with_all_fields()) else { return Vec::new() };
    let mut unknown = Vec::new();
    for part in ["", "/problem", "/runner_up"] {
        let fields = |record: &Value| record.pointer(part).and_then(Value::as_object).cloned().unwrap_or_default();
        let known = fields(&known);
        let names = fields(&given).into_iter().map(|(name, _)| name).filter(|name| !known.contains_key(name));
        unknown.extend(names.map(|name| format!("{}/{name}", part.trim_start_matches('/'))));
    }
    let sentence = |field: &String| format!("{:?} is no field of a record", field.trim_start_matches('/'));
    unknown.iter().map(sentence).collect()
}

/// A record in which each field is written.
fn with_all_fields() -> Option<Value> {
    use crate::problem::{Dtype, Pass, Problem};
    let config = Config::new(Family::Sm80, []);
    let problem = Problem {
        deterministic: true,
        batch_invariant: true,
        features: Features {
            window: Window { left: Some(0), right: Some(0), top_left: true },
            varlen: Some(Varlen { total_q: Some(0), total_k: Some(0), padded_q: true }),
            block_mask: Some(BlockMask { block_q: 0, block_k: 0 }),
            ..Features::NONE
        },
        ..Problem::dense(Pass::Forward, Dtype::Bf16, 1, 1, 1, 8)
    };
    let record = Record {
        key: String::new(),
        device: String::new(),
        arch: Arch::Cpu,
        sm_count: 1,
        config: config.clone(),
        median_us: 1.0,
        utilisation: Some(1.0),
        spread: 0.0,
        check_error: 0.0,
        runner_up: Some(Timed { config, median_us: 1.0, utilisation: Some(1.0) }),
        default_us: Some(1.0),
        problem,
        driver_version: 0,
        nvrtc_version: (0, 0),
        library_version: String::new(),
        proven_only: true,
        also_tried: [Family::Cpu].into(),
    };
    serde_json::to_value(record).ok()
}
