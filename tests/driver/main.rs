//! The calls that flashtune makes to the CUDA driver, checked and recorded by a stand-in
//! (`fake_driver`).

#[path = "../source_tree/mod.rs"]
mod source_tree;

mod fake_driver;

mod decode;
mod launch;
mod sm90;
