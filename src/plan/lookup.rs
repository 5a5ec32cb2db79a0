//! Lookup: which configs to use for a problem, best first, from what is known in memory.
//!
//! This process's winners, this machine's records, what ships for this GPU, what ships for the nearest GPU of the same
//! architecture, and the heuristic, which always works. Within each, the nearest shape of the same class, whose config keeps
//! what it was tuned to but for what follows from the shape alone (`family::carried_over`); what this GPU has of the
//! very shape comes before all others. Every hit is checked against the constraints of this device; what fails is a miss.
//! A record from before the kernel family existed that is preferred now says nothing against it and comes after the heuristic. A deterministic or batch-invariant
//! problem has one choice, whatever is known: its result follows no measurement. Nothing here builds, reads files or locks.

use super::key::{self, Class};
use super::record::Record;
use crate::config::Config;
use crate::device::Device;
use crate::family;
use crate::problem::Problem;
use std::sync::Arc;

/// Where a plan's config came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Source {
    /// Set by the caller for exactly this problem.
    Pinned,
    /// Tuned in this process.
    Process,
    /// A record of this machine.
    Machine,
    /// A record that ships for this GPU.
    Shipped,
    /// A record of another GPU of the same architecture.
    NearestGpu,
    /// No record of the problem's class.
    Heuristic,
}

impl Source {
    pub const fn name(self) -> &'static str {
        match self {
            Source::Pinned => "pinned",
            Source::Process => "process",
            Source::Machine => "machine",
            Source::Shipped => "shipped",
            Source::NearestGpu => "nearest-gpu",
            Source::Heuristic => "heuristic",
        }
    }
}

#[derive(Clone, Debug)]
pub struct Choice {
    pub config: Config,
    pub source: Source,
    /// One sentence for a person.
    pub reason: String,
    pub record: Option<Arc<Record>>,
    /// Whether the record is of this very key and this very device.
    pub is_exact: bool,
}

/// The records that a lookup sees.
#[derive(Clone, Debug, Default)]
pub struct Known {
    pub process: Vec<Arc<Record>>,
    pub machine: Vec<Arc<Record>>,
    /// Of this device's architecture.
    pub shipped: Vec<Arc<Record>>,
}

/// Within this distance (a factor of four in one length, but for the keys' of few queries) a record comes before what a
/// later source has nearer; beyond it a record is used only where no source has one within.
const NEAR: f64 = 2.0;

/// All choices for a problem, no config twice: records, the heuristic, and what is left should that not build. One alone
/// where it follows no record: another would give other bits.
pub fn choices(known: &Known, problem: &Problem, device: &Device) -> Vec<Choice> {
    let heuristics = family::heuristics(problem, device);
    let (preferred, others) = heuristics.split_first().expect("a family serves every problem");
    let passed_over = |mut choices: Vec<Choice>| {
        if let Some(why) = family::passed_over(problem, device) {
            choices.iter_mut().for_each(|choice| choice.reason += &format!("; {why}"));
        }
        choices
    };
    if let Some(why) = problem.follows_no_record() {
        return passed_over(vec![of_heuristic(preferred, &format!("{why}, whatever the records say"))]);
    }
    let has_tried = |record: &Record| record.has_tried(preferred.family);
    let mut choices = of_records(known, problem, device, &|record| has_tried(record));
    let before = of_records(known, problem, device, &|record| !has_tried(record));
    let why = match choices.is_empty() && !before.is_empty() {
        true => format!("the records of {} did not try {}", Class::of(problem), preferred.family.name()),
        false => format!("no record of {}", Class::of(problem)),
    };
    choices.push(of_heuristic(preferred, &why));
    choices.extend(before);
    choices.extend(others.iter().map(|config| of_heuristic(config, &why)));
    let mut seen = Vec::new();
    choices.retain(|choice| {
        let is_new = !seen.contains(&choice.config);
        seen.push(choice.config.clone());
        is_new
    });
    passed_over(choices)
}

/// What the records say that pass, each tier's nearest shape.
fn of_records(known: &Known, problem: &Problem, device: &Device, passes: &dyn Fn(&Record) -> bool) -> Vec<Choice> {
    let device_key = key::device_key(device);
    let fits = |record: &&Arc<Record>| {
        Class::of(&record.problem) == Class::of(problem)
            && passes(record)
            && family::check(problem, &config_of(record, problem, device), device).is_ok()
    };
    let here = |records: &'_ [Arc<Record>]| -> Vec<Arc<Record>> {
        records.iter().filter(|record| record.device_key() == device_key).filter(fits).cloned().collect()
    };
    let elsewhere = known
        .machine
        .iter()
        .chain(&known.shipped)
        .filter(|record| record.arch == device.arch && record.device_key() != device_key);
    let tiers = [
        (Source::Process, here(&known.process)),
        (Source::Machine, here(&known.machine)),
        (Source::Shipped, here(&known.shipped)),
        (Source::NearestGpu, of_nearest_gpu(elsewhere.filter(fits).cloned().collect(), device)),
    ];
    let nearest: Vec<(f64, Source, Arc<Record>)> = tiers
        .into_iter()
        .filter_map(|(source, records)| {
            nearest_shape(records, problem).map(|(distance, record)| (distance, source, record))
        })
        .collect();
    let (near, far): (Vec<_>, Vec<_>) = nearest.into_iter().partition(|(distance, ..)| *distance <= NEAR);
    let mut choices: Vec<Choice> =
        near.into_iter().chain(far).map(|(_, source, record)| of_record(source, record, problem, device)).collect();
    // Another shape's record, though of this machine, is only a guess beside one of this very shape.
    choices.sort_by_key(|choice| !choice.is_exact);
    choices
}

