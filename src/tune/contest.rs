//! The contest: who is ahead, who drops out after a round, and who wins, from each candidate's
//! samples.
//!
//! It only decides; `search` runs the candidates. Each candidate is compared with the default's
//! samples of the same laps, so that late joiners and a slower clock change nothing.

use super::outcome::{Outcome, Timed, Trial, Verdict};
use super::timing::{self, Samples};
use super::utilisation::Floor;
use crate::config::Config;
use std::time::Duration;

/// A round of successive halving: the samples that each survivor gets, and the rule for surviving.
pub struct Round {
    pub samples: usize,
    /// At most this many survive, beside the default.
    keep: usize,
    /// A survivor takes at most this times the best.
    cutoff: f64,
}

/// The rounds of newcomers: they drop the plainly slow, at one or two runs each.
pub const QUALIFYING: &[Round] =
    &[Round { samples: 1, keep: 24, cutoff: 1.6 }, Round { samples: 2, keep: 12, cutoff: 1.3 }];

/// The rounds of those who qualified; the last one decides.
pub const FINAL: &[Round] = &[
    Round { samples: 4, keep: 6, cutoff: 1.15 },
    Round { samples: 8, keep: 3, cutoff: 1.08 },
    Round { samples: 20, keep: 3, cutoff: 1.08 },
];

pub struct Contender {
    pub config: Config,
    pub is_default: bool,
    /// Bytes that the bench reported (`BuildObserver`).
    pub spill_bytes: u32,
    pub check_error: f64,
    pub samples: Samples,
}

impl Contender {
    /// Whether it dropped out while it qualified. Its few laps may all be odd.
    fn was_brief(&self) -> bool {
        self.samples.count() <= QUALIFYING.iter().map(|round| round.samples).sum()
    }
}

pub struct Contest {
    pub contenders: Vec<Contender>,
    /// Right, but too slow to be measured to the end.
    dropped: Vec<Contender>,
    floor: Option<Floor>,
    /// The bytes that the default spills, which were found to cost little. 0 where it does not
    /// build.
    pub tolerated_spills: u32,
}

impl Contest {
    pub fn new(floor: Option<Floor>) -> Contest {
        Contest { contenders: Vec::new(), dropped: Vec::new(), floor, tolerated_spills: 0 }
    }

    pub fn trial(&self, contender: &Contender) -> Trial {
        let Timed { config, median_us, utilisation } = self.timed(contender);
        let default = self.contenders.iter().find(|other| other.is_default);
        let over_default = default.map(|default| timing::ratio(&contender.samples, &default.samples));
        let over_default = over_default.filter(|ratio| ratio.is_finite());
        let was_brief = contender.was_brief();
        Trial { config, verdict: Verdict::Measured { median_us, utilisation, over_default, was_brief } }
    }

    fn timed(&self, contender: &Contender) -> Timed {
        let Contender { config, samples, .. } = contender;
        let utilisation = samples.utilisation(self.floor);
        Timed { config: config.clone(), median_us: samples.median_us(), utilisation }
    }

    /// Removes the candidates that do not survive the round, or may not win, and returns their
    /// trials.
    pub fn halve(&mut self, round: &Round) -> Vec<Trial> {
        let scores = self.scores();
        let mut sorted = scores.clone();
        sorted.sort_by(f64::total_cmp);
        let best = sorted.first().copied().unwrap_or(f64::INFINITY);
        let last_kept = sorted.get(round.keep.saturating_sub(1)).copied().unwrap_or(f64::INFINITY);
        let limit = last_kept.min(round.cutoff * best);
        let mut at = 0;
        let slow = self.contenders.extract_if(.., |contender| {
            let score = scores[at];
            at += 1;
            score > limit && contender.samples.count() > 0 && !contender.is_default
        });
        let slow: Vec<Contender> = slow.collect();
        let trials = slow.iter().map(|contender| self.trial(contender)).collect();
        self.dropped.extend(slow);
        trials
    }

    pub fn best(&self) -> Option<(&Config, Duration)> {
        let scores = self.scores();
        let ranked = self.contenders.iter().zip(scores).filter(|(_, score)| score.is_finite());
        let (best, _) = ranked.min_by(|a, b| a.1.total_cmp(&b.1))?;
        Some((&best.config, Duration::from_secs_f64(best.samples.median_us() * 1e-6)))
    }

    /// The fastest, unless the default is as good within the margin and the noise. None if nothing
    /// was measured.
    pub fn decide(mut self) -> Option<Outcome> {
        let best = self.best()?.0.clone();
        let may_win = self.may_win();
        self.contenders.retain(|contender| contender.samples.count() > 0);
        let at = |wanted: &dyn Fn(&Contender) -> bool| self.contenders.iter().position(wanted);
        let (best, default) = (at(&|contender| contender.config == best)?, at(&|contender| contender.is_default));
        let default_us = default.map(|default| self.contenders[default].samples.median_us());
        let winner = match default {
            Some(at)
                if may_win(&self.contenders[at])
                    && !timing::beats(&self.contenders[best].samples, &self.contenders[at].samples) =>
            {
                at
            }
            _ => best,
        };
        let winner = self.contenders.remove(winner);
        let timed = self.timed(&winner);
        // The runner-up's time follows from its ratio to the winner's in the laps that both ran.
        // A candidate that dropped out early counts only if no other lasted longer: its few laps
        // may all be odd.
        let others = self.contenders.iter().chain(&self.dropped).filter(|other| may_win(other));
        let others = others.map(|other| (other.was_brief(), timing::ratio(&other.samples, &winner.samples), other));
        let runner_up = others
            .filter(|(_, ratio, _)| ratio.is_finite())
            .min_by(|a, b| a.0.cmp(&b.0).then(a.1.total_cmp(&b.1)))
            .map(|(_, ratio, other)| Timed { median_us: timed.median_us * ratio, ..self.timed(other) });
        Some(Outcome {
            spread: winner.samples.spread(),
            check_error: winner.check_error,
            runner_up,
            default_us,
            winner: timed,
        })
    }

    /// A candidate may win if its kernel spills no more than is tolerated, or if every measured one
    /// spills more.
    fn may_win(&self) -> impl Fn(&Contender) -> bool + use<> {
        let tolerated = self.tolerated_spills;
        let is_clean = move |contender: &Contender| contender.spill_bytes <= tolerated;
        let must_be_clean = self.contenders.iter().any(|other| is_clean(other) && other.samples.count() > 0);
        move |contender| contender.samples.count() > 0 && (is_clean(contender) || !must_be_clean)
    }

    /// Time as a share of the default's, or in microseconds if there is no default. Infinite for a
    /// candidate that may not win.
    fn scores(&self) -> Vec<f64> {
        let may_win = self.may_win();
        let default = self.contenders.iter().find(|contender| contender.is_default && contender.samples.count() > 0);
        let score = |contender: &Contender| match default {
            _ if !may_win(contender) => f64::INFINITY,
            Some(default) => {
                let ratio = timing::ratio(&contender.samples, &default.samples);
                if ratio.is_nan() { f64::INFINITY } else { ratio }
            }
            None => contender.samples.median_us(),
        };
        self.contenders.iter().map(score).collect()
    }
}
