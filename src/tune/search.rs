//! The search: which of the candidates is the fastest that is right.
//!
//! Compile all in parallel, check each against the reference, then time the survivors in interleaved rounds and drop
//! the slow ones after each (successive halving). It sees candidates through a `Bench` alone, which runs them in this
//! process (`rig`) or in a child that may die (`worker`), and tells its caller of every trial as soon as it is known.

use super::timing::{self, Samples};
use super::{Outcome, Phase, Progress, Timed, Trial, Verdict};
use crate::config::Config;
use crate::error::{Error, Result, Status};
use crate::problem::Problem;
use std::ops::ControlFlow;
use std::time::{Duration, Instant};

/// Where candidates run.
pub trait Bench {
    /// Builds all of them, in parallel; `done` hears of each by its index, in any order, and stops the rest by `Break`.
    fn build(&mut self, configs: &[Config], done: &mut BuildObserver);
    /// The candidate's relative error against the reference, on a reduced problem of the same class.
    fn check(&mut self, config: &Config) -> Result<f64, Fault>;
    /// The time of one run on the problem itself, cold.
    fn sample(&mut self, config: &Config) -> Result<Duration, Fault>;
}

/// Hears of a built candidate: its index and the bytes of registers that it spills.
pub type BuildObserver<'a> = dyn FnMut(usize, Result<u32, Fault>) -> ControlFlow<()> + 'a;

/// Why a step failed.
#[derive(Clone, Debug)]
pub enum Fault {
    /// The candidate is to blame; the others go on.
    Candidate(String),
    /// The candidate is to blame, and nothing can run in its process any more.
    Poisoned(String),
    /// The bench itself cannot go on: no memory, no compiler, no device.
    Bench(Error),
}

/// What to search.
pub struct Request<'a> {
    pub problem: &'a Problem,
    /// The heuristic's config first; it stays to the end and wins unless it is clearly beaten.
    pub candidates: &'a [Config],
    /// What earlier runs found out about these candidates on this problem.
    pub known: &'a [Trial],
    pub time_limit: Duration,
}

/// Hears of every step and every trial; `Break` stops the search, what was reported is kept.
pub type Observer<'a> = dyn FnMut(Event) -> ControlFlow<()> + 'a;

