//! Options: how one tuning run is done.

use super::worker::Command;
use std::time::Duration;

/// The limit of one problem's run, where the caller sets none.
pub const DEFAULT_TIME_LIMIT: Duration = Duration::from_secs(20);

/// How one tuning run is done.
#[derive(Clone, Debug)]
pub struct TuneOptions {
    /// When it is over, the best config measured so far wins.
    pub time_limit: Duration,
    /// Measures again even if there is a record, and tries again configs that failed before.
    pub retune: bool,
    /// The process that unproven candidates run in. Without it a GPU tries only configs proven for
    /// its architecture. The CPU does not use it, since no candidate can hang it.
    pub worker: Option<Command>,
}

impl Default for TuneOptions {
    fn default() -> Self {
        TuneOptions { time_limit: DEFAULT_TIME_LIMIT, retune: false, worker: None }
    }
}
