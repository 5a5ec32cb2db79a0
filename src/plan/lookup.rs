//! Lookup: the configs to use for a problem, best first, from the records in memory.
//!
//! The sources: this process's winners, this machine's records, those of the pack, records that
//! ship for this GPU, records of the nearest GPU of the architecture, and the heuristic, which
//! always works. A source answers with its nearest shape of the class, and the nearest answer comes
//! first. The order of the sources decides between answers that are equally near. Records of this
//! device and of exactly this shape come before all others, and records of another GPU after this
//! one's that are as near.
//!
//! - Where no record has exactly this shape, a model of tiles and waves predicts the time of the
//!   configs that the class's records name, of the heuristic's and of its alternatives. The one
//!   with the least time comes first if it gains enough over the nearest record's.
//! - A record of another shape keeps its config, except the knobs that follow from the shape
//!   (`family::carried_over`).
//! - A record whose config breaks a constraint of this device is a miss.
//! - A record may be older than the kernel family that is preferred now. It did not measure that
//!   family, so it comes after the heuristic.
//! - A deterministic problem has one choice, whatever the records say. A batch-invariant one has
//!   the configs that give the same bits: the model says which comes first.
//!
//! Nothing here builds, reads files or locks.

use super::canonical::{Canonical, canonical};
use super::key::{self, Class};
use super::predicted::{Fitting, Model};
use super::record::Record;
use crate::config::Config;
use crate::device::Device;
use crate::family;
use crate::problem::Problem;
use crate::word_hash::BuildWordHasher;
use std::collections::HashSet;
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
    /// A record of the pack, or a config of the pack that serves in place of one to be compiled.
    Pack,
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
            Source::Pack => "pack",
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
    /// Whether the record has exactly this key and this device.
    pub is_exact: bool,
}

/// The records that a lookup sees.
#[derive(Clone, Debug, Default)]
pub struct Known {
    pub process: Vec<Arc<Record>>,
    pub machine: Vec<Arc<Record>>,
    /// All of this device's architecture, as those that ship.
    pub pack: Vec<Arc<Record>>,
    pub shipped: Vec<Arc<Record>>,
}

/// A record of another GPU within this distance goes before this GPU's farther records. A factor of
/// four in one length is this far, except in the keys of few queries.
const NEAR: f64 = 2.0;

/// The share of the time that a predicted config must gain over the config it replaces.
pub const GAIN: f64 = 0.02;

/// All choices for a problem, no config twice: a predicted config, records, the heuristic, then
/// configs for the case that neither builds. A problem that follows no record has only those that
/// give the same bits.
pub fn choices(known: &Known, problem: &Canonical, device: &Device) -> Vec<Choice> {
    let heuristics = family::heuristics(problem, device);
    let (preferred, others) = heuristics.split_first().expect("a family serves every problem");
    let with_passed_over = |mut choices: Vec<Choice>| {
        if let Some(why) = family::passed_over(problem, device) {
            choices.iter_mut().for_each(|choice| choice.reason += &format!("; {why}"));
        }
        choices
    };
    if let Some(why) = problem.follows_no_record() {
        let mut configs = family::of_same_bits(problem, device).unwrap_or_default();
        configs.retain(|config| config != preferred && family::check(problem, config, device).is_ok());
        let first = of_least_time(preferred, &configs, problem, device);
        configs.insert(0, preferred.clone());
        configs[..=first.map_or(0, |first| first + 1)].rotate_right(1);
        let reason = format!("{why}, whatever the records say");
        return with_passed_over(configs.iter().map(|config| from_heuristic(config, &reason)).collect());
    }
    let has_tried = |record: &Record| record.has_tried(preferred.family);
    let tried = of_the_class(known, problem, device, &|record| has_tried(record));
    let mut choices = from_records(tried.clone(), problem);
    let untried = from_records(of_the_class(known, problem, device, &|record| !has_tried(record)), problem);
    let why = match choices.is_empty() && !untried.is_empty() {
        true => format!("the records of {} did not try {}", Class::of(problem), preferred.family.name()),
        false => format!("no record of {}", Class::of(problem)),
    };
    choices.push(from_heuristic(preferred, &why));
    choices.splice(0..0, predicted(tried, problem, device, &choices[0], preferred));
    choices.extend(untried);
    choices.extend(others.iter().map(|config| from_heuristic(config, &why)));
    let mut seen = Vec::new();
    choices.retain(|choice| {
        let is_new = !seen.contains(&choice.config);
        seen.push(choice.config.clone());
        is_new
    });
    with_passed_over(choices)
}

