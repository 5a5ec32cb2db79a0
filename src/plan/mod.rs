//! Plans: lookup order, record keys, records on disk, and the plans of this process.
//!
//! `Engine` is what `capi` and the command line use. It asks `lookup` for a config, `tune` for a winner where that is
//! wanted, builds it with the backend and keeps the plan. Records come from `machine` (sled) and `shipped` (JSON).

mod built;
mod canonical;
mod engine;
pub mod key;
mod loaded;
mod lookup;
mod machine;
pub mod record;
pub mod shipped;
mod store;

pub use built::Built;
pub use canonical::Canonical;
pub use engine::{Engine, EngineOptions, Policy};
pub use loaded::Plan;
pub use lookup::{Choice, Known, Source, choices, proven};
pub use record::Record;
pub use store::Store;
