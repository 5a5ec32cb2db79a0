//! The calls that flashtune makes to the CUDA driver, checked and recorded by a stand-in
//! (`fake_driver`).

mod fake_driver;

mod decode;
mod launch;
mod sm90;
