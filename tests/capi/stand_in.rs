//! Runs C programs of tests/c against the stand-ins for the CUDA driver and NVRTC
//! (`fake_cuda`).

use crate::fake_cuda;
use crate::library;
use crate::programs::{compile, sanitizers, text};
use std::path::Path;
use std::process::{Command, Output};

/// Of a Hopper GPU whose kernels all compile. Each kernel has the registers that it may ask for.
const HOPPER: [(&str, &str); 4] = [
    ("FAKE_NVRTC_VERSION", "12080"),
    ("FAKE_NVRTC_ARCH", "90"),
    ("FAKE_NVRTC_COMPILES", "1"),
    ("FAKE_REGISTERS", "240"),
];

#[test]
fn a_driver_that_fails_any_call_once_gives_a_status_and_leaves_nothing_behind() {
    // Without sanitizers: a hundred contexts come and go.
    passes_with(&[], "failing_driver", "", &[]);
}

#[test]
#[ignore = "fails every call of a tuning run, not some: a minute"]
fn a_driver_that_fails_any_call_of_a_tuning_run_leaves_nothing_behind() {
    passes("failing_driver", "all", &[]);
}

#[test]
fn a_forked_child_is_told_that_cuda_does_not_survive() {
    passes("fork", "", &[("FORK_GPU", "1")]);
}

/// Compiles tests/c/<name>.c and runs it on the stand-ins.
fn passes(name: &str, argument: &str, variables: &[(&str, &str)]) {
    passes_with(sanitizers(), name, argument, variables);
}

fn passes_with(flags: &[&str], name: &str, argument: &str, variables: &[(&str, &str)]) {
    let folder = tempfile::tempdir().unwrap();
    fake_cuda::driver(folder.path());
    let program = compile(&format!("tests/c/{name}.c"), folder.path(), flags);
    let output = run(&program, folder.path(), folder.path(), argument, variables);
    assert!(output.status.success() && output.stderr.is_empty(), "{name}: {}\n{}", output.status, text(&output));
}

fn run(program: &Path, home: &Path, driver: &Path, argument: &str, variables: &[(&str, &str)]) -> Output {
    let libraries = format!("{}:{}", driver.display(), library::path().parent().unwrap().display());
    Command::new(program)
        .arg(argument)
        .env("HOME", home)
        .env_remove("XDG_CACHE_HOME")
        .env_remove("FLASHTUNE_CACHE_DIR")
        .env_remove("FLASHTUNE_PACK")
        .env("LD_LIBRARY_PATH", libraries)
        .env("FLASHTUNE_NVRTC", fake_cuda::nvrtc(home))
        .envs(HOPPER)
        .envs(variables.iter().copied())
        .output()
        .unwrap_or_else(|error| panic!("{} does not start: {error}", program.display()))
}
