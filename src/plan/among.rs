//! Among: which of a few compiled configs serves a problem best, where no other can be compiled.
//!
//! `lookup` names the config that it would compile. Without a compiler the plan must take one that
//! is there. Nothing here builds.

use super::canonical::Canonical;
use super::key;
use super::lookup::{self, Choice, Known, Source};
use crate::config::Config;
use crate::device::Device;
use crate::family;
use crate::problem::Problem;

/// A config whose kernels are there.
#[derive(Clone, Debug)]
pub struct Available {
    pub config: Config,
    /// The problem that it was chosen for, of the same class.
    pub problem: Problem,
}

/// The available configs that run a problem on a device, best first: by kernel family, the
/// preferred one first, then by predicted time, then by the distance to the problem that each was
/// chosen for. None for a problem that follows no record: another config would give other bits.
/// `is_there` says whether the kernels of a config for another shape of the class are there too.
pub fn choices(
    known: &Known,
    problem: &Canonical,
    device: &Device,
    available: &[Available],
    is_there: impl Fn(&Config) -> bool,
) -> Vec<Choice> {
    if problem.follows_no_record().is_some() {
        return Vec::new();
    }
    let families = family::families(problem, device);
    let mut ranked: Vec<Ranked> = Vec::new();
    for one in available {
        // Knobs that follow from the shape may be in no kernel's text, such as a launch's number of
        // splits. The carried-over config then has the same kernels, unless it splits and the other
        // does not, or has other tiles.
        let carried_over = family::carried_over(&one.config, &one.problem, problem, device);
        let carried_over = (carried_over != one.config && is_there(&carried_over)).then_some(carried_over);
        for config in carried_over.into_iter().chain([one.config.clone()]) {
            if ranked.iter().any(|other| other.config == config) || family::check(problem, &config, device).is_err() {
                continue;
            }
            ranked.push(Ranked {
                family: families.iter().position(|family| *family == config.family),
                us: lookup::predicted_us(known, problem, &config, device),
                distance: key::distance(&one.problem, problem),
                config,
            });
        }
    }
    ranked.sort_by(|a, b| {
        let us = |ranked: &Ranked| ranked.us.unwrap_or(f64::INFINITY);
        a.family.cmp(&b.family).then(us(a).total_cmp(&us(b))).then(a.distance.total_cmp(&b.distance))
    });
    let count = ranked.len();
    ranked.into_iter().map(|ranked| ranked.choice(count)).collect()
}

struct Ranked {
    /// Place of the config's family among those that serve the problem.
    family: Option<usize>,
    us: Option<f64>,
    distance: f64,
    config: Config,
}

impl Ranked {
    fn choice(self, count: usize) -> Choice {
        let why = match self.us {
            Some(us) => format!("{us:.1} us predicted"),
            None => "the nearest shape".to_owned(),
        };
        Choice {
            config: self.config,
            source: Source::Pack,
            reason: format!(
                "nothing can be compiled here, and the best choice is not in the pack: {why}, of {count} configs"
            ),
            record: None,
            is_exact: false,
        }
    }
}
