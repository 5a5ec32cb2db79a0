//! Plans: which config serves a problem, and the executable built from it.
//!
//! `Engine` is what `capi` and the command line use. The flow of `Engine::prepare` and the file of
//! each step: `canonical` (the problem that stands for a record key), `lookup` (the choices, from
//! `known_records`), `tuning` (under `measuring`), `executables` (building), `plans` (what a launch
//! finds). Below them, `machine` keeps this machine's records in a `store`, `shipped` reads those
//! in the library, and `record` and `key` are their form.

mod built_ops;
mod canonical;
mod engine;
mod executables;
pub mod key;
mod known_records;
mod lookup;
mod machine;
mod measuring;
mod plans;
mod predicted;
pub mod record;
mod shared_map;
pub mod shipped;
mod store;
mod tuning;

pub use built_ops::BuiltOps;
pub use canonical::Canonical;
pub use engine::{Engine, EngineOptions, Policy};
pub use lookup::{Choice, Known, Source};
pub use plans::Plan;
pub use record::Record;
pub use store::Store;

use crate::config::Config;
use crate::device::Device;
use crate::problem::Problem;

/// The choices that an engine with these records has for a problem, best first.
pub fn choices(known: &Known, problem: &Problem, device: &Device) -> Vec<Choice> {
    lookup::choices(known, &canonical::canonical(problem), device)
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
