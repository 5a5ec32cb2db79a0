//! The store under faults and with many processes at once: results stay right, and a fault costs at
//! most one line of log.
//!
//! The processes are the real binary on the CPU backend. A test that needs root says so when it is
//! skipped.

mod program;

use flashtune::plan::Store;
use std::collections::HashSet;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::Duration;

const DEADLINE: Duration = Duration::from_secs(5);

fn problem_line(seqlen: usize) -> String {
    format!(r#"{{"pass":"forward","num_heads_q":2,"seqlen_q":{seqlen},"head_dim":32,"dtype":"fp32"}}"#)
}

fn problem_file(folder: &Path, seqlens: &[usize]) -> PathBuf {
    let path = folder.join(format!("problems-{}.jsonl", seqlens[0]));
    std::fs::write(&path, seqlens.iter().map(|seqlen| problem_line(*seqlen) + "\n").collect::<String>()).unwrap();
    path
}

fn autotune(problems: &Path) -> Command {
    let mut command = program::command();
    command.args(["autotune", "--device", "cpu", "--json", "--problems"]).arg(problems);
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

fn keys_in(cache: &Path) -> HashSet<String> {
    let output = program::command()
        .args(["records", "list", "--device", "cpu", "--json"])
        .env("FLASHTUNE_CACHE_DIR", cache)
        .output()
        .unwrap();
    assert!(output.status.success(), "{output:?}");
    let lines = String::from_utf8(output.stdout).unwrap();
    lines
        .lines()
        .map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap()["key"].as_str().unwrap().to_owned())
        .collect()
}

/// Asserts that the command succeeded, gave a record and printed at most one warning.
fn assert_success(output: &Output) -> String {
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{:?}\n{stderr}", output.status);
    let record: serde_json::Value =
        serde_json::from_slice(output.stdout.split(|byte| *byte == b'\n').next().unwrap()).unwrap();
    assert!(record["median_us"].as_f64().unwrap() > 0.0 && record["check_error"].as_f64().unwrap() < 1e-4);
    let warnings: Vec<&str> = stderr.lines().filter(|line| line.contains("WARN") || line.contains("ERROR")).collect();
    assert!(warnings.len() <= 1, "{stderr}");
    warnings.first().map(|line| (*line).to_owned()).unwrap_or_default()
}

#[test]
fn sixteen_processes_on_an_empty_cache_leave_the_union() {
    let folder = tempfile::tempdir().unwrap();
    let cache = folder.path().join("cache");
    let children: Vec<_> = (0..16)
        .map(|index| {
            let problems = problem_file(
                folder.path(),
                &[16 << (index / 2), (16 << (index / 2)) + (8 << (index / 2))][index % 2..][..1],
            );
            autotune(&problems).args(["--time-limit", "2"]).env("FLASHTUNE_CACHE_DIR", &cache).spawn().unwrap()
        })
        .collect();
    for child in children {
        assert_eq!(assert_success(&child.wait_with_output().unwrap()), "");
    }
    let keys = keys_in(&cache);
    assert_eq!(keys.len(), 16, "{keys:?}");
    assert!(!cache.join("records.broken").exists());
}

#[test]
fn killed_process_loses_no_written_record() {
    let folder = tempfile::tempdir().unwrap();
    let cache = folder.path().join("cache");
    let problems = problem_file(folder.path(), &[16, 24, 32, 48, 64, 96]);
    let mut before = HashSet::new();
    // The kills are spread over the run, from its start to its last write.
    for round in 0..14 {
        let mut child = autotune(&problems).env("FLASHTUNE_CACHE_DIR", &cache).spawn().unwrap();
        std::thread::sleep(Duration::from_millis(7 + 83 * round));
        child.kill().unwrap();
        child.wait().unwrap();
        let after = keys_in(&cache);
        assert!(after.is_superset(&before), "round {round}: {before:?} became {after:?}");
        before = after;
    }
    let output = autotune(&problems).env("FLASHTUNE_CACHE_DIR", &cache).output().unwrap();
    assert_eq!(assert_success(&output), "");
    assert_eq!(keys_in(&cache).len(), 6);
    assert!(!cache.join("records.broken").exists());
}

/// A store with some entries, in a folder of its own.
fn filled(cache: &Path) -> Store {
    std::fs::create_dir_all(cache).unwrap();
    std::fs::set_permissions(cache, PermissionsExt::from_mode(0o700)).unwrap();
    let store = Store::in_folder(cache).unwrap();
    let changes: Vec<_> =
        (0..200).map(|i| (format!("key {i:03}"), Some(format!("value {i} {}", "x".repeat(i))))).collect();
    assert_eq!(store.write(&changes, DEADLINE).unwrap().len(), 200);
    store
}

fn files_under(folder: &Path) -> Vec<PathBuf> {
    let mut files = Vec::new();
    for path in std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()) {
        if path.is_dir() { files.extend(files_under(&path)) } else { files.push(path) }
    }
    files.sort();
    files
}

