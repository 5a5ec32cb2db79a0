//! The decisions of the search, on a bench with made-up times, faults and noise, and on workers
//! that misbehave.

use flashtune::config::{Config, Family};
use flashtune::error::{Error, Status};
use flashtune::problem::{Dtype, Pass, Problem};
use flashtune::tune::worker;
use flashtune::tune::{
    Bench, BuildObserver, Elapsed, Event, Fault, Floor, Outcome, Request, Trial, Verdict, Worker, search,
};
use std::collections::HashMap;
use std::ops::ControlFlow;
use std::time::{Duration, Instant};

const PROBLEM: Problem = Problem::dense(Pass::Forward, Dtype::Bf16, 1, 8, 512, 64);

/// 40 us at the clock of `elapsed`.
const FLOOR: Option<Floor> = Some(Floor::Cycles(40_000.0));

/// Configs are told apart by block_m; block_m 64 is the default.
fn config(block_m: u32) -> Config {
    Config::new(Family::Sm80, [("block_m", block_m)])
}

/// How a made-up candidate behaves.
#[derive(Clone, Copy)]
enum Behaviour {
    /// Takes this many microseconds, with noise up to the given share.
    Takes(f64, f64),
    FailsToBuild,
    /// Takes these microseconds and spills these bytes.
    Spills(f64, u32),
    IsWrong,
    WrongAndSpills(u32),
    FailsWhenTimed,
    LosesTheDevice,
}
use Behaviour::*;

struct FakeBench {
    behaviours: HashMap<Config, Behaviour>,
    random: u64,
    built: Vec<Config>,
    sampled: Vec<Config>,
    /// Wall time that a sample takes.
    sample_cost: Duration,
}

impl FakeBench {
    fn new(behaviours: &[(u32, Behaviour)]) -> FakeBench {
        FakeBench {
            behaviours: behaviours.iter().map(|(block_m, behaviour)| (config(*block_m), *behaviour)).collect(),
            random: 1,
            built: Vec::new(),
            sampled: Vec::new(),
            sample_cost: Duration::ZERO,
        }
    }

    /// Uniform in [-1, 1].
    fn noise(&mut self) -> f64 {
        self.random = self.random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.random >> 40) as f64 / (1 << 23) as f64 - 1.0
    }
}

impl Bench for FakeBench {
    fn build(&mut self, configs: &[Config], done: &mut BuildObserver) {
        for (index, config) in configs.iter().enumerate() {
            self.built.push(config.clone());
            let result = match self.behaviours[config] {
                FailsToBuild => Err(Fault::Candidate("error: no such instruction".into())),
                Spills(_, bytes) | WrongAndSpills(bytes) => Ok(bytes),
                _ => Ok(0),
            };
            if done(index, result).is_break() {
                return;
            }
        }
    }

    fn check(&mut self, config: &Config) -> Result<f64, Fault> {
        match self.behaviours[config] {
            IsWrong | WrongAndSpills(_) => Err(Fault::Candidate("Out is off by 3.0e-1".into())),
            LosesTheDevice => Err(Fault::Poisoned("an illegal memory access was encountered".into())),
            _ => Ok(0.001),
        }
    }

    fn sample(&mut self, config: &Config) -> Result<Elapsed, Fault> {
        self.sampled.push(config.clone());
        std::thread::sleep(self.sample_cost);
        match self.behaviours[config] {
            Takes(us, share) => Ok(elapsed(us * (1.0 + share * self.noise()))),
            Spills(us, _) => Ok(elapsed(us)),
            _ => Err(Fault::Candidate("misaligned address".into())),
        }
    }
}

/// Time at a clock of 1 GHz.
fn elapsed(us: f64) -> Elapsed {
    Elapsed { time: Duration::from_secs_f64(us * 1e-6), sm_clock_hz: Some(1e9) }
}

struct Report {
    outcome: Result<Outcome, Error>,
    trials: Vec<Trial>,
}

impl Report {
    /// Whether the failure is stored for this problem rather than for its class.
    fn failed_here(&self, block_m: u32) -> bool {
        let failed = self.trials.iter().find(|trial| trial.config == config(block_m)).unwrap();
        matches!(failed.verdict, Verdict::FailedHere { .. })
    }

