//! The search: finds the fastest candidate whose results are correct.
//!
//! It compiles all candidates in parallel, checks each against the reference, and times the
//! survivors in interleaved rounds. Then it tries neighbours of the best config, and times the
//! remaining candidates until one is clearly the fastest. A `Bench` runs the candidates, in this
//! process (`rig`) or in a child process that may crash (`worker`). `contest` decides which ones
//! stay. The observer receives each trial as soon as it ends.

use super::contest::{Contender, Contest, FINAL, QUALIFYING, Round};
use super::outcome::{Outcome, Trial, Verdict};
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
    /// Builds all configs in parallel. `done` receives each result with its index, in any order. If
    /// `done` returns `Break`, the remaining builds are skipped.
    fn build(&mut self, configs: &[Config], done: &mut BuildObserver);
    /// The candidate's relative error against the reference, on a reduced problem of the same
    /// class.
    fn check(&mut self, config: &Config) -> Result<f64, Fault>;
    /// The time of one run of the full problem, with cold caches.
    fn sample(&mut self, config: &Config) -> Result<Elapsed, Fault>;
}

/// Receives the result of a build: the candidate's index, and the bytes of registers that it spills
/// where the spills delay its products (`Resources::costly_spill_bytes`).
pub type BuildObserver<'a> = dyn FnMut(usize, Result<u32, Fault>) -> ControlFlow<()> + 'a;

/// Why a step failed.
#[derive(Clone, Debug)]
pub enum Fault {
    /// The candidate fails on every problem of the class. The search goes on.
    Candidate(String),
    /// The candidate failed on this problem: it hung, crashed or lost the device. It may work on
    /// another problem of the class.
    Here(String),
    /// As `Here`, and the process that ran it cannot run anything more, so the search ends.
    Poisoned(String),
    /// The bench itself cannot go on: no memory, no compiler, no device.
    Bench(Error),
}

/// What to search.
pub struct Request<'a> {
    pub problem: &'a Problem,
    /// The first is the heuristic's config, the default. It stays to the end, and wins unless
    /// another is clearly faster.
    pub candidates: &'a [Config],
    /// The configs to try next after this one was the fastest.
    pub neighbours: &'a dyn Fn(&Config) -> Vec<Config>,
    /// The trials of earlier runs of these candidates on this problem.
    pub known: &'a [Trial],
    pub time_limit: Duration,
    /// The least possible time, from which utilisation follows; None where it is not known.
    pub floor: Option<Floor>,
}

/// Receives every step and every trial. If it returns `Break`, the search stops, and the trials
/// reported so far are kept.
pub type Observer<'a> = dyn FnMut(Event) -> ControlFlow<()> + 'a;

