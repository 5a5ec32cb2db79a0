//! The only unsafe calls into the CUDA driver and NVRTC, each library opened at run time.
//!
//! Types and constants come from `cudarc::*::sys`. The loading is ours: cudarc's prefers
//! unversioned names, panics on a missing symbol, and takes results as exhaustive Rust enums. Such
//! an enum is undefined behaviour for a code that a newer driver adds; here every result is a plain
//! integer. Nothing in this module knows of attention.

pub mod context;
pub mod device;
pub mod driver;
pub mod event;
pub mod library;
pub mod memory;
pub mod module;
pub mod nvrtc;
mod nvrtc_places;
pub mod stream;
pub mod tensor_map;