    fn winner(&self) -> u32 {
        self.outcome.as_ref().unwrap().winner.config.get("block_m").unwrap()
    }

    fn failure(&self, block_m: u32) -> Option<&str> {
        self.trials.iter().find(|trial| trial.config == config(block_m)).and_then(|trial| match &trial.verdict {
            Verdict::Failed { reason } | Verdict::FailedHere { reason } => Some(reason.as_str()),
            Verdict::Measured { .. } => None,
        })
    }
}

fn run_with(bench: &mut dyn Bench, candidates: &[u32], known: &[Trial], limit: Duration, steps: usize) -> Report {
    let candidates: Vec<Config> = candidates.iter().map(|block_m| config(*block_m)).collect();
    let request = Request {
        problem: &PROBLEM,
        candidates: &candidates,
        neighbours: &|_| Vec::new(),
        known,
        time_limit: limit,
        floor: FLOOR,
    };
    let (mut trials, mut left) = (Vec::new(), steps);
    let outcome = search(bench, &request, &mut |event| {
        if let Event::Trial(trial) = event {
            trials.push(trial.clone());
        }
        left -= 1;
        if left == 0 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    });
    Report { outcome, trials }
}

fn run(bench: &mut dyn Bench, candidates: &[u32]) -> Report {
    run_with(bench, candidates, &[], Duration::from_secs(60), usize::MAX)
}

#[test]
fn fastest_correct_candidate_wins() {
    let mut bench = FakeBench::new(&[
        (64, Takes(100.0, 0.01)),
        (16, Takes(120.0, 0.01)),
        (32, Takes(80.0, 0.01)),
        (128, Takes(90.0, 0.01)),
        (256, IsWrong),
    ]);
    let report = run(&mut bench, &[64, 16, 32, 128, 256]);
    assert_eq!(report.winner(), 32);
    let outcome = report.outcome.as_ref().unwrap();
    assert_eq!(outcome.runner_up.as_ref().unwrap().config, config(128));
    let default_us = outcome.default_us.unwrap();
    assert!((99.0..101.0).contains(&default_us), "{default_us}");
    assert_eq!(report.failure(256), Some("Out is off by 3.0e-1"));
    // Every measured config is reported with its share of the ceiling: 40 us out of 80, 90 and 120.
    let u = |m| {
        report.trials.iter().find(|trial| trial.config == config(m)).and_then(|trial| match trial.verdict {
            Verdict::Measured { utilisation, .. } => utilisation,
            _ => None,
        })
    };
    for (block_m, share) in [(32, 0.5), (128, 0.444), (16, 0.333)] {
        assert!((u(block_m).unwrap() - share).abs() < 0.01, "{block_m}: {:?}", u(block_m));
    }
    assert_eq!((outcome.winner.utilisation, u(256)), (u(32), None));
    assert!(!bench.sampled.contains(&config(256)), "a config that gives wrong results is never timed");
}

#[test]
fn the_default_is_kept_when_the_others_are_within_the_noise() {
    // Eleven candidates of equal speed, as noisy as a busy machine. The best of eleven medians is
    // not really faster.
    for seed in 0..40 {
        let others: Vec<u32> = (1..=10).collect();
        let mut behaviours: Vec<(u32, Behaviour)> = others.iter().map(|m| (*m, Takes(100.0, 0.15))).collect();
        behaviours.push((64, Takes(100.0, 0.15)));
        let mut bench = FakeBench::new(&behaviours);
        bench.random = seed;
        let candidates: Vec<u32> = std::iter::once(64).chain(others).collect();
        let report = run(&mut bench, &candidates);
        // The margin is two standard errors for several challengers. A false winner may pass, but
        // then it is as fast.
        let outcome = report.outcome.unwrap();
        assert!(outcome.winner.config == config(64) || outcome.winner.median_us > 85.0);
    }
    let mut bench = FakeBench::new(&[(64, Takes(100.0, 0.0)), (32, Takes(98.5, 0.0))]);
    assert_eq!(run(&mut bench, &[64, 32]).winner(), 64, "1.5 % is within the margin");
}

