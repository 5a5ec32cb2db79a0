//! What flashtune asks of the CUDA driver, against a stand-in (`fake_driver`) that checks and writes down.

mod fake_driver;

mod decode;
mod launch;
mod sm90;
