//! `flashtune autotune`: the offline tuning run over presets or a problem file.
//!
//! A run is a success if its records outlive it: in the cache folder, or in the file of `--output`.

use crate::device::DeviceArg;
use crate::failure::{Failure, print_json, usage};
use crate::names::by_name;
use crate::places;
use crate::problems;
use crate::progress::Display;
use crate::records::MAX_FILE_BYTES;
use crate::report;
use crate::tuning_log::{Candidate, Entry, Log, Run};
use flashtune::device::Arch;
use flashtune::error::Status;
use flashtune::family;
use flashtune::files;
use flashtune::plan::{Engine, Record, key, record};
use flashtune::problem::{Dtype, Problem};
use flashtune::tune::{DEFAULT_TIME_LIMIT, Event, Trial, TuneOptions, Verdict, worker};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

#[derive(clap::Args)]
pub struct Args {
    /// The device to tune on: cpu or the number of a GPU [default: GPU 0, or the CPU without a GPU]
    #[arg(long, value_name = "N|cpu")]
    device: Option<DeviceArg>,
    /// Tune the problems of a model or a grid; repeatable [default without --problems: all]
    #[arg(long = "preset", value_name = "NAME")]
    presets: Vec<String>,
    /// Tune the problems of a file of JSON lines, such as
    /// {"num_heads_q":32,"num_heads_kv":8,"seqlen_q":4096,"head_dim":128,"causal":"bottom-right"}
    #[arg(long, value_name = "FILE")]
    problems: Option<PathBuf>,
    /// Replace the dtype of all problems: fp16, bf16 or fp32
    #[arg(long, value_parser = by_name::<Dtype>)]
    dtype: Option<Dtype>,
    /// Time limit of the whole run in seconds [default: none for the run, 20 s for each problem]
    #[arg(long, value_name = "SECONDS")]
    time_limit: Option<f64>,
    /// Add this run's records to a file, for shipping or for other machines
    #[arg(long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Keep all candidates of each problem in a file, for `flashtune report --log FILE`
    #[arg(long, value_name = "FILE")]
    log: Option<PathBuf>,
    /// Write a page of this run's problems and their candidates, as `flashtune report` does
    #[arg(long, value_name = "FILE.html")]
    report: Option<PathBuf>,
    /// Measure problems again that have a record
    #[arg(long)]
    retune: bool,
    /// Also print a line for each candidate: its time and utilisation, or why it failed
    #[arg(long)]
    verbose: bool,
    /// Print the records as JSON lines on standard output
    #[arg(long)]
    json: bool,
}

/// A kernel of the largest problems takes some 10 ms, and a check computes the reference on the
/// CPU.
const PATIENCE: Duration = Duration::from_secs(30);
/// The largest kernels compile for some ten seconds, and several times longer on a busy machine.
const BUILD_PATIENCE: Duration = Duration::from_secs(120);