#[test]
fn drifting_clock_favours_no_candidate() {
    struct Drifting(FakeBench, f64);
    impl Bench for Drifting {
        fn build(&mut self, configs: &[Config], done: &mut BuildObserver) {
            self.0.build(configs, done);
        }
        fn check(&mut self, config: &Config) -> Result<f64, Fault> {
            self.0.check(config)
        }
        fn sample(&mut self, config: &Config) -> Result<Elapsed, Fault> {
            // Every run takes 0.5 % longer than the previous one.
            self.1 *= 1.005;
            let Elapsed { time, sm_clock_hz } = self.0.sample(config)?;
            Ok(Elapsed { time: time.mul_f64(self.1), sm_clock_hz })
        }
    }
    let behaviours = [(64, Takes(100.0, 0.0)), (32, Takes(90.0, 0.0)), (16, Takes(95.0, 0.0)), (8, Takes(104.0, 0.0))];
    for order in [[64, 32, 16, 8], [64, 8, 16, 32]] {
        let mut bench = Drifting(FakeBench::new(&behaviours), 1.0);
        assert_eq!(run(&mut bench, &order).winner(), 32);
    }
}

#[test]
fn the_search_climbs_from_neighbour_to_neighbour() {
    // Time falls towards block_m 40. Only 64 and 80 are candidates at first, and four steps lead
    // from 64 to 60, not to 40.
    let behaviours: Vec<(u32, Behaviour)> =
        (1..=100u32).map(|m| (m, Takes(100.0 + 10.0 * f64::from(m.abs_diff(40)), 0.0))).collect();
    let neighbours = |of: &Config| vec![config(of.get("block_m").unwrap() - 1), config(of.get("block_m").unwrap() + 1)];
    let candidates = [config(64), config(80)];
    let climb = |behaviours: &[(u32, Behaviour)], limit| {
        let mut bench = FakeBench::new(behaviours);
        let request = Request {
            problem: &PROBLEM,
            candidates: &candidates,
            neighbours: &neighbours,
            known: &[],
            time_limit: limit,
            floor: None,
        };
        let outcome = search(&mut bench, &request, &mut |_| ControlFlow::Continue(())).unwrap();
        (outcome.winner.config.get("block_m").unwrap(), bench.built.len())
    };
    let minute = Duration::from_secs(60);
    assert_eq!(climb(&behaviours, minute).0, 60);
    // The search stays and ends if all neighbours are slower.
    let mut valley = behaviours.clone();
    valley[62] = (63, IsWrong);
    valley[64] = (65, FailsToBuild);
    assert_eq!(climb(&valley, minute), (64, 4));
    assert_eq!(climb(&behaviours, Duration::ZERO), (64, 1));
}

#[test]
fn slow_candidates_are_dropped_early() {
    let mut behaviours: Vec<(u32, Behaviour)> = (1..=40).map(|m| (m, Takes(300.0 + f64::from(m), 0.0))).collect();
    behaviours.extend([(64, Takes(100.0, 0.0)), (65, Takes(97.0, 0.0))]);
    let mut bench = FakeBench::new(&behaviours);
    let candidates: Vec<u32> = std::iter::once(64).chain(1..=40).chain([65]).collect();
    let report = run(&mut bench, &candidates);
    assert_eq!(report.winner(), 65);
    // One warm-up and one run.
    assert_eq!(bench.sampled.iter().filter(|c| **c == config(7)).count(), 2);
    assert!(bench.sampled.iter().filter(|c| **c == config(65)).count() > 20);
}

#[test]
fn failures_are_reported_with_their_reasons_and_do_not_end_the_search() {
    let mut bench = FakeBench::new(&[
        (64, Takes(100.0, 0.0)),
        (1, FailsToBuild),
        (2, IsWrong),
        (3, FailsWhenTimed),
        (4, Spills(50.0, 64)),
        (5, Takes(80.0, 0.0)),
    ]);
    let report = run(&mut bench, &[64, 1, 2, 3, 4, 5]);
    assert_eq!(report.winner(), 5);
    assert_eq!(report.failure(1), Some("error: no such instruction"));
    assert_eq!(report.failure(3), Some("misaligned address"));
    assert_eq!(report.failure(4), Some("spills 64 bytes of registers, over 0"));
    assert_eq!(report.failure(5), None);
    assert_eq!([1, 2, 3, 4].map(|block_m| report.failed_here(block_m)), [false, false, true, true]);
}

