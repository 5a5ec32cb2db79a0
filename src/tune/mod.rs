//! The tuner: the candidates, the search, timing, and the check of results.
//!
//! It is given a problem, a backend and what earlier runs found out, and returns the winner. It knows nothing of
//! records and files: `plan` turns an `Outcome` into a record and keeps the trials that it is told of on the way.

mod arena;
pub mod candidates;
mod check;
mod contest;
mod features;
mod lengths;
mod pages;
mod rig;
mod search;
mod timing;
mod utilisation;
pub mod worker;

pub use crate::backend::Elapsed;
pub use rig::Rig;
pub use search::{Bench, BuildObserver, Event, Fault, Observer, Request, search};
pub use timing::Samples;
pub use utilisation::Floor;
pub use worker::Worker;

use crate::config::{Config, Family};
use crate::problem::Problem;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::time::Duration;

/// Of one problem, where the caller sets none.
pub const DEFAULT_TIME_LIMIT: Duration = Duration::from_secs(20);

/// How a tuning run is done.
#[derive(Clone, Debug)]
pub struct TuneOptions {
    /// When it is over, the best of what has been measured so far is taken.
    pub time_limit: Duration,
    /// Measure again although there is a record, and try again what failed before.
    pub retune: bool,
    /// The process that unproven candidates run in. Without it only configs proven for this architecture are tried
    /// on a GPU; on the CPU, where no candidate can hang the device, it is not used.
    pub worker: Option<worker::Command>,
}

impl Default for TuneOptions {
    fn default() -> Self {
        TuneOptions { time_limit: DEFAULT_TIME_LIMIT, retune: false, worker: None }
    }
}

/// What the tuner is doing, in the order in which it does it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    Compile,
    Check,
    Measure,
}

impl Phase {
    pub const fn name(self) -> &'static str {
        match self {
            Phase::Compile => "compile",
            Phase::Check => "check",
            Phase::Measure => "measure",
        }
    }
}

/// One step forward, for a progress bar. `done` of `total` counts within the phase.
#[derive(Clone, Copy, Debug)]
pub struct Progress<'a> {
    pub problem: &'a Problem,
    pub phase: Phase,
    pub done: usize,
    pub total: usize,
    pub failed: usize,
    pub best: Option<(&'a Config, Duration)>,
}

/// What is known of one candidate. A run that is killed leaves its trials behind for the next one.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Trial {
    pub config: Config,
    pub verdict: Verdict,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Verdict {
    /// It does not compile or agree, or it spills; it is not tried again for any shape of the class.
    Failed { reason: String },
    /// It hung, crashed or did not launch on this problem, which may be too large for it: nothing is said of others.
    FailedHere { reason: String },
    /// It is right and was slower than the best of its run, so that it was dropped or kept to the end.
    Measured {
        median_us: f64,
        /// `utilisation`, where it is known.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        utilisation: Option<f64>,
    },
}

/// The families of what was measured. One whose candidates failed, or were out of time, was not compared with others.
pub fn measured_families(trials: &[Trial]) -> BTreeSet<Family> {
    let measured = trials.iter().filter(|trial| matches!(trial.verdict, Verdict::Measured { .. }));
    measured.map(|trial| trial.config.family).collect()
}

/// A config and its measured time.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Timed {
    pub config: Config,
    pub median_us: f64,
    /// The least time that the device could take over this one (`utilisation`); None where that is not known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub utilisation: Option<f64>,
}

/// What a search found.
#[derive(Clone, Debug)]
pub struct Outcome {
    pub winner: Timed,
    /// Half the interquartile range of the winner's samples over their median.
    pub spread: f64,
    /// Relative error of the winner against the reference, as `check` measures it.
    pub check_error: f64,
    pub runner_up: Option<Timed>,
    /// The heuristic's time; None where its config failed.
    pub default_us: Option<f64>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_family_whose_candidates_all_failed_was_not_measured() {
        let trial = |family, verdict| Trial { config: Config::new(family, [("block_m", 64)]), verdict };
        let why = || "why".to_owned();
        let trials = [
            trial(Family::Sm90, Verdict::Failed { reason: why() }),
            trial(Family::Sm90, Verdict::FailedHere { reason: why() }),
            trial(Family::Sm80, Verdict::Failed { reason: why() }),
            trial(Family::Sm80, Verdict::Measured { median_us: 1.0, utilisation: None }),
        ];
        assert_eq!(measured_families(&trials), [Family::Sm80].into());
    }
}
