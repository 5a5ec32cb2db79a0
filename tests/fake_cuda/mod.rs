//! Stand-ins for libcuda and libnvrtc, compiled from C, for a process that a test starts.
//!
//! The process finds the driver through LD_LIBRARY_PATH and NVRTC through FLASHTUNE_NVRTC.
//! Variables that begin with FAKE_ choose what they answer.

use crate::source_tree::root;
use flashtune::kernel::KernelParams;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Compiles the driver into a folder.
pub fn driver(folder: &Path) {
    let params = format!("-DPARAMS_BYTES={}", size_of::<KernelParams>());
    library(&folder.join("libcuda.so.1"), &root().join("tests/driver/fake_driver/libcuda.c"), &[&params]);
}

/// Compiles an NVRTC into a folder. Unless the variables say otherwise it is of version 12.0, knows
/// no GPU after sm_80, and compiles nothing.
pub fn nvrtc(folder: &Path) -> PathBuf {
    let path = folder.join("libnvrtc.so");
    library(&path, &root().join("tests/fake_cuda/libnvrtc.c"), &[]);
    path
}

pub fn library(path: &Path, source: &Path, options: &[&str]) {
    let compiled = Command::new(std::env::var("CC").unwrap_or("cc".to_owned()))
        .args(["-std=gnu11", "-O1", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror", "-o"])
        .arg(path)
        .arg(source)
        .args(options)
        .status()
        .expect("the tests need a C compiler");
    assert!(compiled.success());
}
