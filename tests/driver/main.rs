//! The calls that flashtune makes to the CUDA driver, checked and recorded by a stand-in
//! (`fake_driver`).

#[path = "../fake_cuda/mod.rs"]
mod fake_cuda;
#[path = "../serving_trace/mod.rs"]
mod serving_trace;
#[path = "../source_tree/mod.rs"]
mod source_tree;

mod fake_driver;

mod decode;
mod launch;
mod pack;
mod serving;
mod sm90;
mod sm90_backward;