/// The place in `others` of the config with the least time by the model without records, if that is
/// well below the time of `first`.
fn of_least_time(first: &Config, others: &[Config], problem: &Problem, device: &Device) -> Option<usize> {
    let model = Model::of(&[], problem, device);
    let first_us = model.us(first)?;
    let timed = others.iter().enumerate().filter_map(|(place, config)| Some((model.us(config)?, place)));
    let (us, place) = timed.min_by(|a, b| a.0.total_cmp(&b.0))?;
    (us < (1.0 - GAIN) * first_us).then_some(place)
}

/// The choices of these records: the nearest shape of each source.
fn from_records(records: BySource, problem: &Canonical) -> Vec<Choice> {
    let mut nearest: Vec<(f64, Choice)> = records
        .into_iter()
        .filter_map(|(source, records)| {
            let (distance, fitting) = nearest_shape(records, problem)?;
            Some((distance, from_record(source, fitting, problem)))
        })
        .collect();
    // A record of another shape is a guess, and so is one of another GPU. The sort keeps the order
    // of sources with equally near records.
    nearest.sort_by(|(a, first), (b, second)| {
        let rank =
            |distance: f64, choice: &Choice| (!choice.is_exact, distance > NEAR, choice.source == Source::NearestGpu);
        rank(*a, first).cmp(&rank(*b, second)).then(a.total_cmp(b))
    });
    nearest.into_iter().map(|(_, choice)| choice).collect()
}

type BySource = [(Source, Vec<Fitting>); 5];

/// The records of the problem's class whose configs fit it, by source.
fn of_the_class(known: &Known, problem: &Canonical, device: &Device, passes: &dyn Fn(&Record) -> bool) -> BySource {
    let (class, key, device_key) = (Class::of(problem), key::record_key(problem), key::device_key(device));
    let is_of_class =
        |record: &&Arc<Record>| record.arch == device.arch && Class::of(&record.problem) == class && passes(record);
    let is_here = |record: &Record| record.device_key() == device_key;
    let fitting = |record: &Arc<Record>| {
        let config = config_of(record, &key, &device_key, problem, device);
        family::check(problem, &config, device).is_ok().then(|| Fitting { record: Arc::clone(record), config })
    };
    let here = |records: &[Arc<Record>]| -> Vec<Fitting> {
        records.iter().filter(is_of_class).filter(|record| is_here(record)).filter_map(fitting).collect()
    };
    let all = known.machine.iter().chain(&known.pack).chain(&known.shipped);
    let elsewhere = all.filter(is_of_class).filter(|record| !is_here(record)).filter_map(fitting);
    [
        (Source::Process, here(&known.process)),
        (Source::Machine, here(&known.machine)),
        (Source::Pack, here(&known.pack)),
        (Source::Shipped, here(&known.shipped)),
        (Source::NearestGpu, only_nearest_gpu(elsewhere.collect(), device)),
    ]
}

