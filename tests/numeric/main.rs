//! Results of attention on the CPU and a GPU against the reference and the laws, and the table in
//! `docs/support.md`.
//!
//! This is one test program, because each program would compile `support` anew.

#[path = "../capi/library/mod.rs"]
#[allow(dead_code)] // only its path to the source tree is used
mod library;
#[path = "../kernels/nvrtc/mod.rs"]
mod nvrtc;
mod support;

mod batch_invariant;
mod cpu_backward;
mod cpu_forward;
mod feature_list;
mod feature_table;
mod gpu;
mod kv_append;
mod laws;
mod merge;
mod paged;
