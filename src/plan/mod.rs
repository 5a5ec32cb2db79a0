//! Plans: which config serves a problem, and the executable built from it.
//!
//! `Engine` is what `capi` and the command line use. The flow of `Engine::prepare` and the file of
//! each step: `canonical` (the problem that stands for a record key), `lookup` (the choices, from
//! `known_records`), `tuning` (under `measuring`), `executables` (building), `plans` (what a launch
//! finds). `among` chooses among the configs of a pack, and `packing` decides what a pack holds.
//! Below them, `machine` keeps this machine's records in a `store` (a `journal` and its `index`),
//! `shipped` has those in the library, `unread` those that no lookup has asked for, and `record`
//! and `key` are their form. `review` judges records that are to ship.

mod among;
mod built_ops;
mod canonical;
mod covering;
mod engine;
mod executables;
mod index;
mod journal;
pub mod key;
mod known_records;
mod lines;
mod lookup;
mod machine;
mod measuring;
pub mod packing;
mod plans;
mod predicted;
mod range;
mod ranges;
pub mod record;
mod review;
mod shared_map;
pub mod shipped;
mod store;
mod tuning;
mod unread;

pub use built_ops::BuiltOps;
pub use canonical::Canonical;
pub use covering::{Covering, Kernel};
pub use engine::{Engine, EngineOptions, Policy};
pub use lookup::{Choice, Known, Source};
pub use machine::Imported;
pub use plans::Plan;
pub use range::{MOST_VARIANTS, Optional, Range, Sizes};
pub use ranges::{MOST_KERNELS, Prepared};
pub use record::Record;
pub use review::{MOST_SPREAD, review};
pub use store::Store;

use crate::config::Config;
use crate::device::Device;
use crate::error::Result;
use crate::pool;
use crate::problem::Problem;

/// The choices that an engine with these records has for a problem, best first.
pub fn choices(known: &Known, problem: &Problem, device: &Device) -> Vec<Choice> {
    lookup::choices(known, &canonical::canonical(problem), device)
}

/// The configs and kernels that an engine with these records prepares for ranges on a device.
pub fn covering(known: &Known, ranges: &[Range], device: &Device) -> Result<Covering> {
    pool::install(usize::MAX, || {
        covering::covering(known, ranges, device, &|problem| lookup::choices(known, problem, device), &|_, _| true)
    })?
}

/// The configs that some record of the device's architecture names for the problem's pass, nearest
/// class first.
pub fn proven(known: &Known, problem: &Problem, device: &Device) -> Vec<Config> {
    lookup::proven(known, &canonical::canonical(problem), device)
}

/// The time that an engine with these records predicts for a config, in microseconds; None where no
/// kernel family has a model of it.
pub fn predicted_us(known: &Known, problem: &Problem, config: &Config, device: &Device) -> Option<f64> {
    lookup::predicted_us(known, &canonical::canonical(problem), config, device)
}

/// The configs among which an engine with these records chooses by its model, with the microseconds
/// that it predicts, the least first.
pub fn candidates(known: &Known, problem: &Problem, device: &Device) -> Vec<(f64, Config)> {
    lookup::candidates(known, &canonical::canonical(problem), device)
}