#[test]
fn kernel_may_spill_as_many_bytes_as_the_default() {
    let winner = |behaviours: &[(u32, Behaviour)]| {
        let candidates: Vec<u32> = behaviours.iter().map(|(block_m, _)| *block_m).collect();
        run(&mut FakeBench::new(behaviours), &candidates).winner()
    };
    assert_eq!(winner(&[(64, Spills(100.0, 8)), (1, Takes(230.0, 0.0))]), 64);
    assert_eq!(winner(&[(64, Spills(100.0, 8)), (1, Spills(80.0, 8)), (2, Spills(50.0, 12))]), 1);
    assert_eq!(winner(&[(64, Takes(100.0, 0.0)), (1, Spills(50.0, 8))]), 64);
    assert_eq!(winner(&[(64, WrongAndSpills(8)), (1, Spills(80.0, 8)), (2, Takes(90.0, 0.0))]), 1);
    assert_eq!(winner(&[(64, WrongAndSpills(8)), (1, Spills(80.0, 12))]), 1, "nothing else is left");
}

#[test]
fn without_the_default_a_spilling_kernel_wins_if_all_spill() {
    let mut bench = FakeBench::new(&[(64, FailsToBuild), (1, Spills(50.0, 64)), (2, Spills(40.0, 8))]);
    assert_eq!(run(&mut bench, &[64, 1, 2]).winner(), 2);
}

#[test]
fn late_kernel_without_spills_wins_over_spilling_ones_without_the_default() {
    let mut bench = FakeBench::new(&[(64, FailsToBuild), (1, Spills(40.0, 64)), (2, Takes(100.0, 0.0))]);
    let request = Request {
        problem: &PROBLEM,
        candidates: &[config(64), config(1)],
        neighbours: &|_| vec![config(2)],
        known: &[],
        time_limit: Duration::from_secs(60),
        floor: None,
    };
    let outcome = search(&mut bench, &request, &mut |_| ControlFlow::Continue(())).unwrap();
    assert_eq!((outcome.winner.config, outcome.runner_up), (config(2), None));
}

#[test]
fn broken_default_leaves_the_best_of_the_others() {
    let mut bench = FakeBench::new(&[(64, IsWrong), (1, Takes(90.0, 0.0)), (2, Takes(80.0, 0.0))]);
    let report = run(&mut bench, &[64, 1, 2]);
    assert_eq!(report.winner(), 2);
    assert_eq!(report.outcome.unwrap().default_us, None);
}

#[test]
fn first_reason_is_reported_if_all_fail() {
    let mut bench = FakeBench::new(&[(64, FailsToBuild), (1, IsWrong)]);
    let error = run(&mut bench, &[64, 1]).outcome.unwrap_err();
    assert_eq!(error.status, Status::Unsupported);
    assert!(error.message.contains("no such instruction"), "{error}");
}

#[test]
fn lost_device_ends_the_search_in_this_process() {
    let mut bench = FakeBench::new(&[(64, Takes(100.0, 0.0)), (1, LosesTheDevice), (2, Takes(80.0, 0.0))]);
    let report = run(&mut bench, &[64, 1, 2]);
    assert_eq!(report.failure(1), Some("an illegal memory access was encountered"));
    assert_eq!(report.outcome.unwrap_err().status, Status::Cuda);
}

