//! What there is to tell of one problem: the candidates with their times, the winner against the
//! default, the reason, and the plan that the library makes of it.

use super::chart::{self, Chart, Timed};
use super::input::Records;
use super::text::{day, digits, percent, place, problem as in_words, time};
use crate::tuning_log::{Entry, Run};
use flashtune::device::{Arch, Device};
use flashtune::family;
use flashtune::plan::key::{self, Class};
use flashtune::plan::{self, Known, MOST_SPREAD, Record};
use flashtune::problem::Dtype;
use flashtune::tune::{self, Verdict};
use serde::Serialize;

/// A compiler's log may be long.
const MOST_CHARS: usize = 2_000;
/// More processors are those of no device, and the heuristics compute with the number.
const MOST_PROCESSORS: u32 = 1 << 16;

#[derive(Serialize)]
pub struct Told {
    pub name: String,
    pub shape: String,
    key: String,
    /// None where no candidate won.
    winner: Option<Winner>,
    /// Sentences: what was measured, and why the winner was chosen.
    reasons: Vec<String>,
    /// What a context does with this problem, as its plan info says.
    plan: Option<String>,
    chart: Option<Chart>,
    rows: Vec<Row>,
    failures: Vec<Failure>,
    /// How many times faster than the default the winner is.
    #[serde(skip)]
    pub ratio: Option<f64>,
}

#[derive(Serialize)]
struct Winner {
    config: String,
    family: &'static str,
    time: String,
    spread: String,
    rate: String,
    default_time: Option<String>,
    ratio: Option<String>,
    is_default: bool,
    share: Option<String>,
    share_width: String,
    limit: String,
}

#[derive(Serialize)]
struct Row {
    config: String,
    median: String,
    share: String,
    over_winner: String,
    note: String,
}

#[derive(Serialize)]
struct Failure {
    config: String,
    reason: String,
    note: &'static str,
}

impl Told {
    pub fn has_winner(&self) -> bool {
        self.winner.is_some()
    }

    /// Whether another config than the default won.
    pub fn has_other_winner(&self) -> bool {
        self.winner.as_ref().is_some_and(|winner| !winner.is_default)
    }
}

pub fn told(entry: &Entry, known: &Records, cpu: &Device) -> Told {
    let record = entry.result.as_deref().ok();
    let timed = timed(record, entry.run.as_ref());
    let limit_us = record.and_then(|record| Some(utilisation(record)? * record.median_us));
    let (name, shape) = in_words(&entry.problem);
    let failures: Vec<Failure> = entry.run.iter().flat_map(|run| &run.candidates).filter_map(failure).collect();
    Told {
        name,
        shape,
        key: key::record_key(&entry.problem),
        winner: record.map(|record| winner(record, &timed)),
        reasons: reasons(entry, &timed, failures.len()),
        plan: plan(entry, known, cpu),
        chart: chart::of_candidates(&timed, limit_us),
        rows: timed.iter().map(|timed_one| row(timed_one, record)).collect(),
        failures,
        ratio: record.and_then(ratio),
    }
}

/// Default over winner; None where the default failed.
fn ratio(record: &Record) -> Option<f64> {
    Some(record.default_us? / record.median_us)
}

/// The measured candidates, fastest first and those that dropped out early last: of the run, or
/// the three that a record has.
fn timed(record: Option<&Record>, run: Option<&Run>) -> Vec<Timed> {
    let mut all: Vec<Timed> = Vec::new();
    let default_us = record.zip(run).and_then(|(record, run)| comparable_default_us(record, run));
    for candidate in run.iter().flat_map(|run| &run.candidates) {
        let Verdict::Measured { median_us, utilisation, over_default, was_brief } = candidate.trial.verdict else {
            continue;
        };
        let config = &candidate.trial.config;
        let us = over_default.zip(default_us).map_or(median_us, |(ratio, default_us)| ratio * default_us);
        all.push(Timed {
            config: Some(config.clone()),
            us,
            median_us,
            utilisation,
            is_winner: record.is_some_and(|record| record.config == *config),
            is_default: run.is_some_and(|run| run.default == *config),
            is_runner_up: record
                .and_then(|record| record.runner_up.as_ref())
                .is_some_and(|runner_up| runner_up.config == *config),
            is_earlier: candidate.earlier_run,
            was_brief,
        });
    }
    if let Some(record) = record.filter(|_| !all.iter().any(|timed| timed.is_winner)) {
        all.extend(of_record(record));
    }
    let is_aside = |timed: &Timed| timed.was_brief && !timed.is_winner && !timed.is_default;
    all.sort_by(|a, b| is_aside(a).cmp(&is_aside(b)).then(a.us.total_cmp(&b.us)).then_with(|| a.config.cmp(&b.config)));
    all
}