#[test]
fn another_store_reads_and_removes_written_entries() {
    let folder = tempfile::tempdir().unwrap();
    let store = filled(folder.path());
    let entries = store.read();
    assert_eq!((entries.len(), entries["key 007"].as_str()), (200, "value 7 xxxxxxx"));
    let other = Store::in_folder(folder.path()).unwrap();
    let after = other.write(&[("key 007".into(), None), ("key 008".into(), Some("new".into()))], DEADLINE).unwrap();
    assert_eq!((after.len(), after.get("key 007"), after["key 008"].as_str()), (199, None, "new"));
    assert_eq!(store.read(), after);
}

#[test]
fn concurrent_writers_leave_the_union() {
    let folder = tempfile::tempdir().unwrap();
    std::thread::scope(|scope| {
        for thread in 0..8 {
            let path = folder.path();
            scope.spawn(move || {
                let store = Store::in_folder(path).unwrap();
                for i in 0..5 {
                    store.write(&[(format!("{thread} {i}"), Some("x".into()))], Duration::from_secs(60)).unwrap();
                }
            });
        }
    });
    assert_eq!(Store::in_folder(folder.path()).unwrap().read().len(), 40);
}

#[test]
fn damaged_database_is_a_miss_and_is_started_anew() {
    let folder = tempfile::tempdir().unwrap();
    let mut random = 12345u64;
    let mut next = move || {
        random = random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (random >> 33) as usize
    };
    let (mut lost, mut kept) = (0, 0);
    for round in 0..60 {
        let cache = folder.path().join(round.to_string());
        let store = filled(&cache);
        let before = store.read();
        let files = files_under(&cache.join("records.sled"));
        let file = &files[next() % files.len()];
        let mut bytes = std::fs::read(file).unwrap();
        match round % 4 {
            0 => bytes.truncate(next() % (bytes.len() + 1)),
            1 => bytes.iter_mut().for_each(|byte| *byte = next() as u8),
            2 => (0..20).for_each(|_| {
                let at = next() % bytes.len().max(1);
                if let Some(byte) = bytes.get_mut(at) {
                    *byte ^= 1 << (next() % 8);
                }
            }),
            _ => bytes.clear(),
        }
        std::fs::write(file, &bytes).unwrap();
        // A read never returns a wrong entry.
        let store = Store::in_folder(&cache).unwrap();
        let after = store.read();
        assert!(after.iter().all(|(key, value)| before.get(key) == Some(value)), "round {round}: {}", file.display());
        if after.len() < before.len() {
            lost += 1
        } else {
            kept += 1
        }
        // The store can be written again.
        let written = store.write(&[("new".into(), Some("entry".into()))], DEADLINE).unwrap();
        assert_eq!(written.get("new").map(String::as_str), Some("entry"), "round {round}: {}", file.display());
        assert_eq!(Store::in_folder(&cache).unwrap().read(), written);
    }
    assert!(lost > 5 && kept > 5, "{lost} lost, {kept} kept: the damage must destroy some databases and spare others");
}

#[test]
fn file_in_the_databases_place_is_set_aside() {
    let folder = tempfile::tempdir().unwrap();
    let store = Store::in_folder(folder.path()).unwrap();
    std::fs::write(folder.path().join("records.sled"), "not a folder").unwrap();
    assert!(store.read().is_empty());
    assert_eq!(store.write(&[("a".into(), Some("b".into()))], DEADLINE).unwrap().len(), 1);
    assert!(folder.path().join("records.broken").exists());
}

#[test]
fn setting_aside_replaces_an_earlier_file_or_folder() {
    let folder = tempfile::tempdir().unwrap();
    let (database, broken) = (folder.path().join("records.sled"), folder.path().join("records.broken"));
    // A folder in the database's place replaces a file that was set aside earlier.
    std::fs::write(&broken, "an earlier one").unwrap();
    drop(filled(folder.path()));
    files_under(&database).iter().for_each(|file| std::fs::write(file, "no database").unwrap());
    assert!(Store::in_folder(folder.path()).unwrap().read().is_empty());
    assert!(broken.is_dir());
    // A file in the database's place replaces that folder.
    std::fs::remove_dir_all(&database).unwrap();
    std::fs::write(&database, "not a folder").unwrap();
    assert!(Store::in_folder(folder.path()).unwrap().read().is_empty());
    assert_eq!(std::fs::read_to_string(&broken).unwrap(), "not a folder");
}