fn of_heuristic(config: &Config, why: &str) -> Choice {
    Choice {
        config: config.clone(),
        source: Source::Heuristic,
        reason: format!("{why}: the heuristic's config of {}", config.family.name()),
        record: None,
        is_exact: false,
    }
}

/// The configs that some record of this architecture names for the same pass: they compiled, ended and agreed there.
pub fn proven(known: &Known, problem: &Problem, device: &Device) -> Vec<Config> {
    let all = known.process.iter().chain(&known.machine).chain(&known.shipped);
    let mut records: Vec<&Arc<Record>> = all
        .filter(|record| record.arch == device.arch && record.problem.pass == problem.pass)
        .filter(|record| family::check(problem, &record.config, device).is_ok())
        .collect();
    let other_class = |record: &Record| Class::of(&record.problem) != Class::of(problem);
    records.sort_by(|a, b| {
        let distance = |record: &Record| key::distance(&record.problem, problem);
        other_class(a).cmp(&other_class(b)).then(distance(a).total_cmp(&distance(b))).then_with(|| a.key.cmp(&b.key))
    });
    let mut configs = Vec::new();
    for record in records {
        if !configs.contains(&record.config) {
            configs.push(record.config.clone());
        }
    }
    configs
}

/// The config that a record gives a problem: its own, or of a problem nearby what that makes of it.
fn config_of(record: &Record, problem: &Problem, device: &Device) -> Config {
    match record.key == key::record_key(problem) {
        true => record.config.clone(),
        false => family::carried_over(&record.config, &record.problem, problem, device),
    }
}

fn of_record(source: Source, record: Arc<Record>, problem: &Problem, device: &Device) -> Choice {
    let is_exact = record.key == key::record_key(problem);
    let whose = match source {
        Source::Process => "tuned in this process".to_owned(),
        Source::NearestGpu => format!("record of {}, the nearest GPU", record.device),
        Source::Shipped => "shipped record of this GPU".to_owned(),
        _ => "record of this machine".to_owned(),
    };
    let shape = if is_exact { String::new() } else { format!(", the nearest shape: {}", record.key) };
    let against = match record.default_us {
        Some(default_us) if default_us > record.median_us => format!(" where the default took {default_us:.1}"),
        _ => String::new(),
    };
    let config = config_of(&record, problem, device);
    let there = if is_exact { "" } else { " there" };
    let of_its_own = record.config.knobs.iter().filter(|(knob, value)| config.get(knob) != **value);
    let with = of_its_own.fold(String::new(), |text, (knob, value)| format!("{text} with {knob}={value}"));
    Choice {
        config,
        source,
        reason: format!("{whose}{shape}; {:.1} us{there}{with}{against}", record.median_us),
        is_exact: is_exact && source != Source::NearestGpu,
        record: Some(record),
    }
}

/// Ties go to the first key, so that the choice does not depend on the order of records.
fn nearest_shape(records: Vec<Arc<Record>>, problem: &Problem) -> Option<(f64, Arc<Record>)> {
    let exact = key::record_key(problem);
    let distance = |record: &Record| if record.key == exact { 0.0 } else { key::distance(&record.problem, problem) };
    records
        .into_iter()
        .map(|record| (distance(&record), record))
        .min_by(|a, b| a.0.total_cmp(&b.0).then_with(|| a.1.key.cmp(&b.1.key)))
}

/// The records of the GPU whose number of processors is nearest.
fn of_nearest_gpu(mut records: Vec<Arc<Record>>, device: &Device) -> Vec<Arc<Record>> {
    let apart = |record: &Record| (f64::from(record.sm_count.max(1)) / f64::from(device.sm_count.max(1))).ln().abs();
    let nearest = records
        .iter()
        .min_by(|a, b| apart(a).total_cmp(&apart(b)).then_with(|| a.device_key().cmp(&b.device_key())))
        .map(|record| record.device_key());
    records.retain(|record| Some(record.device_key()) == nearest);
    records
}
