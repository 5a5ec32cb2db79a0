//! Outcome: the verdicts on candidates, and the result of a search. `plan` keeps both in records.

use crate::config::{Config, Family};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;

/// The verdict on one candidate. A run that is killed leaves its trials behind for the next one.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Trial {
    pub config: Config,
    pub verdict: Verdict,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Verdict {
    /// It does not compile, or does not agree with the reference. No shape of the class tries it
    /// again.
    Failed { reason: String },
    /// It hung, crashed or did not launch on this problem, which may be too large for it, or spills
    /// more than the default. Other shapes still try it.
    FailedHere { reason: String },
    /// It is right, and was measured until it was dropped or the run ended.
    Measured {
        median_us: f64,
        /// See `utilisation`; None where it is not known.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        utilisation: Option<f64>,
        /// Its time over the default's, in the laps in which both ran. Medians of candidates that
        /// ran in different laps do not compare.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        over_default: Option<f64>,
        /// It dropped out after a few laps, which may all be odd.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        was_brief: bool,
    },
}

/// The families that have a measured config. A family whose candidates all failed, or were not
/// reached in time, was not compared with others.
pub fn measured_families(trials: &[Trial]) -> BTreeSet<Family> {
    let measured = trials.iter().filter(|trial| matches!(trial.verdict, Verdict::Measured { .. }));
    measured.map(|trial| trial.config.family).collect()
}

/// A config and its measured time.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Timed {
    pub config: Config,
    pub median_us: f64,
    /// The least time that the device could take over this one (`utilisation`); None where that is
    /// not known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub utilisation: Option<f64>,
}

/// The result of a search.
#[derive(Clone, Debug)]
pub struct Outcome {
    pub winner: Timed,
    /// Half the interquartile range of the winner's samples over their median.
    pub spread: f64,
    /// Relative error of the winner against the reference, as `check` measures it.
    pub check_error: f64,
    pub runner_up: Option<Timed>,
    /// The time of the heuristic's config; None where it failed.
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
            trial(
                Family::Sm80,
                Verdict::Measured { median_us: 1.0, utilisation: None, over_default: None, was_brief: false },
            ),
        ];
        assert_eq!(measured_families(&trials), [Family::Sm80].into());
    }
}
