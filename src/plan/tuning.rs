//! Tuning: measures the candidates of one problem and makes the winner's record.
//!
//! The candidates come from records and the space; a bench, in this process or in a worker,
//! measures them; `tune` searches. The problem is measured as it is, since a record says what was
//! measured. Its candidates are those of the canonical problem, since the record is looked up for
//! that. The engine keeps the record; nothing here does.

use super::canonical::{self, Canonical};
use super::key;
use super::known_records::KnownRecords;
use super::lookup;
use super::record::Record;
use crate::backend::Backend;
use crate::config::Config;
use crate::device::{Arch, Device};
use crate::error::{Error, Result};
use crate::family;
use crate::problem::Problem;
use crate::tune::{self, Bench, Event, Floor, Observer, Request, Rig, TuneOptions, Worker, candidates};

/// An error where no record can come of a measurement.
pub fn refuse_unmeasurable(problem: &Problem) -> Result<()> {
    if problem.is_empty() || problem.seqlen_q == 0 || problem.seqlen_k == 0 {
        return Err(Error::invalid(format!(
            "{}: the problem is empty and has nothing to measure",
            key::record_key(problem)
        )));
    }
    match problem.follows_no_record() {
        None => Ok(()),
        Some(why) => Err(Error::invalid(format!(
            "{}: a {why} problem always runs the heuristic's config and cannot be tuned; tune it without {}",
            key::record_key(problem),
            why.replace('-', "_")
        ))),
    }
}

/// Whether a record makes a run with these options unnecessary. Problems of one key may differ in
/// the configs that serve them. A run that may try every candidate repeats one that could try only
/// proven ones.
pub fn is_enough(record: &Record, canonical: &Canonical, device: &Device, options: &TuneOptions) -> bool {
    let preferred = family::heuristic(canonical, device).family;
    let serves = family::check(canonical, &record.config, device).is_ok();
    !options.retune && serves && record.has_tried(preferred) && !(record.proven_only && options.worker.is_some())
}

/// Measures the candidates and returns the winner's record.
pub fn run(
    backend: &Backend,
    records: &KnownRecords,
    problem: &Problem,
    canonical: &Canonical,
    options: &TuneOptions,
    observer: &mut Observer,
) -> Result<Record> {
    let device = backend.device();
    let is_cpu = device.arch == Arch::Cpu;
    // A config that is not proven may hang, which does no harm on the CPU and in a worker.
    let may_be_unproven = is_cpu || options.worker.is_some();
    let known = if options.retune { Vec::new() } else { records.trials(problem) };
    let candidates = all_candidates(records, problem, canonical, device, may_be_unproven);
    let neighbours = |config: &Config| match may_be_unproven {
        true => fitting(problem, candidates::neighbours(canonical, config, device), device),
        false => Vec::new(),
    };
    let request = Request {
        problem,
        candidates: &candidates,
        neighbours: &neighbours,
        known: &known,
        time_limit: options.time_limit,
        floor: Floor::of(problem, device),
    };
    let mut bench: Box<dyn Bench> = match &options.worker {
        Some(command) if !is_cpu => Box::new(Worker::new(command.clone(), problem)),
        _ => Box::new(Rig::new(backend, problem)),
    };
    let mut measured = tune::measured_families(&known);
    let outcome = tune::search(bench.as_mut(), &request, &mut |event| {
        if let Event::Trial(trial) = event {
            measured.extend(tune::measured_families(std::slice::from_ref(trial)));
            records.note(problem, trial);
        }
        observer(event)
    });
    // A worker's process ends before anything else is done.
    drop(bench);
    match outcome {
        Ok(outcome) => {
            measured.remove(&outcome.winner.config.family);
            Ok(Record { proven_only: !may_be_unproven, also_tried: measured, ..Record::new(problem, device, outcome) })
        }
        Err(error) => {
            records.flush();
            Err(error)
        }
    }
}

/// The heuristic's config first, then the one that a lookup would choose, configs that records
/// name, and those that the space finds promising. Each passes for the canonical problem too, or
/// its record would never be a hit.
fn all_candidates(
    records: &KnownRecords,
    problem: &Problem,
    canonical: &Canonical,
    device: &Device,
    may_be_unproven: bool,
) -> Vec<Config> {
    let mut all = vec![family::heuristic(canonical, device)];
    let known = records.snapshot();
    // Its prediction is judged too, or tuning might end with a slower config than no tuning.
    all.extend(lookup::choices(&known, canonical, device).into_iter().take(1).map(|choice| choice.config));
    let proven = lookup::proven(&known, canonical, device);
    all.extend(proven.into_iter().take(candidates::MAX_CANDIDATES / 2));
    if may_be_unproven {
        all.extend(candidates::first(canonical, device));
    }
    let mut chosen = Vec::new();
    for config in fitting(problem, all, device) {
        if chosen.len() < candidates::MAX_CANDIDATES && !chosen.contains(&config) {
            chosen.push(config);
        }
    }
    chosen
}

fn fitting(problem: &Problem, mut configs: Vec<Config>, device: &Device) -> Vec<Config> {
    configs.retain(|config| canonical::check(problem, config, device).is_ok());
    configs
}
