//! The search: finds the fastest candidate that is right.
//!
//! It compiles all candidates in parallel, checks each against the reference, and times the
//! survivors in interleaved rounds. Then it looks at neighbours of the best, and times those that
//! are left until one is clearly the fastest. It runs candidates through a `Bench`, in this process
//! (`rig`) or in a child that may die (`worker`). `contest` decides who stays. The caller hears of
//! every trial at once.

use super::contest::{Contender, Contest, FINAL, QUALIFYING, Round};
use super::outcome::{Outcome, Timed, Trial, Verdict};
use super::progress::{Phase, Progress};
use super::timing::Samples;
use super::utilisation::Floor;
use crate::backend::Elapsed;
use crate::config::Config;
use crate::error::{Error, Result, Status};
use crate::problem::Problem;
use std::ops::ControlFlow;
use std::time::{Duration, Instant};

/// Where candidates run.
pub trait Bench {
    /// Builds all of them in parallel. `done` receives each result by its index, in any order, and
    /// stops the rest by `Break`.
    fn build(&mut self, configs: &[Config], done: &mut BuildObserver);
    /// The candidate's relative error against the reference, on a reduced problem of the same
    /// class.
    fn check(&mut self, config: &Config) -> Result<f64, Fault>;
    /// The time of one run on the problem itself, cold.
    fn sample(&mut self, config: &Config) -> Result<Elapsed, Fault>;
}

/// Receives a built candidate: its index and the bytes of registers that it spills where products
/// wait for them (`Resources::costly_spill_bytes`).
pub type BuildObserver<'a> = dyn FnMut(usize, Result<u32, Fault>) -> ControlFlow<()> + 'a;

/// Why a step failed.
#[derive(Clone, Debug)]
pub enum Fault {
    /// The candidate is to blame; the others go on.
    Candidate(String),
    /// The candidate hung, crashed or lost the device. It may run on another problem of the class.
    Here(String),
    /// As `Here`, and its process can run nothing more.
    Poisoned(String),
    /// The bench itself cannot go on: no memory, no compiler, no device.
    Bench(Error),
}

/// What to search.
pub struct Request<'a> {
    pub problem: &'a Problem,
    /// The heuristic's config comes first. It stays to the end and wins unless it is clearly
    /// beaten, or spills and another does not.
    pub candidates: &'a [Config],
    /// The configs to try next once this one did well.
    pub neighbours: &'a dyn Fn(&Config) -> Vec<Config>,
    /// The trials of earlier runs of these candidates on this problem.
    pub known: &'a [Trial],
    pub time_limit: Duration,
    /// The floor that utilisation is measured against; None where it is not known.
    pub floor: Option<Floor>,
}

/// Receives every step and every trial. `Break` stops the search and keeps the trials reported so
/// far.
pub type Observer<'a> = dyn FnMut(Event) -> ControlFlow<()> + 'a;