#[test]
fn time_limit_ends_the_search_with_the_best_measured_so_far() {
    let behaviours: Vec<(u32, Behaviour)> = (1..=64).map(|m| (m, Takes(100.0, 0.0))).collect();
    let mut bench = FakeBench::new(&behaviours);
    bench.sample_cost = Duration::from_millis(5);
    let candidates: Vec<u32> = std::iter::once(64).chain(1..=63).collect();
    let started = Instant::now();
    let report = run_with(&mut bench, &candidates, &[], Duration::from_millis(100), usize::MAX);
    assert_eq!(report.winner(), 64);
    assert!(report.outcome.unwrap().default_us.is_some());
    // 64 warm-ups alone would take 320 ms and a whole search 3 s; the rest is a margin for a busy
    // machine.
    assert!(bench.sampled.len() < 64, "{} samples in {:?}", bench.sampled.len(), started.elapsed());
}

#[test]
fn a_time_limit_of_zero_still_measures_the_default() {
    let mut bench = FakeBench::new(&[(64, Takes(100.0, 0.0)), (1, Takes(10.0, 0.0))]);
    let report = run_with(&mut bench, &[64, 1], &[], Duration::ZERO, usize::MAX);
    assert_eq!(report.winner(), 64);
    assert!((99.0..101.0).contains(&report.outcome.unwrap().winner.median_us));
}

#[test]
fn default_that_does_not_compile_does_not_extend_the_time_limit() {
    let mut bench =
        FakeBench::new(&[(64, FailsToBuild), (1, FailsToBuild), (2, Takes(10.0, 0.0)), (3, Takes(9.0, 0.0))]);
    // The limit is over from the start, so compilation ends with the first config that builds.
    let _ = run_with(&mut bench, &[64, 1, 2, 3], &[], Duration::ZERO, usize::MAX);
    assert_eq!(bench.built, [64, 1, 2].map(config));
}

#[test]
fn resumed_run_repeats_neither_failed_nor_slow_candidates() {
    let behaviours =
        [(64, Takes(100.0, 0.0)), (1, IsWrong), (2, Takes(200.0, 0.0)), (3, Takes(80.0, 0.0)), (4, Takes(90.0, 0.0))];
    let known = |m, verdict| Trial { config: config(m), verdict };
    let measured = |m, median_us| {
        known(m, Verdict::Measured { median_us, utilisation: None, over_default: None, was_brief: false })
    };
    let failed = |m| known(m, Verdict::Failed { reason: "before".into() });
    let known = [failed(1), measured(2, 200.0), measured(3, 80.0), measured(64, 100.0)];
    let mut bench = FakeBench::new(&behaviours);
    let report = run_with(&mut bench, &[64, 1, 2, 3, 4], &known, Duration::from_secs(60), usize::MAX);
    assert_eq!(report.winner(), 3);
    assert_eq!(bench.built, [64, 3, 4].map(config));
    // A default that failed before is tried again, because no other config is sure to work.
    let mut bench = FakeBench::new(&behaviours);
    let report = run_with(&mut bench, &[64, 3], &[failed(64)], Duration::from_secs(60), usize::MAX);
    assert_eq!(bench.built, [64, 3].map(config));
    assert_eq!(report.winner(), 3);
}

#[test]
fn stopped_run_reports_its_trials_and_resumes_to_the_same_winner() {
    let behaviours = [
        (64, Takes(100.0, 0.0)),
        (1, FailsToBuild),
        (2, IsWrong),
        (3, Takes(80.0, 0.0)),
        (4, Takes(300.0, 0.0)),
        (5, Takes(90.0, 0.0)),
    ];
    let candidates = [64, 1, 2, 3, 4, 5];
    for steps in 1..40 {
        let mut bench = FakeBench::new(&behaviours);
        let stopped = run_with(&mut bench, &candidates, &[], Duration::from_secs(60), steps);
        let Err(error) = &stopped.outcome else { continue };
        assert_eq!(error.status, Status::Cancelled);
        let mut bench = FakeBench::new(&behaviours);
        let resumed = run_with(&mut bench, &candidates, &stopped.trials, Duration::from_secs(60), usize::MAX);
        assert_eq!(resumed.winner(), 3, "stopped after {steps} steps");
        for failed in stopped.trials.iter().filter(|trial| !matches!(trial.verdict, Verdict::Measured { .. })) {
            assert!(!bench.built.contains(&failed.config), "{} is tried again", failed.config);
        }
    }
}

