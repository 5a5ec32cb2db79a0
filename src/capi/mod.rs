//! The C face: argument structs and their checks, statuses, handles and the panic boundary. It is
//! the top of the flow.
//!
//! Every C function runs inside `panic_boundary::enter`. It copies the caller's structs (`sized`),
//! checks them into a `Call` (`args`, `inputs`, `features`) and asks the plan layer. The tensors'
//! checks are in `operand`, `scores`, `array`, `lengths`, `pages`, `key_starts`, `block_mask`,
//! `factor` and `overlap`.
//!
//! cbindgen generates `include/flashtune.h` from the files that declare something for C. In those,
//! `///` is written for the C caller, and `//` for developers.

// The names are those of the header.
#![allow(non_camel_case_types)]
// The header says what a C caller must promise, for each function.
#![allow(clippy::missing_safety_doc)]
// Its comments are C's: `seqlens[b]` is an element there, and `[b]` a link in Rust's.
#![allow(rustdoc::broken_intra_doc_links)]

pub mod autotune;
pub mod backward;
pub mod context;
pub mod forward;
mod key_starts;
pub mod kv_append;
mod kv_append_eight;
pub mod kv_append_params;
mod kv_append_slots;
pub mod last_error;
pub mod log;
pub mod merge;
pub mod pack;
pub mod panic_boundary;
pub mod plan_info;
pub mod quantize;
pub mod range;
pub mod records;
pub mod status;
pub mod types;
pub mod views;

mod accesses;
pub(crate) mod args;
mod array;
mod block_mask;
pub(crate) mod dtypes;
mod eight_bits;
mod factor;
mod features;
mod inputs;
mod lengths;
mod memory;
mod op;
mod operand;
mod overlap;
mod pages;
mod params;
mod pass;
mod scores;
mod sized;
mod text;
