//! Attention's results on the CPU and a GPU, against the reference and the laws, and the table in `docs/support.md`.
//!
//! One program, since each would compile `support` anew.

#[path = "../capi/library/mod.rs"]
#[allow(dead_code)] // The source tree is all that is looked for here.
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
