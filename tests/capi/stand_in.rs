//! Runs C programs of tests/c against the stand-ins for the CUDA driver and NVRTC
//! (`fake_cuda`): junk, failing calls, captures, two GPUs, forks. On a GPU,
//! scripts/faults_on_gpu_host.sh runs the same programs.

use crate::fake_cuda;
use crate::library;
use crate::programs::{assert_silent, compile, sanitizers, text};
use crate::source_tree::root;
use std::path::Path;
use std::process::{Command, Output};

/// A Hopper GPU whose kernels all compile. Each kernel has the registers that it may ask for.
const HOPPER: [(&str, &str); 4] = [
    ("FAKE_NVRTC_VERSION", "12080"),
    ("FAKE_NVRTC_ARCH", "90"),
    ("FAKE_NVRTC_COMPILES", "1"),
    ("FAKE_REGISTERS", "240"),
];

#[test]
fn junk_on_a_gpu_gets_a_status_and_leaves_memory_alone() {
    passes("junk", "20000", &[("JUNK_GPU", "1"), ("JUNK_PREPARE", "200")]);
}

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
fn contexts_on_two_gpus_serve_threads_that_switch_between_them() {
    passes("two_devices", "2", &[("FAKE_DEVICES", "2")]);
}

#[test]
fn a_forked_child_is_told_that_cuda_does_not_survive() {
    passes("fork", "", &[("FORK_GPU", "1")]);
}

#[test]
fn a_captured_launch_makes_no_call_that_is_illegal_in_a_capture() {
    let folder = tempfile::tempdir().unwrap();
    let (driver, shim) = (folder.path().join("driver"), folder.path().join("shim"));
    for place in [&driver, &shim] {
        std::fs::create_dir(place).unwrap();
    }
    fake_cuda::driver(&driver);
    fake_cuda::library(&shim.join("libcuda.so.1"), &root().join("tests/c/driver_shim.c"), &["-ldl"]);
    let program = compile("tests/c/capture.c", folder.path(), sanitizers());
    let real = driver.join("libcuda.so.1");
    let output = run(&program, folder.path(), &shim, "", &[("SHIM_DRIVER", real.to_str().unwrap())]);
    assert_silent("capture", &output);
}

/// The emulator runs the kernels, and no page beside an allocation may be touched.
#[test]
#[ignore = "compiles a hundred kernels with g++: a minute"]
fn junk_on_the_emulated_gpu_stays_in_its_tensors() {
    let folder = tempfile::tempdir().unwrap();
    let program = compile("tests/c/junk.c", folder.path(), &[]);
    let mut command = Command::new(root().join("scripts/emulate.sh"));
    command.args(["--arch", "sm_90", "--"]).arg(&program).arg("2000");
    command.envs([("JUNK_GPU", "exact"), ("JUNK_PREPARE", "60")]);
    let output = command.env("LD_LIBRARY_PATH", library::path().parent().unwrap()).output().unwrap();
    assert!(output.status.success(), "{}\n{}", output.status, text(&output));
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
