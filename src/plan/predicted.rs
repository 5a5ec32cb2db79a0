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

pub struct Model<'a> {
    problem: &'a Problem,
    device: &'a Device,
    nearest_first: Vec<&'a Record>,
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
    /// The model of a problem, corrected by the nearest of these records of its class.
    pub fn of(records: &'a [Arc<Record>], problem: &'a Problem, device: &'a Device) -> Model<'a> {
        let mut near: Vec<(f64, &Record)> =
            records.iter().map(|record| (key::distance(&record.problem, problem), record.as_ref())).collect();
        near.sort_by(|a, b| a.0.total_cmp(&b.0).then_with(|| a.1.key.cmp(&b.1.key)));
        let measured = |(distance, record): (f64, &'a Record)| {
            let device = Device { sm_count: record.sm_count, ..device.clone() };
            let winner = (record.median_us / modelled(&record.config, &record.problem, &device)?).ln();
            Some(Measured { record, device, weight: 1.0 / (0.1 + distance * distance), winner })
        };
        let nearest_first = near.iter().map(|(_, record)| *record).collect();
        let near = near.into_iter().filter_map(measured).take(MOST_RECORDS).collect();
        Model { problem, device, nearest_first, near }
    }

    /// The records of the class, nearest first.
    pub fn records(&self) -> impl Iterator<Item = &'a Record> {
        self.nearest_first.iter().copied()
    }

    /// Microseconds of a config; None where the family has no model of it.
    pub fn us(&self, config: &Config) -> Option<f64> {
        let modelled_us = modelled(config, self.problem, self.device)?;
        let (mut sum, mut weights) = (0.0, 0.0);
        for measured in &self.near {
            sum += measured.weight * measured.correction(config)?;
            weights += measured.weight;
        }
        let correction = if weights > 0.0 { sum / weights } else { 0.0 };
        Some(modelled_us * correction.exp())
    }
}

impl Measured<'_> {
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