/// Those of the records of a class that correct predictions, nearest first: this device's and, for
/// shapes that it has none of, near ones of the nearest GPUs; or all of the nearest GPUs where it
/// has none at all.
fn calibrating(records: BySource, problem: &Canonical) -> Vec<Fitting> {
    let [process, machine, pack, shipped, nearest_gpus] = records.map(|(_, records)| records);
    let own: Vec<_> = process.into_iter().chain(machine).chain(pack).chain(shipped).collect();
    let has_own = !own.is_empty();
    let with_distance = |fitting: Fitting| (key::distance(&fitting.record.problem, problem), fitting);
    let nearest_gpus =
        nearest_gpus.into_iter().map(with_distance).filter(|(distance, _)| !has_own || *distance <= NEAR);
    let mut known: Vec<(f64, Fitting)> = Vec::new();
    // The earlier source knows better.
    for (distance, fitting) in own.into_iter().map(with_distance).chain(nearest_gpus) {
        if known.iter().all(|(_, other)| other.record.key != fitting.record.key) {
            known.push((distance, fitting));
        }
    }
    known.sort_by(|a, b| a.0.total_cmp(&b.0).then_with(|| a.1.record.key.cmp(&b.1.record.key)));
    known.into_iter().map(|(_, fitting)| fitting).collect()
}

/// The config with the least predicted time, if that is well below the time of the first choice.
/// None where the first choice was measured on this very shape, and where no family has a model.
fn predicted(
    tried: BySource,
    problem: &Canonical,
    device: &Device,
    first: &Choice,
    heuristic: &Config,
) -> Option<Choice> {
    let was_measured = |record: &Arc<Record>| first.is_exact && canonical(&record.problem) == *problem;
    if first.record.as_ref().is_some_and(was_measured) {
        return None;
    }
    family::work(problem, &first.config, device)?;
    let records = calibrating(tried, problem);
    let model = Model::of(&records, problem, device);
    let first_us = model.us(&first.config)?;
    // Among equal times the first is taken: a measured config before one that was not.
    let configs = among(&records, problem, device, heuristic);
    let (us, config) = model.fastest(&configs).map(|(us, config)| (us, config.clone()))?;
    let is_usable = us < (1.0 - GAIN) * first_us && family::check(problem, &config, device).is_ok();
    is_usable.then(|| {
        let calibrated = match &first.record {
            Some(record) => format!("the record that calibrates it: {}, {:.1} us", record.key, record.median_us),
            None => format!("the heuristic's config, without a record of {}", Class::of(problem)),
        };
        let reason = format!("the model chose it: {us:.1} us predicted, and {first_us:.1} for {calibrated}");
        Choice { config, reason, ..first.clone() }
    })
}

/// The configs among which the model chooses: those that the class's records give, nearest first,
/// the heuristic's, and the family's alternatives.
fn among(records: &[Fitting], problem: &Canonical, device: &Device, heuristic: &Config) -> Vec<Config> {
    let of_records = records.iter().map(|fitting| fitting.config.clone());
    let mut configs: Vec<Config> =
        of_records.chain([heuristic.clone()]).chain(family::alternatives(problem, device)).collect();
    let mut seen = HashSet::with_capacity_and_hasher(configs.len(), BuildWordHasher::default());
    configs.retain(|config| seen.insert(config.clone()));
    configs
}

/// The configs among which a lookup chooses by the model, with the microseconds that it predicts,
/// the least first. Empty where no family has a model.
pub fn candidates(known: &Known, problem: &Canonical, device: &Device) -> Vec<(f64, Config)> {
    let heuristic = family::heuristic(problem, device);
    let records = tried_and_calibrating(known, problem, device);
    let model = Model::of(&records, problem, device);
    let configs = among(&records, problem, device, &heuristic).into_iter();
    let fits = |config: &Config| family::check(problem, config, device).is_ok();
    let mut timed: Vec<_> = configs.filter(fits).filter_map(|config| Some((model.us(&config)?, config))).collect();
    timed.sort_by(|a, b| a.0.total_cmp(&b.0));
    timed
}

/// The time that a lookup predicts for a config, in microseconds; None where no family has a model
/// of it. Without records of the class it is no measured time.
pub fn predicted_us(known: &Known, problem: &Canonical, config: &Config, device: &Device) -> Option<f64> {
    predicted_times(known, problem, &[config], device).swap_remove(0)
}

