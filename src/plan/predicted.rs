//! Predicted: the time of a config on a shape that was not measured, from a family's model of tiles
//! and waves (`family::work`) and the records nearest to the shape.
//!
//! A record corrects the model three ways. Its winner and runner-up have a measured time there. Any
//! other config that fits the record's shape was not faster there than the winner, so its
//! correction is at least what makes it as slow. A config that does not fit has the winner's.
//! Several near records weigh by nearness. Without a record of the class the model stands alone.
//! Nothing here decides; `lookup` does.

use super::key;
use super::record::Record;
use crate::config::Config;
use crate::device::Device;
use crate::family;
use crate::problem::Problem;
use std::sync::Arc;

/// Records that correct a prediction.
const MOST_RECORDS: usize = 4;

/// By how much a bound may exceed the time that it bounds, as a share of it.
const ROUNDING: f64 = 1e-9;

/// A record of a problem's class, with the config that it gives the problem.
#[derive(Clone)]
pub struct Fitting {
    pub record: Arc<Record>,
    pub config: Config,
}

pub struct Model<'a> {
    problem: &'a Problem,
    device: &'a Device,
    near: Vec<Measured<'a>>,
}

struct Measured<'a> {
    record: &'a Record,
    /// Where it was measured, as far as the model sees it.
    device: Device,
    weight: f64,
    /// The logarithm of the measured over the modelled time of the winner.
    winner: f64,
}

impl<'a> Model<'a> {
    /// The model of a problem, corrected by the first of these records of its class, of which the
    /// nearest come first.
    pub fn of(records: &'a [Fitting], problem: &'a Problem, device: &'a Device) -> Model<'a> {
        let measured = |Fitting { record, .. }: &'a Fitting| {
            let device = Device { sm_count: record.sm_count, ..device.clone() };
            let winner = (record.median_us / modelled(&record.config, &record.problem, &device)?).ln();
            let distance = key::distance(&record.problem, problem);
            Some(Measured { record, device, weight: 1.0 / (0.1 + distance * distance), winner })
        };
        Model { problem, device, near: records.iter().filter_map(measured).take(MOST_RECORDS).collect() }
    }

    /// Microseconds of a config; None where the family has no model of it.
    pub fn us(&self, config: &Config) -> Option<f64> {
        let modelled_us = modelled(config, self.problem, self.device)?;
        self.corrected(modelled_us, |measured| measured.correction(config))
    }

    /// The one of these configs with the least time, and that time; the first of equal ones. Most
    /// configs are passed over by a bound of their time: laying tiles on SMs takes longest.
    pub fn fastest<'c>(&self, configs: &'c [Config]) -> Option<(f64, &'c Config)> {
        let bound_of =
            |config: &Config, modelled_us| self.corrected(modelled_us, |measured| measured.least_correction(config));
        let bounded = |(index, config): (usize, &'c Config)| {
            let least_us = family::work(self.problem, config, self.device)?.least_us(self.device);
            Some((bound_of(config, least_us)?, index, config))
        };
        let mut bounded: Vec<(f64, usize, &Config)> = configs.iter().enumerate().filter_map(bounded).collect();
        bounded.sort_by(|a, b| a.0.total_cmp(&b.0));
        let mut best: Option<(f64, usize, &Config)> = None;
        for (bound, index, config) in bounded {
            let is_slower = |us: f64| best.is_some_and(|(best_us, ..)| us > (1.0 + ROUNDING) * best_us);
            if is_slower(bound) {
                break;
            }
            let modelled_us = modelled(config, self.problem, self.device)?;
            if bound_of(config, modelled_us).is_none_or(is_slower) {
                continue;
            }
            let Some(us) = self.corrected(modelled_us, |measured| measured.correction(config)) else { continue };
            if best.is_none_or(|(best_us, first, _)| (us, index) < (best_us, first)) {
                best = Some((us, index, config));
            }
        }
        best.map(|(us, _, config)| (us, config))
    }

    fn corrected(&self, modelled_us: f64, correction: impl Fn(&Measured) -> Option<f64>) -> Option<f64> {
        let (mut sum, mut weights) = (0.0, 0.0);
        for measured in &self.near {
            sum += measured.weight * correction(measured)?;
            weights += measured.weight;
        }
        let correction = if weights > 0.0 { sum / weights } else { 0.0 };
        Some(modelled_us * correction.exp())
    }
}

impl Measured<'_> {
    /// No more than `correction`, and mostly without a model of the record's shape.
    fn least_correction(&self, config: &Config) -> Option<f64> {
        let is_runner_up = self.record.runner_up.iter().any(|other| other.config == *config);
        if is_runner_up { self.correction(config) } else { Some(self.winner) }
    }

    /// The logarithm of the factor by which the model errs for a config at the record's shape.
    fn correction(&self, config: &Config) -> Option<f64> {
        let record = self.record;
        if *config == record.config || family::check(&record.problem, config, &self.device).is_err() {
            return Some(self.winner);
        }
        let modelled_us = modelled(config, &record.problem, &self.device)?;
        let runner_up = record.runner_up.iter().find(|other| other.config == *config);
        Some(match runner_up {
            Some(other) => (other.median_us / modelled_us).ln(),
            None => self.winner.max((record.median_us / modelled_us).ln()),
        })
    }
}

fn modelled(config: &Config, problem: &Problem, device: &Device) -> Option<f64> {
    Some(family::work(problem, config, device)?.us(device))
}
