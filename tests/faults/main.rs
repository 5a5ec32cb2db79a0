//! Faults below the store: a full disk, a failing disk, and a process killed between any two
//! changes of a file. What was reported as kept is there afterwards.
//!
//! The program is the real command line on the CPU backend. A library preloaded into it (shim.c)
//! counts the calls that change files in the cache folder and makes one of them fail.

#[path = "../program/mod.rs"]
mod program;
#[path = "../source_tree/mod.rs"]
mod source_tree;

use flashtune::plan::Store;
use std::collections::BTreeSet;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

/// A tuning run makes the lock and the journal, and appends lines to it.
const LEAST_CALLS: usize = 6;
const DEADLINE: Duration = Duration::from_secs(10);

fn shim() -> &'static Path {
    static SHIM: OnceLock<(tempfile::TempDir, PathBuf)> = OnceLock::new();
    &SHIM
        .get_or_init(|| {
            let folder = tempfile::tempdir().unwrap();
            let library = folder.path().join("shim.so");
            let compiler = std::env::var("CC").unwrap_or_else(|_| "cc".to_owned());
            let source = source_tree::root().join("tests/faults/shim.c");
            let mut command = Command::new(compiler);
            command.args(["-shared", "-fPIC", "-O1", "-Wall", "-Werror"]).arg(source).arg("-o").arg(&library);
            let built = command.arg("-ldl").output().unwrap();
            assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
            (folder, library)
        })
        .1
}

fn flashtune(cache: &Path) -> Command {
    let mut command = program::command();
    command.env("FLASHTUNE_CACHE_DIR", cache);
    command
}

/// Fails, with what the program printed, if it hangs. It prints less than a pipe holds.
fn run(command: &mut Command) -> Output {
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let end = Instant::now() + Duration::from_secs(60);
    while child.try_wait().unwrap().is_none() {
        if Instant::now() > end {
            child.kill().unwrap();
            panic!("{command:?} hangs: {:?}", child.wait_with_output());
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    child.wait_with_output().unwrap()
}

/// Tunes one small problem.
fn autotune(folder: &Path, cache: &Path, seqlen: usize) -> Command {
    let problems = folder.join(format!("problem-{seqlen}.jsonl"));
    let line = format!(r#"{{"pass":"forward","num_heads_q":1,"seqlen_q":{seqlen},"head_dim":8,"dtype":"fp32"}}"#);
    std::fs::write(&problems, line + "\n").unwrap();
    let mut command = flashtune(cache);
    command.args(["autotune", "--device", "cpu", "--json", "--time-limit", "0.02", "--problems"]).arg(problems);
    command
}

/// The seqlens of the records that a later process finds.
fn seqlens_in(cache: &Path) -> BTreeSet<usize> {
    let entries = Store::in_folder(cache).unwrap().read();
    let records = entries.iter().filter(|(key, _)| key.starts_with("record | "));
    let seqlen = |line: &str| {
        let record: serde_json::Value = serde_json::from_str(line).unwrap();
        record["problem"]["seqlen_q"].as_u64().unwrap() as usize
    };
    records.map(|(_, line)| seqlen(line)).collect()
}

fn copy(from: &Path, to: &Path) {
    let copied = Command::new("cp").arg("-a").arg(from).arg(to).status().unwrap();
    assert!(copied.success());
}

/// A cache folder with two records, and with a journal long enough for an index.
fn filled(folder: &Path) -> PathBuf {
    let cache = folder.join("filled");
    for seqlen in [16, 24] {
        assert!(run(&mut autotune(folder, &cache, seqlen)).status.success());
    }
    let long = ("padding".to_owned(), Some("x".repeat(100_000)));
    Store::in_folder(&cache).unwrap().write(&[long], DEADLINE).unwrap();
    assert_eq!(seqlens_in(&cache), [16, 24].into());
    assert!(cache.join("records.index").exists());
    // The index is behind by more than it may be.
    let more = ("more".to_owned(), Some("x".repeat(100_000)));
    Store::in_folder(&cache).unwrap().write(&[more], DEADLINE).unwrap();
    cache
}

/// The same two records as a library without a journal kept them.
fn older(folder: &Path) -> PathBuf {
    let cache = folder.join("older");
    let entries = Store::in_folder(&filled(folder)).unwrap().read();
    let mut builder = std::fs::DirBuilder::new();
    builder.mode(0o700).create(&cache).unwrap();
    let database = sled::open(cache.join("records.sled")).unwrap();
    for (key, value) in entries.iter().filter(|(key, _)| key.starts_with("record | ")) {
        database.insert(key.as_bytes(), value.as_bytes()).unwrap();
    }
    database.flush().unwrap();
    cache
}

/// Tunes a third problem on copies of `begin`, with one call failing in each, from the first call
/// to the last.
fn every_call_fails_once(kind: &str, folder: &Path, begin: Option<&Path>) {
    let place = |name: &str| {
        let cache = folder.join(name);
        if let Some(begin) = begin {
            copy(begin, &cache);
        }
        cache
    };
    let before: BTreeSet<usize> = if begin.is_some() { [16, 24].into() } else { BTreeSet::new() };
    let preloaded = |cache: &Path| {
        let mut command = autotune(folder, cache, 32);
        // Later calls of other threads go ahead of the one that fails.
        command.env("LD_PRELOAD", shim()).env("FAULT_FOLDER", cache).env("FAULT_DELAY", "50");
        command
    };
    let (counted, cache) = (folder.join("calls"), place("counted"));
    assert!(run(preloaded(&cache).env("FAULT_COUNT", &counted)).status.success());
    let calls: usize = std::fs::read_to_string(counted).unwrap().trim().parse().unwrap();
    assert!(calls >= LEAST_CALLS, "only {calls} calls: the shim is not in the program's way");
    for at in 1..=calls {
        let cache = place(&format!("{kind}-{at}"));
        let output = run(preloaded(&cache).env("FAULT_KIND", kind).env("FAULT_AT", at.to_string()));
        let after = seqlens_in(&cache);
        let case = format!("{kind} at call {at} of {calls}: {output:?}");
        assert!(after.is_superset(&before), "{case}\nleft {after:?}");
        // A line of output is printed once its record is kept. The next run has room again.
        let is_reported = output.status.success() || (kind == "kill" && !output.stdout.is_empty());
        assert!(after.contains(&32) || !is_reported, "{case}\nleft {after:?}");
        let written = Store::in_folder(&cache).unwrap().write(&[("later".into(), Some("x".into()))], DEADLINE);
        assert!(written.is_ok_and(|entries| entries.contains_key("later")), "{case}");
        assert_eq!(seqlens_in(&cache), after, "{case}");
        assert!(!cache.join("records.broken").exists(), "{case}");
    }
}

fn every_call_fails_once_from_each_state(kind: &str) {
    let folder = tempfile::tempdir().unwrap();
    let [first, later, adopting] = ["first", "later", "adopting"].map(|name| folder.path().join(name));
    for place in [&first, &later, &adopting] {
        std::fs::create_dir(place).unwrap();
    }
    every_call_fails_once(kind, &first, None);
    every_call_fails_once(kind, &later, Some(&filled(&later)));
    every_call_fails_once(kind, &adopting, Some(&older(&adopting)));
}

#[test]
fn a_full_disk_takes_no_record_that_was_kept() {
    every_call_fails_once_from_each_state("full");
}

#[test]
fn a_failing_disk_takes_no_record_that_was_kept() {
    every_call_fails_once_from_each_state("io");
}

#[test]
fn a_killed_process_takes_no_record_that_was_kept() {
    every_call_fails_once_from_each_state("kill");
}