/// `predicted_us` of each of these configs.
pub fn predicted_times(known: &Known, problem: &Canonical, configs: &[&Config], device: &Device) -> Vec<Option<f64>> {
    let records = tried_and_calibrating(known, problem, device);
    let model = Model::of(&records, problem, device);
    configs.iter().map(|config| model.us(config)).collect()
}

/// The records that correct predictions for a problem: those that tried its preferred family.
fn tried_and_calibrating(known: &Known, problem: &Canonical, device: &Device) -> Vec<Fitting> {
    let preferred = family::heuristic(problem, device).family;
    calibrating(of_the_class(known, problem, device, &|record| record.has_tried(preferred)), problem)
}

/// What each of these configs is expected to take over the time of `first`: by the model, or by the
/// family's cost where there is no model. None where the problem refuses the config, and for
/// another family than that of `first`, whose time cannot be compared.
pub fn slowdowns(
    known: &Known,
    problem: &Canonical,
    first: &Config,
    configs: &[&Config],
    device: &Device,
) -> Vec<Option<f64>> {
    let records = family::work(problem, first, device).map(|_| tried_and_calibrating(known, problem, device));
    let model = records.as_ref().map(|records| Model::of(records, problem, device));
    let us = |config: &Config| model.as_ref()?.us(config);
    let first_us = us(first);
    let first_cost = family::cost(problem, first, device);
    let slowdown = |config: &&Config| {
        if *config == first {
            return Some(1.0);
        }
        if config.family != first.family {
            return None;
        }
        let cost = family::cost(problem, config, device)?;
        match (us(config), first_us) {
            (Some(us), Some(first_us)) => Some(us / first_us),
            _ => Some(match first_cost? {
                first_cost if first_cost >= 1.0 => cost / first_cost,
                // Such a cost is a sum of shares of the time.
                first_cost => 1.0 + cost - first_cost,
            }),
        }
    };
    configs.iter().map(slowdown).collect()
}

/// What a prepared config may take over the time of a shape's first choice, as it is expected.
pub const TOLERANCE: f64 = 0.05;

/// Expected times that differ by less are equal: the terms of splits in a family's cost are that
/// coarse.
const EQUAL: f64 = 0.02;

/// Which of these configs serves a problem in place of `first`: the one with the least expected
/// time and, among equal ones, the one whose splits are nearest to those of `first`. Where none
/// compares, one of the family that is preferred most. None if none fits.
pub fn substitute(
    known: &Known,
    problem: &Canonical,
    first: &Config,
    configs: &[&Config],
    device: &Device,
) -> Option<usize> {
    let slowdowns = slowdowns(known, problem, first, configs, device);
    let least = slowdowns.iter().flatten().copied().fold(f64::INFINITY, f64::min);
    let splits = |config: &Config| f64::from(config.get("num_splits").unwrap_or(1)).ln();
    let from_first = |index: usize| (splits(configs[index]) - splits(first)).abs();
    let compared = slowdowns.iter().enumerate().filter_map(|(index, slowdown)| Some((index, (*slowdown)?)));
    // Equal ones keep the promise of a range, unless none does.
    let limit = ((1.0 + EQUAL) * least).min(1.0 + TOLERANCE).max(least);
    let equal = compared.filter(|(_, slowdown)| *slowdown <= limit);
    let chosen = equal.min_by(|(i, a), (j, b)| from_first(*i).total_cmp(&from_first(*j)).then(a.total_cmp(b)));
    chosen.map(|(index, _)| index).or_else(|| {
        let families = family::families(problem, device);
        let rank = |config: &Config| {
            let cost = family::cost(problem, config, device)?;
            Some((families.iter().position(|family| *family == config.family)?, cost))
        };
        let ranked = configs.iter().enumerate().filter_map(|(index, config)| Some((rank(config)?, index)));
        ranked.min_by(|((a, x), _), ((b, y), _)| a.cmp(b).then(x.total_cmp(y))).map(|(_, index)| index)
    })
}

