//! Small operations: work beside the passes that has one kernel for each class and no config to
//! search for.
//!
//! `op` says what an operation is, `class` lists what operations are built for, `all` the kernels
//! of all classes, and each operation has its folder. The backend builds and launches every
//! operation in the same way. This module knows nothing of plans, records or C.

pub mod all;
pub mod class;
pub mod kv_append;
pub mod merge;
pub mod op;
pub mod quantize;
mod rows;

pub use class::OpClass;
pub use op::{Launch, Op};
