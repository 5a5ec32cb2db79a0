//! The tuner: the candidates, the search, timing, and the check of results.
//!
//! It takes a problem, a backend and the trials of earlier runs, and returns the winner. It knows
//! nothing of records and files: `plan` turns an `Outcome` into a record, and keeps the trials that
//! a search reports.

mod arena;
pub mod candidates;
mod check;
mod contest;
mod features;
mod lengths;
mod memory;
mod options;
mod outcome;
mod pages;
mod progress;
mod rig;
mod search;
mod timing;
mod utilisation;
mod values;
pub mod worker;

pub use crate::backend::Elapsed;
pub use check::bound as error_bound;
pub use memory::require as require_memory;
pub use options::{DEFAULT_TIME_LIMIT, TuneOptions};
pub use outcome::{Outcome, Timed, Trial, Verdict, measured_families};
pub use progress::{Phase, Progress};
pub use rig::Rig;
pub use search::{Bench, BuildObserver, Event, Fault, Observer, Request, search};
pub use timing::{MARGIN, Samples};
pub use utilisation::Floor;
pub use worker::Worker;