fn from_heuristic(config: &Config, why: &str) -> Choice {
    Choice {
        config: config.clone(),
        source: Source::Heuristic,
        reason: format!("{why}: the heuristic's config of {}", config.family.name()),
        record: None,
        is_exact: false,
    }
}

/// The configs that some record of this architecture names for the same pass, nearest class first.
/// They compiled, ended and agreed with the reference there.
pub fn proven(known: &Known, problem: &Canonical, device: &Device) -> Vec<Config> {
    let all = known.process.iter().chain(&known.machine).chain(&known.pack).chain(&known.shipped);
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

/// The config that a record gives a problem of this key: its own, or the one adapted to this GPU or
/// carried over to another shape.
fn config_of(record: &Record, key: &str, device_key: &str, problem: &Canonical, device: &Device) -> Config {
    // Problems of one key may differ in what a config needs: 128 keys are one tile, 150 are two.
    let fits = || family::check(problem, &record.config, device).is_ok();
    match record.key == key && fits() {
        true if record.device_key() == device_key => record.config.clone(),
        true => family::on_another_gpu(&record.config, problem, device),
        false => family::carried_over(&record.config, &record.problem, problem, device),
    }
}

fn from_record(source: Source, Fitting { record, config }: Fitting, problem: &Canonical) -> Choice {
    let is_exact = record.key == key::record_key(problem);
    let origin = match source {
        Source::Process => "tuned in this process".to_owned(),
        Source::NearestGpu => format!("record of {}, the nearest GPU", record.device),
        Source::Pack => "record of the pack".to_owned(),
        Source::Shipped => "shipped record of this GPU".to_owned(),
        _ => "record of this machine".to_owned(),
    };
    let shape = if is_exact { String::new() } else { format!(", the nearest shape: {}", record.key) };
    let versus_default = match record.default_us {
        Some(default_us) if default_us > record.median_us => format!(" where the default took {default_us:.1}"),
        _ => String::new(),
    };
    let measured_there = if is_exact { "" } else { " there" };
    let changed = record.config.knobs.iter().filter(|(knob, value)| config.get(knob) != Some(*value));
    let with = changed.fold(String::new(), |text, (knob, value)| format!("{text} with {knob}={value}"));
    Choice {
        config,
        source,
        reason: format!("{origin}{shape}; {:.1} us{measured_there}{with}{versus_default}", record.median_us),
        is_exact: is_exact && source != Source::NearestGpu,
        record: Some(record),
    }
}

/// The record with the nearest shape, and before all the one of exactly this shape: others of as
/// many batch entries x heads are at distance 0 too. Ties go to the first key, so that the order of
/// records does not matter.
fn nearest_shape(records: Vec<Fitting>, problem: &Canonical) -> Option<(f64, Fitting)> {
    let exact = key::record_key(problem);
    let is_other = |record: &Record| record.key != exact;
    let distance = |record: &Record| if is_other(record) { key::distance(&record.problem, problem) } else { 0.0 };
    let order = |a: &(f64, Fitting), b: &(f64, Fitting)| {
        let (first, second) = (&a.1.record, &b.1.record);
        let exact_first = is_other(first).cmp(&is_other(second));
        exact_first.then(a.0.total_cmp(&b.0)).then_with(|| first.key.cmp(&second.key))
    };
    records.into_iter().map(|fitting| (distance(&fitting.record), fitting)).min_by(order)
}

/// Keeps the records of the GPUs whose number of SMs is nearest, one of each key: the first by the
/// GPU's name.
fn only_nearest_gpu(mut records: Vec<Fitting>, device: &Device) -> Vec<Fitting> {
    let apart =
        |fitting: &Fitting| (f64::from(fitting.record.sm_count.max(1)) / f64::from(device.sm_count.max(1))).ln().abs();
    let nearest = records.iter().map(apart).min_by(f64::total_cmp);
    records.retain(|fitting| Some(apart(fitting)) == nearest);
    records.sort_by_cached_key(|fitting| (fitting.record.key.clone(), fitting.record.device_key()));
    records.dedup_by(|later, first| later.record.key == first.record.key);
    records
}