/// The default's time in the laps in which the winner took its median. None if they shared no lap.
fn comparable_default_us(record: &Record, run: &Run) -> Option<f64> {
    let winner = run.candidates.iter().find(|candidate| candidate.trial.config == record.config)?;
    match winner.trial.verdict {
        Verdict::Measured { over_default, .. } => Some(record.median_us / over_default?),
        _ => None,
    }
}

fn of_record(record: &Record) -> impl Iterator<Item = Timed> {
    let of = |config, us, utilisation| Timed {
        config,
        us,
        median_us: us,
        utilisation,
        is_winner: false,
        is_default: false,
        is_runner_up: false,
        is_earlier: false,
        was_brief: false,
    };
    // The default that stays is the winner, and has its time to the last digit.
    let is_default = record.default_us == Some(record.median_us);
    let winner = of(Some(record.config.clone()), record.median_us, record.utilisation);
    let runner_up = record
        .runner_up
        .iter()
        .map(move |up| Timed { is_runner_up: true, ..of(Some(up.config.clone()), up.median_us, up.utilisation) });
    let default = record.default_us.filter(|_| !is_default).map(|us| Timed { is_default: true, ..of(None, us, None) });
    [Timed { is_winner: true, is_default, ..winner }].into_iter().chain(runner_up).chain(default)
}

fn winner(record: &Record, timed: &[Timed]) -> Winner {
    let problem = &record.problem;
    let rate = match family::is_bound_by_keys(problem) {
        true => format!("{} GB/s", digits(problem.key_value_bytes() / record.median_us * 1e-3)),
        false => format!("{} TFLOP/s", digits(problem.flops() / record.median_us * 1e-6)),
    };
    Winner {
        config: record.config.to_string(),
        family: record.config.family.name(),
        time: time(record.median_us),
        spread: percent(record.spread),
        rate,
        default_time: record.default_us.map(time),
        ratio: ratio(record).map(|ratio| format!("{ratio:.3}")),
        is_default: timed.iter().any(|timed| timed.is_winner && timed.is_default),
        share: utilisation(record).map(percent),
        share_width: place(utilisation(record).unwrap_or(0.0)),
        limit: limit(record),
    }
}

/// The share of the limit; None with a block mask, as u counts blocks that the mask does not list.
fn utilisation(record: &Record) -> Option<f64> {
    record.utilisation.filter(|_| record.problem.features.block_mask.is_none())
}

/// What the limit is, or why its share is not known (`tune::Floor`).
fn limit(record: &Record) -> String {
    let problem = &record.problem;
    let known = match family::is_bound_by_keys(problem) {
        true => "The limit is the time to read K and V once at the full memory rate",
        false => "The limit is the time of the matrix products on all tensor cores, at the clock of the run",
    };
    match (record.arch, utilisation(record)) {
        (_, Some(_)) if problem.features.varlen.is_some() => {
            format!("{known}, with every sequence as long as the longest.")
        }
        (_, Some(_)) => format!("{known}."),
        (Arch::Cpu, None) => "The limit of a CPU is not known.".to_owned(),
        _ if problem.dtype == Dtype::Fp32 => "The limit is not known in fp32.".to_owned(),
        _ if problem.features.block_mask.is_some() => {
            "The rate counts all blocks, though the mask may list few, so the share of the limit is not known."
                .to_owned()
        }
        _ => "The share of the limit was not recorded.".to_owned(),
    }
}

fn row(timed: &Timed, record: Option<&Record>) -> Row {
    let has_limit = record.is_none_or(|record| utilisation(record).is_some());
    let notes = [
        (timed.is_winner, "winner"),
        (timed.is_default, "default"),
        (timed.is_runner_up, "runner-up"),
        (timed.was_brief, "dropped early"),
        (timed.is_earlier, "measured by an earlier run"),
    ];
    let notes: Vec<&str> = notes.iter().filter(|(is_on, _)| *is_on).map(|(_, note)| *note).collect();
    Row {
        config: timed.config.as_ref().map_or("not kept".to_owned(), ToString::to_string),
        median: time(timed.median_us),
        share: timed.utilisation.filter(|_| has_limit).map_or("–".to_owned(), percent),
        over_winner: record.map_or("–".to_owned(), |record| format!("{:.3}", timed.us / record.median_us)),
        note: notes.join(", "),
    }
}

