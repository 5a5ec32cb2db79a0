//! Limits of the system: under too little memory or too few threads, a run ends with a status and a
//! sentence, and never with a signal.

mod program;

use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Command, Output};

/// Runs the command line under a limit of the shell (`ulimit`).
fn limited(limit: &str, arguments: &[&str]) -> Output {
    let mut command = Command::new("sh");
    command
        .args(["-c", &format!(r#"ulimit {limit}; exec "$0" "$@""#)])
        .arg(program::command().get_program())
        .args(arguments);
    for name in ["FLASHTUNE_CACHE_DIR", "XDG_CACHE_HOME", "HOME", "RUST_LOG"] {
        command.env_remove(name);
    }
    command.output().unwrap()
}

fn problems(folder: &Path, line: &str) -> String {
    let path = folder.join("problems.jsonl");
    std::fs::write(&path, line).unwrap();
    path.to_str().unwrap().to_owned()
}

#[test]
fn too_little_memory_is_a_status() {
    let folder = tempfile::tempdir().unwrap();
    let file = problems(folder.path(), r#"{"pass":"backward","num_heads_q":4,"seqlen_q":512,"head_dim":64}"#);
    let tune = ["autotune", "--device", "cpu", "--time-limit", "0.05", "--problems", &file];
    let mut refused = 0;
    for megabytes in (30..=330).step_by(25) {
        let output = limited(&format!("-v {}", megabytes << 10), &tune);
        let message = String::from_utf8_lossy(&output.stderr);
        // 127: the program itself does not fit.
        assert!(output.status.signal().is_none(), "{megabytes} MB: {:?}\n{message}", output.status);
        refused += usize::from(output.status.code() == Some(1));
    }
    assert!(refused > 0, "no limit was low enough");
    // With enough, the records exist and have no folder to be kept in.
    assert_eq!(limited("-v 2000000", &tune).status.code(), Some(3));
}

#[test]
fn a_problem_larger_than_any_memory_is_refused_at_once() {
    let folder = tempfile::tempdir().unwrap();
    let line = r#"{"pass":"forward","batch_size":2147483647,"num_heads_q":1,"seqlen_q":4096,"head_dim":64}"#;
    let file = problems(folder.path(), line);
    // Far less than the lengths of the sequences alone take.
    let output = limited("-v 2000000", &["autotune", "--device", "cpu", "--problems", &file]);
    let message = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{message}");
    assert!(message.contains("tuning needs") && message.contains("bytes of memory"), "{message}");
}
