//! The engine on the CPU backend: preparing, tuning, sealing, pinning, and the records that the
//! next process finds.

#[path = "../serving_trace/mod.rs"]
mod serving_trace;
#[path = "../source_tree/mod.rs"]
mod source_tree;

mod class_fields;
mod prepare;
mod range;
mod records;
mod support;
mod tuning;
