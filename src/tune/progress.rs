//! Progress: what a search tells its observer while it runs.

use crate::config::Config;
use crate::problem::Problem;
use std::time::Duration;

/// The phases of a search, in order.
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
