//! The tuner: the space and its constraints, the search, timing, and the check of candidates.
pub mod space;

use crate::config::Config;
use crate::problem::Problem;
use std::time::Duration;

pub struct TuneOptions {
    pub time_limit: Duration,
    pub retune: bool,
}
impl Default for TuneOptions {
    fn default() -> Self {
        TuneOptions { time_limit: Duration::from_secs(20), retune: false }
    }
}
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    Compile,
}
impl Phase {
    pub const fn name(self) -> &'static str {
        "compile"
    }
}
pub struct Progress<'a> {
    pub problem: &'a Problem,
    pub phase: Phase,
    pub done: usize,
    pub total: usize,
    pub failed: usize,
    pub best: Option<(&'a Config, Duration)>,
}