#[derive(Clone, Copy, Debug)]
pub enum Event<'a> {
    Progress(Progress<'a>),
    Trial(&'a Trial),
    /// The trial of an earlier run, because of which this run does not try its config.
    PassedOver(&'a Trial),
}

/// The share of the time limit after which no further compilation begins.
const COMPILE_SHARE: f64 = 0.6;

/// A candidate is not measured again if an earlier run found it slower than the best by this
/// factor.
const KNOWN_SLOW: f64 = 1.25;

/// How often the search tries neighbours of the best config, and how many it tries each time.
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
    /// Whether a kernel other than the default was built that spills no more than is tolerated.
    is_clean: bool,
}

impl<'a> Run<'a, '_> {
    /// Builds, checks and warms up the configs that this run has not tried. Returns false if there
    /// are none.
    fn admit(&mut self, bench: &mut dyn Bench, configs: &[Config]) -> Result<bool> {
        let is_first = self.tried.is_empty();
        let most = if is_first { usize::MAX } else { NEIGHBOURS };
        let mut fresh: Vec<Config> = Vec::new();
        for config in configs {
            if fresh.len() == most {
                break;
            }
            if self.tried.contains(config) {
                continue;
            }
            self.tried.push(config.clone());
            match self.hopeless(config).filter(|_| !self.is_default(config)) {
                Some(trial) => continue_or_cancel((self.observer)(Event::PassedOver(trial)))?,
                None => fresh.push(config.clone()),
            }
        }
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

    /// The trial by which an earlier run found that the config fails or is slow.
    fn hopeless(&self, config: &Config) -> Option<&'a Trial> {
        let known = self.request.known;
        let best_us = known.iter().filter_map(Trial::median_us).fold(f64::INFINITY, f64::min);
        known.iter().filter(|trial| trial.config == *config).find(|trial| match trial.verdict {
            Verdict::Failed { .. } | Verdict::FailedHere { .. } => true,
            Verdict::Measured { median_us, .. } => median_us > KNOWN_SLOW * best_us,
        })
    }

    /// The configs that built and may stay, with the bytes of registers that each spills.
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
                // Past the time for compiling, the run still waits for the default. If the default
                // fails, it waits for one config that builds.
                Ok(()) if self.is_late() && !awaits_default && (!has_default || spills.iter().any(Option::is_some)) => {
                    ControlFlow::Break(())
                }
                Ok(()) => ControlFlow::Continue(()),
            }
        });
        if let Some(error) = broken {
            return Err(error);
        }
        if has_default {
            self.contest.tolerated_spills = spills.first().copied().flatten().unwrap_or(0);
        }
        // A kernel that spills more than the default is slow. It is measured only if every other
        // one built so far does, so that one remains if the default fails.
        let tolerated = self.contest.tolerated_spills;
        let others = if has_default { spills.get(1..).unwrap_or_default() } else { &spills[..] };
        self.is_clean |= others.iter().flatten().any(|bytes| *bytes <= tolerated);
        let mut kept = Vec::new();
        for (config, spills) in configs.into_iter().zip(spills) {
            match spills {
                Some(bytes) if self.is_clean && bytes > tolerated => {
                    // Another shape of the class may have another default.
                    let reason = format!("spills {bytes} bytes of registers, over {tolerated}");
                    self.fail(&config, Fault::Here(reason))?;
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

    /// Runs each newcomer once and discards the time, because a first launch loads the code and
    /// fills the TLB.
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
                self.report_trial(&dropped)?;
            }
        }
        Ok(())
    }

    /// Takes one sample of each contender, round-robin, so that a drifting clock affects all alike.
    fn take_turns(&mut self, bench: &mut dyn Bench) -> Result<()> {
        self.lap += 1;
        let mut at = 0;
        while let Some(contender) = self.contest.contenders.get(at) {
            // The default gets a sample even after the time limit, so that the run has a time to
            // record.
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
        let measured: Vec<_> = measured.map(|contender| self.contest.trial(contender)).collect();
        for trial in measured {
            self.report_trial(&trial)?;
        }
        let why = self.first_failure.unwrap_or_else(|| "there was no candidate to try".to_owned());
        self.contest.decide().ok_or_else(|| Error::new(Status::Unsupported, format!("no candidate works: {why}")))
    }

    fn is_over(&self) -> bool {
        self.started.elapsed() > self.request.time_limit
    }

    /// Whether it is too late to start another compilation.
    fn is_late(&self) -> bool {
        self.started.elapsed() > self.request.time_limit.mul_f64(COMPILE_SHARE)
    }

    fn report(&mut self, phase: Phase, done: usize, total: usize) -> Result<()> {
        let best = self.contest.best();
        let progress = Progress { problem: self.request.problem, phase, done, total, failed: self.failed, best };
        continue_or_cancel((self.observer)(Event::Progress(progress)))
    }

    fn report_trial(&mut self, trial: &Trial) -> Result<()> {
        continue_or_cancel((self.observer)(Event::Trial(trial)))
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
        self.report_trial(&Trial { config: config.clone(), verdict })?;
        end.map_or(Ok(()), Err)
    }
}

/// Turns a failure of the class into one of this problem. Only the check speaks for the class,
/// since it runs on a reduced problem; a failure on the full problem may be due to its size.
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
        ControlFlow::Break(()) => {
            Err(Error::new(Status::Cancelled, "tuning was stopped; finished measurements are kept"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Family;
    use crate::problem::{Dtype, Pass};

    /// Each config takes `block_m` microseconds.
    struct Steady;

    impl Bench for Steady {
        fn build(&mut self, configs: &[Config], done: &mut BuildObserver) {
            for index in 0..configs.len() {
                assert!(done(index, Ok(0)).is_continue());
            }
        }

        fn check(&mut self, _: &Config) -> Result<f64, Fault> {
            Ok(0.0)
        }

        fn sample(&mut self, config: &Config) -> Result<Elapsed, Fault> {
            let us = config.get("block_m").unwrap_or_default();
            Ok(Elapsed { time: Duration::from_micros(us.into()), sm_clock_hz: None })
        }
    }

    #[test]
    fn each_candidate_is_reported_once_with_its_ratio_or_the_trial_that_speaks_against_it() {
        let config = |us| Config::new(Family::Cpu, [("block_m", us)]);
        let failed = Trial { config: config(1), verdict: Verdict::Failed { reason: "wrong".into() } };
        let problem = Problem::dense(Pass::Forward, Dtype::Fp32, 1, 1, 16, 8);
        let candidates = [config(100), config(1), config(80), config(300)];
        let request = Request {
            problem: &problem,
            candidates: &candidates,
            neighbours: &|_| vec![config(1), config(80)],
            known: std::slice::from_ref(&failed),
            time_limit: Duration::from_secs(60),
            floor: None,
        };
        let (mut ratios, mut passed_over) = (Vec::new(), Vec::new());
        let outcome = search(&mut Steady, &request, &mut |event| {
            match event {
                Event::Trial(Trial { config, verdict: Verdict::Measured { over_default, .. } }) => {
                    ratios.push((config.get("block_m"), *over_default));
                }
                Event::PassedOver(trial) => passed_over.push(trial.clone()),
                Event::Trial(_) | Event::Progress(_) => {}
            }
            ControlFlow::Continue(())
        });
        ratios.sort_by_key(|(block_m, _)| *block_m);
        assert_eq!(ratios, [(Some(80), Some(0.8)), (Some(100), Some(1.0)), (Some(300), Some(3.0))]);
        assert_eq!(passed_over, [failed]);
        assert_eq!(outcome.map(|outcome| outcome.winner.config).ok(), Some(config(80)));
    }
}