/// A worker that answers correctly, except that checking block_m 13 and building block_m 17 do
/// `misdeed`.
fn shell_worker(misdeed: &str) -> Worker {
    let script = format!(
        r#"
        read -r problem; echo '"ready"'
        while read -r question; do
            case "$question" in
                *'"build"'*'"block_m":17}}'*) {misdeed} ;;
                *'"build"'*)
                    count=$(printf '%s' "$question" | grep -o family | wc -l); i=0
                    while [ $i -lt $count ]; do
                        echo "{{\"built\":{{\"index\":$i,\"spill_bytes\":0}}}}"; i=$((i + 1))
                    done ;;
                *'"check"'*'"block_m":13}}'*) {misdeed} ;;
                *'"check"'*) echo 'a line that a library printed'; echo '{{"checked":{{"error":0.001}}}}' ;;
                *'"sample"'*'"block_m":32}}'*) echo '{{"sampled":{{"ns":80000}}}}' ;;
                *'"sample"'*) echo '{{"sampled":{{"ns":100000}}}}' ;;
            esac
        done
        "#
    );
    let args = vec!["-c".into(), script.into()];
    let (patience, build_patience) = (Duration::from_millis(800), Duration::from_secs(60));
    Worker::new(worker::Command { program: "sh".into(), args, patience, build_patience }, &PROBLEM)
}

#[test]
fn hanging_candidate_is_killed_without_ending_the_search() {
    let report = run(&mut shell_worker("exec sleep 1000"), &[64, 13, 32]);
    assert_eq!(report.winner(), 32);
    let reason = report.failure(13).unwrap();
    assert!(reason.contains("hung") && reason.contains("800ms"), "{reason}");
    assert!(report.failed_here(13));
}

#[test]
fn crashing_candidate_is_recorded_with_its_signal() {
    let report = run(&mut shell_worker("kill -SEGV $$"), &[64, 13, 32]);
    assert_eq!(report.winner(), 32);
    let reason = report.failure(13).unwrap();
    assert!(reason.contains("signal 11"), "{reason}");
    assert!(report.failed_here(13));
}

#[test]
fn candidate_that_crashes_the_compiler_is_identified_in_its_batch() {
    let report = run(&mut shell_worker("exit 9"), &[64, 32, 17]);
    assert_eq!(report.winner(), 32);
    assert!(report.failure(17).unwrap().contains("ended with 9"), "{:?}", report.failure(17));
    assert!(!report.failed_here(17), "the compiler does not see the problem's size");
    assert_eq!(report.failure(32), None);
}

#[test]
fn candidate_that_loses_the_device_costs_one_worker() {
    let misdeed = r#"echo '{"failed":{"candidate":{"reason":"illegal address","poisoned":true}}}'"#;
    let report = run(&mut shell_worker(misdeed), &[64, 13, 32]);
    assert_eq!(report.winner(), 32);
    assert_eq!(report.failure(13), Some("illegal address"));
    assert!(report.failed_here(13));
}

#[test]
fn worker_that_cannot_start_ends_the_search() {
    let command = |program: &str, args: &[&str]| worker::Command {
        program: program.into(),
        args: args.iter().map(Into::into).collect(),
        patience: Duration::from_millis(800),
        build_patience: Duration::from_millis(800),
    };
    let missing = run(&mut Worker::new(command("/nowhere/flashtune", &[]), &PROBLEM), &[64, 32]).outcome.unwrap_err();
    assert!(missing.message.contains("/nowhere/flashtune"), "{missing}");
    let quits = run(&mut Worker::new(command("sh", &["-c", "exit 3"]), &PROBLEM), &[64, 32]).outcome.unwrap_err();
    assert!(quits.message.contains("ended with 3"), "{quits}");
    let script = r#"read p; echo '"ready"'; read q; echo '{"not_built":{"index":0,"failure":{"child":{"status":5,"message":"no libnvrtc"}}}}'; read q"#;
    let error = run(&mut Worker::new(command("sh", &["-c", script]), &PROBLEM), &[64, 32]).outcome.unwrap_err();
    assert_eq!((error.status, error.message.as_str()), (Status::NoCompiler, "no libnvrtc"));
}