fn failure(candidate: &crate::tuning_log::Candidate) -> Option<Failure> {
    let (reason, scope) = match &candidate.trial.verdict {
        Verdict::Failed { reason } => (reason, "on every shape of its class"),
        Verdict::FailedHere { reason } => (reason, "on this shape"),
        Verdict::Measured { .. } => return None,
    };
    let note = if candidate.earlier_run { "found by an earlier run" } else { scope };
    Some(Failure { config: candidate.trial.config.to_string(), reason: shortened(reason), note })
}

fn shortened(text: &str) -> String {
    match text.char_indices().nth(MOST_CHARS) {
        Some((end, _)) => format!("{} …", &text[..end]),
        None => text.to_owned(),
    }
}

fn reasons(entry: &Entry, timed: &[Timed], failed: usize) -> Vec<String> {
    let mut reasons = Vec::new();
    match &entry.run {
        Some(run) => {
            let passed_over = run.candidates.iter().filter(|candidate| candidate.earlier_run).count();
            let when = day(run.ended_at).map_or(String::new(), |day| format!(" on {day}"));
            let mut told = format!(
                "{} candidates in {:.1} s{when}: {} were measured, {failed} failed",
                run.candidates.len(),
                run.took.as_secs_f64(),
                run.candidates.len() - failed
            );
            if passed_over > 0 {
                told += &format!("; {passed_over} of them by an earlier run, and they were not tried again");
            }
            reasons.push(told + ".");
        }
        None => reasons.push("The candidates were not kept; autotune --log keeps them.".to_owned()),
    }
    match entry.result.as_deref() {
        Ok(record) => {
            reasons.push(choice(record, timed));
            if record.spread > MOST_SPREAD {
                let spread = percent(record.spread);
                reasons.push(format!(
                    "The spread is {spread}: the device had other work to do, and autotune --retune measures again."
                ));
            }
            if record.proven_only {
                reasons.push("Only the default and configs proven for the architecture were tried.".to_owned());
            }
        }
        Err(reason) => reasons.push(format!("No candidate won: {}", shortened(reason))),
    }
    reasons
}

/// Why the tuner chose the winner (`tune::contest`).
fn choice(record: &Record, timed: &[Timed]) -> String {
    let is_default = timed.iter().any(|timed| timed.is_winner && timed.is_default);
    let margin = format!("{} %", 100.0 * tune::MARGIN);
    match record.default_us {
        _ if is_default => {
            format!("The default stays: compared lap by lap, no other gains over {margin} and over twice the noise.")
        }
        None => "The fastest of those that work. The default failed.".to_owned(),
        Some(_) => {
            format!("The fastest: compared lap by lap, it gains over {margin} and over twice the noise on the default.")
        }
    }
}

/// The config that a context chooses with these records, with its source and reason.
fn plan(entry: &Entry, known: &Records, cpu: &Device) -> Option<String> {
    if let Ok(record) = &entry.result
        && let Err(reason) = record.check(cpu)
    {
        return Some(format!("This version of the library does not use the record: {reason}."));
    }
    let device = device(entry, cpu)?;
    family::supported(&entry.problem, &device).ok()?;
    let none = Known::default();
    let of_class = known.by_class.get(&Class::of(&entry.problem)).unwrap_or(&none);
    let choice = plan::choices(of_class, &entry.problem, &device).into_iter().next()?;
    let is_winner = entry.result.as_ref().is_ok_and(|record| record.config == choice.config);
    let config = if is_winner { "the winner".to_owned() } else { choice.config.to_string() };
    let plan = if known.are_of_files { "With these records imported, a plan takes" } else { "A plan takes" };
    Some(format!("{plan} {config} (source {}: {}).", choice.source.name(), choice.reason))
}

/// The device of an entry, as far as it is known here.
fn device(entry: &Entry, cpu: &Device) -> Option<Device> {
    let base = match entry.arch {
        Arch::Cpu if cpu.name == entry.device && cpu.sm_count == entry.sm_count => cpu.clone(),
        // The cache size of another host is not known and rules nothing out.
        Arch::Cpu => Device { l2_bytes: u64::MAX, ..cpu.clone() },
        arch => Device::typical(arch)?,
    };
    let is_possible = (1..=MOST_PROCESSORS).contains(&entry.sm_count);
    is_possible.then(|| Device { name: entry.device.clone(), sm_count: entry.sm_count, ..base })
}