pub fn run(args: Args) -> Result<(), Failure> {
    let presets = match (args.presets.is_empty(), &args.problems) {
        (true, None) => vec!["all".to_owned()],
        _ => args.presets.clone(),
    };
    let problems = problems::collect(&presets, args.problems.as_deref(), args.dtype)?;
    let budget = match args.time_limit {
        None => None,
        Some(seconds) => Some(Duration::try_from_secs_f64(seconds).map_err(|_| {
            usage(format_args!("--time-limit is {seconds}; it must be a number of seconds, at least 0"))
        })?),
    };
    require_places(&args)?;
    let device = args.device.unwrap_or_default();
    let engine = device.engine()?;
    let mut log = args.log.as_deref().map(Log::open).transpose().map_err(Failure::Failed)?;
    let stop = stop_on_signal()?;
    let mut pass = Pass {
        engine: &engine,
        device,
        stop,
        started: Instant::now(),
        budget,
        retune: args.retune,
        verbose: args.verbose,
    };
    let display = Display::new(problems.len());
    let (mut records, mut entries, mut failures, mut left) = (Vec::new(), Vec::new(), 0, 0);
    let (mut lost, mut is_heard) = (None, true);
    for (index, problem) in problems.iter().enumerate() {
        if !is_heard {
            left += 1;
            continue;
        }
        let name = key::record_key(problem);
        let (tuned, run) = pass.tune(problem, &name, &display);
        let entry = match tuned {
            Tuned::Record(record) => {
                display.finish_one(index, &summary(&name, &record));
                if args.json
                    && let Err(failure) = print_json(&record)
                {
                    // The run ends, and its files get what it has.
                    lost = Some(failure);
                    is_heard = false;
                }
                records.push(Record::clone(&record));
                Entry { run, ..Entry::of_record(*record) }
            }
            Tuned::Failed(reason) => {
                failures += 1;
                display.finish_one(index, &format!("{name}: failed: {reason}"));
                Entry { run, ..Entry::failed(problem, engine.backend().device(), reason) }
            }
            Tuned::Stopped => {
                left += 1;
                continue;
            }
        };
        // Tuning goes on, since records are worth more than their log.
        if let Some(Err(reason)) = log.as_mut().map(|log| log.add(&entry)) {
            display.line(&format!("the log was not written: {reason}"));
            lost = Some(Failure::Failed(format!("the log was not written: {reason}")));
        }
        entries.push(entry);
    }
    display.end();
    if let Some(Err(reason)) = log.map(Log::finish) {
        lost = Some(Failure::Failed(format!("the log was not written: {reason}")));
    }
    let tuned = records.len();
    if let Some(path) = &args.output {
        lost = add_to(path, records).err().or(lost);
    }
    if let Some(path) = args.report.as_deref().filter(|_| !entries.is_empty()) {
        lost = report::of_run(&engine, entries, path).err().or(lost);
    }
    let over = match (left, pass.stop.load(Ordering::Relaxed)) {
        (0, _) => "",
        _ if !is_heard => ", nothing reads standard output",
        (_, true) => ", stopped by a signal; run it again to continue",
        (_, false) => ", the time limit is over; run it again to continue",
    };
    let kept = engine.kept_records();
    let place = match (&kept, &args.output) {
        (Ok(folder), _) => format!("; the records are in {}", folder.display()),
        (Err(_), Some(path)) => format!("; the records are in {} alone", path.display()),
        (Err(_), None) => String::new(),
    };
    eprintln!("{tuned} of {} problems have a record, {failures} failed, {left} are left{over}{place}", problems.len());
    match (failures, pass.stop.load(Ordering::Relaxed)) {
        (0, false) => match kept {
            Err(reason) if tuned > 0 && args.output.is_none() => {
                Err(Failure::NotKept(format!("the records are lost with this process: {reason}")))
            }
            _ => lost.map_or(Ok(()), Err),
        },
        (0, true) => Err(Failure::Failed("stopped by a signal; finished records are kept".into())),
        (_, _) => Err(Failure::Failed(format!("{failures} problems failed"))),
    }
}

struct Pass<'a> {
    engine: &'a Engine,
    device: DeviceArg,
    stop: Arc<AtomicBool>,
    started: Instant,
    budget: Option<Duration>,
    retune: bool,
    verbose: bool,
}

enum Tuned {
    Record(Box<Record>),
    Failed(String),
    /// The run was stopped, or its time is over.
    Stopped,
}

impl Pass<'_> {
    /// The result, and what the run tells beside it; None if nothing was measured.
    fn tune(&mut self, problem: &Problem, name: &str, display: &Display) -> (Tuned, Option<Run>) {
        let left = self.budget.map(|budget| budget.saturating_sub(self.started.elapsed()));
        if self.stop.load(Ordering::Relaxed) || left.is_some_and(|left| left.is_zero()) {
            return (Tuned::Stopped, None);
        }
        let options = TuneOptions {
            time_limit: left.unwrap_or(DEFAULT_TIME_LIMIT).min(DEFAULT_TIME_LIMIT),
            retune: self.retune,
            worker: self.worker(),
        };
        let (begun, mut candidates) = (Instant::now(), Vec::new());
        let tuned = self.engine.autotune(problem, &options, &mut |event| {
            match event {
                Event::Progress(progress) => display.step(name, &progress),
                Event::Trial(trial) => {
                    if self.verbose {
                        display.line(&trial_line(trial));
                    }
                    candidates.push(Candidate { trial: trial.clone(), earlier_run: false });
                }
                Event::PassedOver(trial) => candidates.push(Candidate { trial: trial.clone(), earlier_run: true }),
            }
            if self.stop.load(Ordering::Relaxed) { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        });
        let run = (!candidates.is_empty()).then(|| {
            // A candidate was tried, so the device runs the problem.
            let default = family::heuristic(&key::canonical(problem), self.engine.backend().device());
            Run::new(default, candidates, begun.elapsed())
        });
        match tuned {
            Ok(record) => (Tuned::Record(Box::new(record)), run),
            Err(error) if error.status == Status::Cancelled => (Tuned::Stopped, None),
            Err(error) => (Tuned::Failed(error.message), run),
        }
    }

    /// This program as a worker process, so that a hang or crash does not end the run.
    fn worker(&self) -> Option<worker::Command> {
        if self.engine.backend().device().arch == Arch::Cpu {
            return None;
        }
        let program = std::env::current_exe().ok()?.into_os_string();
        let args = ["worker", "--device", &self.device.ordinal().to_string()].map(Into::into).to_vec();
        Some(worker::Command { program, args, patience: PATIENCE, build_patience: BUILD_PATIENCE })
    }
}

