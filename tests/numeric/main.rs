//! Results of attention on the CPU and a GPU against the reference and the laws, and the table in
//! `docs/support.md`.
//!
//! This is one test program, because each program would compile `support` anew.

#[path = "../kernels/nvrtc/mod.rs"]
mod nvrtc;
#[path = "../source_tree/mod.rs"]
mod source_tree;
mod support;

mod batch_invariant;
mod cpu_backward;
mod cpu_forward;
mod eight_bits;
mod emulated;
mod feature_list;
mod feature_table;
mod four_bits;
mod gpu;
mod key_starts;
mod kv_append;
mod kv_append_slots;
mod laws;
mod merge;
mod output_buffer;
mod paged;
mod planted_faults;
mod prefill_splits;
mod quantize;
mod same_bits;
mod tiny;
mod turns;