#[derive(Clone, Copy, Debug)]
pub enum Event<'a> {
    Progress(Progress<'a>),
    Trial(&'a Trial),
}

/// The share of the time limit after which no further compilation begins.
const COMPILE_SHARE: f64 = 0.6;

/// A candidate that a killed run found slower than its best by this factor is not measured again.
const KNOWN_SLOW: f64 = 1.25;

/// The number of times that the search looks around the best, and the neighbours that it tries each
/// time.
const STEPS: usize = 4;
const NEIGHBOURS: usize = 16;

pub fn search(bench: &mut dyn Bench, request: &Request, observer: &mut Observer) -> Result<Outcome> {
    let mut run = Run {
        request,
        observer,
        contest: Contest::new(request.floor),
        started: Instant::now(),
        tried: Vec::new(),
        lap: 0,
        failed: 0,
        first_failure: None,
        is_clean: false,
    };
    run.admit(bench, request.candidates)?;
    run.play(bench, QUALIFYING)?;
    for _ in 0..STEPS {
        let Some(best) = run.contest.best().map(|(config, _)| config.clone()) else { break };
        let beside = (request.neighbours)(&best);
        if run.is_late() || !run.admit(bench, &beside)? {
            break;
        }
        run.play(bench, QUALIFYING)?;
        if run.contest.best().is_some_and(|(config, _)| *config == best) {
            break;
        }
    }
    run.play(bench, FINAL)?;
    run.finish()
}

struct Run<'a, 'b> {
    request: &'a Request<'a>,
    observer: &'a mut Observer<'b>,
    contest: Contest,
    started: Instant,
    tried: Vec<Config>,
    /// Laps of the round-robin so far.
    lap: usize,
    failed: usize,
    first_failure: Option<String>,
    /// Whether a kernel without spills was built.
    is_clean: bool,
}

impl Run<'_, '_> {
    /// Builds, checks and warms up the new ones. Returns false if there are none.
    fn admit(&mut self, bench: &mut dyn Bench, configs: &[Config]) -> Result<bool> {
        let is_first = self.tried.is_empty();
        let fresh: Vec<Config> = configs
            .iter()
            .filter(|config| !self.tried.contains(config) && (self.is_default(config) || !self.is_hopeless(config)))
            .take(if is_first { usize::MAX } else { NEIGHBOURS })
            .cloned()
            .collect();
        self.tried.extend(fresh.iter().cloned());
        if fresh.is_empty() {
            return Ok(false);
        }
        let built = self.build(bench, fresh, is_first)?;
        let checked = self.check(bench, built)?;
        self.warm_up(bench, checked)?;
        Ok(true)
    }

    fn is_default(&self, config: &Config) -> bool {
        Some(config) == self.request.candidates.first()
    }

    /// An earlier run found it to fail, or to be slow.
    fn is_hopeless(&self, config: &Config) -> bool {
        let known = self.request.known;
        let best_us = known.iter().filter_map(Trial::median_us).fold(f64::INFINITY, f64::min);
        known.iter().filter(|trial| trial.config == *config).any(|trial| match trial.verdict {
            Verdict::Failed { .. } | Verdict::FailedHere { .. } => true,
            Verdict::Measured { median_us, .. } => median_us > KNOWN_SLOW * best_us,
        })
    }

    /// The survivors, and the bytes that each spills.
    fn build(&mut self, bench: &mut dyn Bench, configs: Vec<Config>, has_default: bool) -> Result<Vec<(Config, u32)>> {
        let mut spills: Vec<Option<u32>> = vec![None; configs.len()];
        let (mut done, mut broken) = (0, None);
        let mut awaits_default = has_default;
        bench.build(&configs, &mut |index, result| {
            done += 1;
            awaits_default &= index != 0;
            let step = match result {
                Ok(bytes) => {
                    spills[index] = Some(bytes);
                    Ok(())
                }
                Err(fault) => self.fail(&configs[index], fault),
            };
            match step.and_then(|()| self.report(Phase::Compile, done, configs.len())) {
                Err(error) => {
                    broken = Some(error);
                    ControlFlow::Break(())
                }
                // The default must be tried, however long it takes; if it fails, another must be
                // found.
                Ok(()) if self.is_late() && !awaits_default && (!has_default || spills.iter().any(Option::is_some)) => {
                    ControlFlow::Break(())
                }
                Ok(()) => ControlFlow::Continue(()),
            }
        });
        if let Some(error) = broken {
            return Err(error);
        }
        // A kernel that spills waits for its own registers. It is measured only as the default, or
        // if no other is left.
        self.is_clean |= spills.contains(&Some(0));
        let mut kept = Vec::new();
        for (config, spills) in configs.into_iter().zip(spills) {
            match spills {
                Some(bytes) if self.is_clean && bytes > 0 && !self.is_default(&config) => {
                    self.fail(&config, Fault::Candidate(format!("spills {bytes} bytes of registers")))?;
                }
                Some(bytes) => kept.push((config, bytes)),
                None => {}
            }
        }
        Ok(kept)
    }

    fn check(&mut self, bench: &mut dyn Bench, configs: Vec<(Config, u32)>) -> Result<Vec<Contender>> {
        let total = configs.len();
        let mut checked = Vec::new();
        for (index, (config, spill_bytes)) in configs.into_iter().enumerate() {
            let is_default = self.is_default(&config);
            if self.is_over() && !is_default && !checked.is_empty() {
                continue;
            }
            match bench.check(&config) {
                Ok(check_error) => {
                    checked.push(Contender {
                        config,
                        is_default,
                        spill_bytes,
                        check_error,
                        samples: Samples::default(),
                    });
                }
                Err(fault) => self.fail(&config, fault)?,
            }
            self.report(Phase::Check, index + 1, total)?;
        }
        Ok(checked)
    }

    /// One discarded run each: the first launch loads code and fills address translation.
    fn warm_up(&mut self, bench: &mut dyn Bench, newcomers: Vec<Contender>) -> Result<()> {
        let total = newcomers.len();
        for (index, contender) in newcomers.into_iter().enumerate() {
            if self.is_over() && !contender.is_default {
                continue;
            }
            match bench.sample(&contender.config) {
                Ok(_) => self.contest.contenders.push(contender),
                Err(fault) => self.fail(&contender.config, at_this_size(fault))?,
            }
            self.report(Phase::Measure, index + 1, total)?;
        }
        Ok(())
    }

    fn play(&mut self, bench: &mut dyn Bench, rounds: &[Round]) -> Result<()> {
        let total: usize = rounds.iter().map(|round| round.samples).sum();
        let mut done = 0;
        for round in rounds {
            for _ in 0..round.samples {
                self.take_turns(bench)?;
                done += 1;
                self.report(Phase::Measure, done, total)?;
            }
            for dropped in self.contest.halve(round) {
                self.report_measured(dropped)?;
            }
        }
        Ok(())
    }

    /// One sample of each, round-robin: a drifting clock then drifts for all of them.
    fn take_turns(&mut self, bench: &mut dyn Bench) -> Result<()> {
        self.lap += 1;
        let mut at = 0;
        while let Some(contender) = self.contest.contenders.get(at) {
            // The default gets a time even after the limit: a record without one is of no use.
            if self.is_over() && !(contender.is_default && contender.samples.count() == 0) {
                at += 1;
                continue;
            }
            match bench.sample(&self.contest.contenders[at].config) {
                Ok(sample) => {
                    self.contest.contenders[at].samples.push(self.lap, sample);
                    at += 1;
                }
                Err(fault) => {
                    let failed = self.contest.contenders.remove(at);
                    self.fail(&failed.config, at_this_size(fault))?;
                }
            }
        }
        Ok(())
    }

    fn finish(mut self) -> Result<Outcome> {
        let measured = self.contest.contenders.iter().filter(|contender| contender.samples.count() > 0);
        let measured: Vec<_> = measured.map(|contender| self.contest.timed(contender)).collect();
        for timed in measured {
            self.report_measured(timed)?;
        }
        let why = self.first_failure.unwrap_or_else(|| "there was none to try".to_owned());
        self.contest.decide().ok_or_else(|| Error::new(Status::Unsupported, format!("no candidate works: {why}")))
    }

    fn is_over(&self) -> bool {
        self.started.elapsed() > self.request.time_limit
    }

    /// Too late to compile more.
    fn is_late(&self) -> bool {
        self.started.elapsed() > self.request.time_limit.mul_f64(COMPILE_SHARE)
    }

    fn report(&mut self, phase: Phase, done: usize, total: usize) -> Result<()> {
        let best = self.contest.best();
        let progress = Progress { problem: self.request.problem, phase, done, total, failed: self.failed, best };
        continue_or_cancel((self.observer)(Event::Progress(progress)))
    }

    fn report_measured(&mut self, timed: Timed) -> Result<()> {
        let Timed { config, median_us, utilisation } = timed;
        self.report_trial(config, Verdict::Measured { median_us, utilisation })
    }

    fn report_trial(&mut self, config: Config, verdict: Verdict) -> Result<()> {
        continue_or_cancel((self.observer)(Event::Trial(&Trial { config, verdict })))
    }

    fn fail(&mut self, config: &Config, fault: Fault) -> Result<()> {
        let named = |reason: &str| format!("{config}: {reason}");
        let (failure, verdict, end) = match fault {
            Fault::Bench(error) => return Err(error),
            Fault::Candidate(reason) => (named(&reason), Verdict::Failed { reason }, None),
            Fault::Here(reason) => (named(&reason), Verdict::FailedHere { reason }, None),
            Fault::Poisoned(reason) => {
                let error = Error::new(Status::Cuda, format!("candidate {config}: {reason}"));
                (named(&reason), Verdict::FailedHere { reason }, Some(error))
            }
        };
        self.failed += 1;
        self.first_failure.get_or_insert(failure);
        self.report_trial(config.clone(), verdict)?;
        end.map_or(Ok(()), Err)
    }
}

/// The check runs on a reduced problem and speaks for the class. A failure on the problem itself
/// does not.
fn at_this_size(fault: Fault) -> Fault {
    match fault {
        Fault::Candidate(reason) => Fault::Here(reason),
        other => other,
    }
}

impl Trial {
    fn median_us(&self) -> Option<f64> {
        match self.verdict {
            Verdict::Measured { median_us, .. } => Some(median_us),
            Verdict::Failed { .. } | Verdict::FailedHere { .. } => None,
        }
    }
}

fn continue_or_cancel(flow: ControlFlow<()>) -> Result<()> {
    match flow {
        ControlFlow::Continue(()) => Ok(()),
        ControlFlow::Break(()) => Err(Error::new(Status::Cancelled, "tuning was stopped; what was done is kept")),
    }
}