pub enum Event<'a> {
    Progress(Progress<'a>),
    Trial(&'a Trial),
}

/// A round of the halving: samples that every survivor gets in it, and who survives it.
struct Round {
    samples: usize,
    /// At most this many, beside the default.
    keep: usize,
    /// None slower than this times the best.
    cutoff: f64,
}

/// The first rounds weed out what is plainly slow at one or two runs each; the last one decides.
const ROUNDS: [Round; 5] = [
    Round { samples: 1, keep: 24, cutoff: 1.6 },
    Round { samples: 2, keep: 12, cutoff: 1.3 },
    Round { samples: 4, keep: 6, cutoff: 1.15 },
    Round { samples: 8, keep: 3, cutoff: 1.08 },
    Round { samples: 20, keep: 3, cutoff: 1.08 },
];

/// The share of the time limit after which no further compilation begins.
const COMPILE_SHARE: f64 = 0.6;

/// A candidate that a killed run found slower than its best by this factor is not measured again.
const KNOWN_SLOW: f64 = 1.25;

struct Contender {
    config: Config,
    is_default: bool,
    check_error: f64,
    samples: Samples,
}

pub fn search(bench: &mut dyn Bench, request: &Request, observer: &mut Observer) -> Result<Outcome> {
    let mut run =
        Run { request, observer, started: Instant::now(), failed: 0, first_failure: None, dropped: Vec::new() };
    let candidates = run.worth_trying();
    let built = run.build(bench, candidates)?;
    let mut contenders = run.check(bench, built)?;
    run.measure(bench, &mut contenders)?;
    run.decide(contenders)
}

struct Run<'a, 'b> {
    request: &'a Request<'a>,
    observer: &'a mut Observer<'b>,
    started: Instant,
    failed: usize,
    first_failure: Option<String>,
    /// Right, but too slow to be measured to the end.
    dropped: Vec<Contender>,
}

impl Run<'_, '_> {
    /// The candidates less those known to fail and those known to be slow; the default is always among them.
    fn worth_trying(&self) -> Vec<Config> {
        let known = self.request.known;
        let best_us = known.iter().filter_map(|trial| trial.median_us()).fold(f64::INFINITY, f64::min);
        let hopeless = |config: &Config| {
            known.iter().filter(|trial| trial.config == *config).any(|trial| match trial.verdict {
                Verdict::Failed { .. } => true,
                Verdict::Measured { median_us } => median_us > KNOWN_SLOW * best_us,
            })
        };
        let (default, others) = match self.request.candidates.split_first() {
            Some((default, others)) => (Some(default), others),
            None => (None, &[][..]),
        };
        default.into_iter().chain(others.iter().filter(|config| !hopeless(config))).cloned().collect()
    }

    fn build(&mut self, bench: &mut dyn Bench, configs: Vec<Config>) -> Result<Vec<Config>> {
        let latest = self.request.time_limit.mul_f64(COMPILE_SHARE);
        let mut spills: Vec<Option<u32>> = vec![None; configs.len()];
        let (mut done, mut broken) = (0, None);
        bench.build(&configs, &mut |index, result| {
            done += 1;
            let step = match result {
                Ok(bytes) => {
                    spills[index] = Some(bytes);
                    Ok(())
                }
                Err(fault) => self.fail(&configs[index], fault),
            };
            match step.and_then(|()| self.report(Phase::Compile, done, configs.len(), None)) {
                Err(error) => {
                    broken = Some(error);
                    ControlFlow::Break(())
                }
                // The default must be there, however long it takes.
                Ok(()) if self.started.elapsed() > latest && spills[0].is_some() => ControlFlow::Break(()),
                Ok(()) => ControlFlow::Continue(()),
            }
        });
        if let Some(error) = broken {
            return Err(error);
        }
        // A kernel that spills waits for its own registers; it is taken only where nothing else is to be had.
        let clean = spills.contains(&Some(0));
        let mut kept = Vec::new();
        for (index, (config, spills)) in configs.into_iter().zip(spills).enumerate() {
            match spills {
                Some(bytes) if clean && bytes > 0 && index > 0 => {
                    self.fail(&config, Fault::Candidate(format!("spills {bytes} bytes of registers")))?;
                }
                Some(_) => kept.push(config),
                None => {}
            }
        }
        Ok(kept)
    }

    fn check(&mut self, bench: &mut dyn Bench, configs: Vec<Config>) -> Result<Vec<Contender>> {
        let total = configs.len();
        let mut contenders = Vec::new();
        for (index, config) in configs.into_iter().enumerate() {
            if self.is_over() && !contenders.is_empty() {
                break;
            }
            match bench.check(&config) {
                Ok(check_error) => contenders.push(Contender {
                    is_default: Some(&config) == self.request.candidates.first(),
                    config,
                    check_error,
                    samples: Samples::default(),
                }),
                Err(fault) => self.fail(&config, fault)?,
            }
            self.report(Phase::Check, index + 1, total, None)?;
        }
        Ok(contenders)
    }

    fn measure(&mut self, bench: &mut dyn Bench, contenders: &mut Vec<Contender>) -> Result<()> {
        self.warm_up(bench, contenders)?;
        for (index, round) in ROUNDS.iter().enumerate() {
            for _ in 0..round.samples {
                // Round-robin: a clock that drifts, drifts for all of them.
                let mut failed = Vec::new();
                for (at, contender) in contenders.iter_mut().enumerate() {
                    if self.is_over() {
                        break;
                    }
                    match bench.sample(&contender.config) {
                        Ok(sample) => contender.samples.push(sample),
                        Err(fault) => {
                            self.fail(&contender.config, fault)?;
                            failed.push(at);
                        }
                    }
                }
                failed.into_iter().rev().for_each(|at| drop(contenders.remove(at)));
                self.report(Phase::Measure, index, ROUNDS.len(), best_of(contenders))?;
            }
            for dropped in halve(contenders, round) {
                let median_us = dropped.samples.median_us();
                self.report_trial(dropped.config.clone(), Verdict::Measured { median_us })?;
                self.dropped.push(dropped);
            }
            if self.is_over() {
                break;
            }
        }
        for kept in contenders.iter().filter(|contender| contender.samples.count() > 0) {
            let median_us = kept.samples.median_us();
            self.report_trial(kept.config.clone(), Verdict::Measured { median_us })?;
        }
        self.report(Phase::Measure, ROUNDS.len(), ROUNDS.len(), best_of(contenders))
    }

    /// One discarded run each: the first launch loads code and fills address translation.
    fn warm_up(&mut self, bench: &mut dyn Bench, contenders: &mut Vec<Contender>) -> Result<()> {
        let mut alive = Vec::with_capacity(contenders.len());
        for contender in contenders.drain(..) {
            if self.is_over() && !contender.is_default {
                continue;
            }
            match bench.sample(&contender.config) {
                Ok(_) => alive.push(contender),
                Err(fault) => self.fail(&contender.config, fault)?,
            }
            self.report(Phase::Measure, 0, ROUNDS.len(), None)?;
        }
        *contenders = alive;
        // The default has a time even when the limit is already over: a record without one would be of no use.
        let default = contenders.iter().position(|contender| contender.is_default).filter(|_| self.is_over());
        if let Some(at) = default {
            match bench.sample(&contenders[at].config) {
                Ok(sample) => contenders[at].samples.push(sample),
                Err(fault) => self.fail(&contenders.remove(at).config, fault)?,
            }
        }
        Ok(())
    }

    /// The fastest, unless the default is as good within the margin and the noise.
    fn decide(self, mut contenders: Vec<Contender>) -> Result<Outcome> {
        contenders.retain(|contender| contender.samples.count() > 0);
        contenders.sort_by(|a, b| a.samples.median_us().total_cmp(&b.samples.median_us()));
        let default = contenders.iter().position(|contender| contender.is_default);
        let default_us = default.map(|at| contenders[at].samples.median_us());
        let winner = match default {
            Some(at) if !timing::beats(&contenders[0].samples, &contenders[at].samples) => at,
            _ => 0,
        };
        if contenders.is_empty() {
            let why = self.first_failure.as_deref().unwrap_or("there was none to try");
            return Err(Error::new(Status::Unsupported, format!("no candidate works: {why}")));
        }
        let winner = contenders.remove(winner);
        let median_us = winner.samples.median_us();
        // Who was dropped early was measured at another moment: its time is told by its ratio to the winner's then.
        let others = contenders.into_iter().chain(self.dropped).map(|other| Timed {
            median_us: median_us * timing::ratio(&other.samples, &winner.samples),
            config: other.config,
        });
        Ok(Outcome {
            spread: winner.samples.spread(),
            check_error: winner.check_error,
            runner_up: others.filter(|other| other.median_us > 0.0).min_by(|a, b| a.median_us.total_cmp(&b.median_us)),
            default_us,
            winner: Timed { config: winner.config, median_us },
        })
    }

    fn is_over(&self) -> bool {
        self.started.elapsed() > self.request.time_limit
    }

    fn report(&mut self, phase: Phase, done: usize, total: usize, best: Option<(&Config, Duration)>) -> Result<()> {
        let progress = Progress { problem: self.request.problem, phase, done, total, failed: self.failed, best };
        continue_or_cancel((self.observer)(Event::Progress(progress)))
    }

    fn report_trial(&mut self, config: Config, verdict: Verdict) -> Result<()> {
        continue_or_cancel((self.observer)(Event::Trial(&Trial { config, verdict })))
    }

    fn fail(&mut self, config: &Config, fault: Fault) -> Result<()> {
        let (reason, end) = match fault {
            Fault::Bench(error) => return Err(error),
            Fault::Candidate(reason) => (reason, None),
            Fault::Poisoned(reason) => {
                let error = Error::new(Status::Cuda, format!("candidate {config}: {reason}"));
                (reason, Some(error))
            }
        };
        self.failed += 1;
        self.first_failure.get_or_insert_with(|| format!("{config}: {reason}"));
        self.report_trial(config.clone(), Verdict::Failed { reason })?;
        end.map_or(Ok(()), Err)
    }
}

impl Trial {
    fn median_us(&self) -> Option<f64> {
        match self.verdict {
            Verdict::Measured { median_us } => Some(median_us),
            Verdict::Failed { .. } => None,
        }
    }
}

/// Takes out and returns those that do not survive the round.
fn halve(contenders: &mut Vec<Contender>, round: &Round) -> Vec<Contender> {
    contenders.sort_by(|a, b| a.samples.median_us().total_cmp(&b.samples.median_us()));
    let best_us = contenders.first().map_or(f64::INFINITY, |best| best.samples.median_us());
    let mut rank = 0;
    contenders
        .extract_if(.., |contender| {
            rank += 1;
            let slow = rank > round.keep || contender.samples.median_us() > round.cutoff * best_us;
            slow && !contender.is_default && contender.samples.count() > 0
        })
        .collect()
}

fn best_of(contenders: &[Contender]) -> Option<(&Config, Duration)> {
    let best = contenders.iter().min_by(|a, b| a.samples.median_us().total_cmp(&b.samples.median_us()))?;
    (best.samples.count() > 0).then(|| (&best.config, Duration::from_secs_f64(best.samples.median_us() * 1e-6)))
}

fn continue_or_cancel(flow: ControlFlow<()>) -> Result<()> {
    match flow {
        ControlFlow::Continue(()) => Ok(()),
        ControlFlow::Break(()) => Err(Error::new(Status::Cancelled, "tuning was stopped; what was done is kept")),
    }
}
