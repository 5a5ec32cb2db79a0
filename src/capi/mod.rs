//! The C face: argument structs and their checks, statuses, handles, the panic boundary. The top of the flow.
//!
//! Every entry runs inside `panic_boundary::enter`, copies the caller's structs (`sized`), checks them into a `Call`
//! (`inputs` and `features` from `args`; `factor`, `operand`, `scores`, `array`, `lengths`, `pages`, `block_mask` and `overlap` for the
//! data) and asks the plan layer. cbindgen makes `include/flashtune.h` of the files that declare something for C, so there
//! `///` is written for the C caller and `//` for who works here.

// The names are the header's.
#![allow(non_camel_case_types)]
// What a C caller must keep to is the header's text, function by function.
#![allow(clippy::missing_safety_doc)]

pub mod autotune;
pub mod backward;
pub mod context;
pub mod forward;
pub mod kv_append;
pub mod last_error;
pub mod log;
pub mod merge;
pub mod plan_info;
pub mod records;
pub mod status;
pub mod types;

mod accesses;
mod args;
mod array;
mod block_mask;
mod factor;
mod features;
mod inputs;
mod lengths;
mod op;
mod operand;
mod overlap;
mod pages;
mod panic_boundary;
mod params;
mod pass;
mod scores;
mod sized;
mod text;