#[test]
fn a_lock_that_is_never_released_delays_but_does_not_stop() {
    let folder = tempfile::tempdir().unwrap();
    let cache = folder.path().join("cache");
    filled(&cache);
    let lock = std::fs::File::options().write(true).open(cache.join("records.lock")).unwrap();
    lock.lock().unwrap();
    let problems = problem_file(folder.path(), &[16]);
    let warning = assert_success(&autotune(&problems).env("FLASHTUNE_CACHE_DIR", &cache).output().unwrap());
    assert!(warning.contains("held by another process"), "{warning}");
    drop(lock);
    assert_success(&autotune(&problems).env("FLASHTUNE_CACHE_DIR", &cache).output().unwrap());
    assert_eq!(keys_in(&cache).len(), 1);
}

#[test]
fn without_home_records_are_kept_in_memory() {
    let folder = tempfile::tempdir().unwrap();
    let problems = problem_file(folder.path(), &[16]);
    assert_success(&autotune(&problems).output().unwrap());
    let entries: Vec<_> = std::fs::read_dir(folder.path()).unwrap().collect();
    assert_eq!(entries.len(), 1, "only the problem file");
}

#[test]
fn full_disk_loses_only_the_records() {
    let folder = tempfile::tempdir().unwrap();
    let (cache, problems) = (folder.path().join("cache"), problem_file(folder.path(), &[16]));
    // `ulimit -f 0` forbids any file to grow; it acts like a full disk with another error code.
    let script = r#"trap '' XFSZ; ulimit -f 0; exec "$0" "$@""#;
    let mut shell = Command::new("sh");
    shell.args(["-c", script]).arg(program::path()).args(["autotune", "--device", "cpu", "--json", "--problems"]);
    let output = shell.arg(&problems).env("FLASHTUNE_CACHE_DIR", &cache).env_remove("RUST_LOG").output().unwrap();
    let warning = assert_success(&output);
    assert!(warning.contains("records"), "{warning}");
    // With room again the next run works, whatever the failed run left behind.
    let output = autotune(&problems).env("FLASHTUNE_CACHE_DIR", &cache).output().unwrap();
    assert_success(&output);
    assert_eq!(keys_in(&cache).len(), 1);
}

fn is_root() -> bool {
    std::fs::metadata("/proc/self").is_ok_and(|own| own.uid() == 0)
}

const NOBODY: u32 = 65534;

#[test]
fn folder_of_another_user_is_refused() {
    if !is_root() {
        eprintln!("SKIPPED: only root can give a folder to another user");
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let (cache, problems) = (folder.path().join("cache"), problem_file(folder.path(), &[16]));
    std::fs::create_dir(&cache).unwrap();
    std::os::unix::fs::chown(&cache, Some(NOBODY), Some(NOBODY)).unwrap();
    let warning = assert_success(&autotune(&problems).env("FLASHTUNE_CACHE_DIR", &cache).output().unwrap());
    assert!(warning.contains("belongs to user 65534"), "{warning}");
    assert_eq!(std::fs::read_dir(&cache).unwrap().count(), 0);
}

#[test]
fn folder_that_others_may_write_to_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let (cache, problems) = (folder.path().join("cache"), problem_file(folder.path(), &[16]));
    std::fs::create_dir(&cache).unwrap();
    std::fs::set_permissions(&cache, PermissionsExt::from_mode(0o777)).unwrap();
    let warning = assert_success(&autotune(&problems).env("FLASHTUNE_CACHE_DIR", &cache).output().unwrap());
    assert!(warning.contains("0777"), "{warning}");
    assert_eq!(std::fs::read_dir(&cache).unwrap().count(), 0);
}

#[test]
fn read_only_folder_loses_only_the_records() {
    let folder = tempfile::tempdir().unwrap();
    let (cache, problems) = (folder.path().join("cache"), problem_file(folder.path(), &[16]));
    std::fs::create_dir(&cache).unwrap();
    std::fs::set_permissions(&cache, PermissionsExt::from_mode(0o500)).unwrap();
    let program = folder.path().join("flashtune");
    std::fs::copy(program::path(), &program).unwrap();
    let mut command = Command::new(&program);
    command.args(["autotune", "--device", "cpu", "--json", "--problems"]).arg(&problems);
    command.env("FLASHTUNE_CACHE_DIR", &cache).env_remove("RUST_LOG");
    if is_root() {
        // Permissions do not bind root, so the program runs as nobody, who owns the folder.
        std::fs::set_permissions(folder.path(), PermissionsExt::from_mode(0o755)).unwrap();
        std::os::unix::fs::chown(&cache, Some(NOBODY), Some(NOBODY)).unwrap();
        command.uid(NOBODY).gid(NOBODY);
    }
    let warning = assert_success(&command.output().unwrap());
    assert!(warning.contains("records"), "{warning}");
    std::fs::set_permissions(&cache, PermissionsExt::from_mode(0o700)).unwrap();
    assert_eq!(std::fs::read_dir(&cache).unwrap().count(), 0);
}
