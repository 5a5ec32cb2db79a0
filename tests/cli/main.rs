//! The command line as users see it: exit codes, output for people and for programs, signals,
//! files.

#[path = "../fake_cuda/mod.rs"]
mod fake_cuda;
#[path = "../program/mod.rs"]
mod program;
#[path = "../source_tree/mod.rs"]
mod source_tree;

mod browser;
mod doctor;
mod environment;
mod pack;
mod records;
mod render;
mod report;
mod usage;
mod verify;
mod worker;

use flashtune::device::Arch;
use flashtune::plan::{Record, shipped};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

const SMALL: &str = r#"{"num_heads_q":2,"seqlen_q":48,"head_dim":32,"dtype":"fp32"}"#;

fn flashtune(cache: &Path) -> Command {
    let mut command = program::command();
    command.env("FLASHTUNE_CACHE_DIR", cache);
    command
}

fn run(cache: &Path, args: &[&str]) -> Output {
    flashtune(cache).args(args).output().unwrap()
}

/// The shipped records of an H200.
fn h200_records() -> Vec<Record> {
    shipped::records(Arch::Sm(9, 0)).into_iter().filter(|record| record.device == "NVIDIA H200").collect()
}

fn stdout(output: &Output) -> String {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout.clone()).unwrap()
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn json_lines(output: &Output) -> Vec<Value> {
    stdout(output).lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn write(folder: &Path, name: &str, text: &str) -> PathBuf {
    let path = folder.join(name);
    std::fs::write(&path, text).unwrap();
    path
}
