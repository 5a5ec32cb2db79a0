//! Placeholder until the CPU family's own space is merged.

use super::{Constraint, Knob};
use crate::config::{Config, Family};
use crate::device::Device;
use crate::problem::{Pass, Problem};

const KNOBS: &[Knob] = &[
    Knob { name: "block_m", meaning: "query rows of a tile", values: &[32, 64, 128] },
    Knob { name: "block_n", meaning: "keys of a tile", values: &[64, 128, 256] },
];

pub fn knobs(_pass: Pass) -> &'static [Knob] {
    KNOBS
}

pub fn constraints(_pass: Pass) -> &'static [Constraint] {
    &[]
}

pub fn heuristic(_problem: &Problem, _device: &Device) -> Config {
    Config::new(Family::Cpu, [("block_m", 64), ("block_n", 128)])
}

pub fn cost(_problem: &Problem, config: &Config, _device: &Device) -> f64 {
    f64::from(config.get("block_m").abs_diff(64) + config.get("block_n").abs_diff(128))
}