/// An error for a file that the run could not write in the end, or that it would destroy.
fn require_places(args: &Args) -> Result<(), Failure> {
    let (problems, output) = (args.problems.as_deref(), args.output.as_deref());
    let (log, report) = (args.log.as_deref(), args.report.as_deref());
    places::require_apart(&[("--problems", problems), ("--output", output), ("--log", log), ("--report", report)])?;
    output.into_iter().chain(report).try_for_each(places::require_place)?;
    output.map_or(Ok(()), |path| records_of(path).map(drop))
}

/// Ctrl-C and SIGTERM end the run after the current step; a second signal ends it at once.
fn stop_on_signal() -> Result<Arc<AtomicBool>, Failure> {
    let stop = Arc::new(AtomicBool::new(false));
    let seen = Arc::clone(&stop);
    ctrlc::set_handler(move || {
        if seen.swap(true, Ordering::Relaxed) {
            std::process::exit(1);
        }
    })
    .map_err(|error| Failure::Failed(format!("handling Ctrl-C: {error}")))?;
    Ok(stop)
}

fn summary(name: &str, record: &Record) -> String {
    let gain = match record.default_us {
        Some(default_us) if default_us > record.median_us => {
            format!(", default {default_us:.1} us ({:.2}x)", default_us / record.median_us)
        }
        _ => String::new(),
    };
    let tflops = record.problem.flops() / record.median_us * 1e-6;
    let u = utilisation(record.utilisation);
    format!("{name}: {:.1} us, {tflops:.3} TFLOP/s{u}{gain}, {}", record.median_us, record.config)
}

fn trial_line(trial: &Trial) -> String {
    let config = &trial.config;
    match &trial.verdict {
        Verdict::Measured { median_us, utilisation: u, .. } => {
            format!("  {median_us:.1} us{}, {config}", utilisation(*u))
        }
        Verdict::Failed { reason } | Verdict::FailedHere { reason } => format!("  failed: {config}: {reason}"),
    }
}

/// The share of the device's ceiling that was reached (`tune::Floor`), as a part of a line.
pub fn utilisation(of_ceiling: Option<f64>) -> String {
    of_ceiling.map_or(String::new(), |u| format!(", u {u:.3}"))
}

/// Merges new records into a file. They replace records of the same device and key; the others
/// stay.
fn add_to(path: &Path, records: Vec<Record>) -> Result<(), Failure> {
    let all: Vec<Record> = records.into_iter().chain(records_of(path)?).collect();
    record::write_file(path, all)?;
    Ok(())
}

/// The records of a file; none if it does not exist. A file with anything else is an error: it
/// would lose that.
fn records_of(path: &Path) -> Result<Vec<Record>, Failure> {
    let failed = |error: &dyn std::fmt::Display| Failure::Failed(format!("{}: {error}", path.display()));
    let text = match files::read_text(path, MAX_FILE_BYTES) {
        Ok(text) => text,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(failed(&error)),
    };
    let (records, ignored) = record::read_lines(&text);
    match ignored.first() {
        None => Ok(records),
        Some((line, reason)) => Err(failed(&format_args!("line {line}: {reason}"))),
    }
}
