//! The store under faults and with many processes at once: results stay right, and a fault costs at
//! most one line of log. `tests/faults` has those of single system calls.
//!
//! The processes are the real binary on the CPU backend.

#[path = "../program/mod.rs"]
mod program;

mod permissions;

use flashtune::plan::Store;
use std::collections::HashSet;
use std::os::unix::fs::PermissionsExt;
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

/// Asserts that the command gave a record and kept it, or that it says with its status and its last
/// line that it did not. Returns the one warning and that line.
fn assert_tuned(output: &Output, is_kept: bool) -> String {
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(if is_kept { 0 } else { 3 }), "{stderr}");
    let record: serde_json::Value =
        serde_json::from_slice(output.stdout.split(|byte| *byte == b'\n').next().unwrap()).unwrap();
    assert!(record["median_us"].as_f64().unwrap() > 0.0 && record["check_error"].as_f64().unwrap() < 1e-4);
    let warnings: Vec<&str> = stderr.lines().filter(|line| line.contains("WARN") || line.contains("ERROR")).collect();
    assert!(warnings.len() <= 1, "{stderr}");
    let last = stderr.lines().last().unwrap();
    assert_eq!(last.contains("the records are lost with this process"), !is_kept, "{stderr}");
    warnings.into_iter().chain((!is_kept).then_some(last)).collect()
}

/// Asserts success without a warning.
fn assert_success(output: &Output) {
    assert_eq!(assert_tuned(output, true), "");
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
        assert_success(&child.wait_with_output().unwrap());
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
    assert_success(&output);
    assert_eq!(keys_in(&cache).len(), 6);
    assert!(!cache.join("records.broken").exists());
}

/// A store with entries enough for an index, in a folder of its own.
fn filled(cache: &Path) -> Store {
    std::fs::create_dir_all(cache).unwrap();
    std::fs::set_permissions(cache, PermissionsExt::from_mode(0o700)).unwrap();
    let store = Store::in_folder(cache).unwrap();
    let changes: Vec<_> =
        (0..200).map(|i| (format!("key {i:03}"), Some(format!("value {i} {}", "x".repeat(5 * i))))).collect();
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
    assert_eq!((entries.len(), entries["key 007"].as_str()), (200, format!("value 7 {}", "x".repeat(35)).as_str()));
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

/// The same numbers in every run.
fn numbers() -> impl FnMut() -> usize {
    let mut random = 12345u64;
    move || {
        random = random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (random >> 33) as usize
    }
}

fn damage(file: &Path, kind: usize, next: &mut impl FnMut() -> usize) {
    let mut bytes = std::fs::read(file).unwrap();
    match kind {
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
}

#[test]
fn damage_of_the_index_loses_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let mut next = numbers();
    for round in 0..40 {
        let cache = folder.path().join(round.to_string());
        let before = filled(&cache).read();
        let files = files_under(&cache.join("records.index"));
        let file = &files[next() % files.len()];
        damage(file, round % 4, &mut next);
        let case = format!("round {round}: {}", file.display());
        let store = Store::in_folder(&cache).unwrap();
        assert!(store.read() == before, "{case}");
        let written = store.write(&[("new".into(), Some("entry".into()))], DEADLINE).unwrap();
        assert_eq!(written.len(), before.len() + 1, "{case}");
        assert!(Store::in_folder(&cache).unwrap().read() == written, "{case}");
    }
}

#[test]
fn damage_of_the_journal_costs_the_lines_that_it_hits() {
    let folder = tempfile::tempdir().unwrap();
    let mut next = numbers();
    let (mut lost, mut salvaged) = (0, 0);
    for round in 0..40 {
        let cache = folder.path().join(round.to_string());
        let before = filled(&cache).read();
        damage(&cache.join("records.journal"), round % 4, &mut next);
        // Without its index, or it would still have what was lost.
        let _ = std::fs::remove_dir_all(cache.join("records.index"));
        let store = Store::in_folder(&cache).unwrap();
        let after = store.read();
        assert!(after.iter().all(|(key, value)| before.get(key) == Some(value)), "round {round}");
        lost += usize::from(after.len() < before.len());
        salvaged += usize::from(!after.is_empty());
        assert!(round % 4 != 2 || after.len() >= before.len() - 21, "round {round}: {} are left", after.len());
        let written = store.write(&[("new".into(), Some("entry".into()))], DEADLINE).unwrap();
        assert_eq!(written.len(), after.len() + 1, "round {round}");
        assert!(Store::in_folder(&cache).unwrap().read() == written, "round {round}");
    }
    assert!(lost > 5 && salvaged > 5, "{lost} lost some, {salvaged} kept some: both must happen");
}

#[test]
fn a_cache_folder_that_is_removed_meanwhile_is_made_anew() {
    let base = tempfile::tempdir().unwrap();
    let cache = base.path().join("cache");
    let store = filled(&cache);
    store.read();
    std::fs::remove_dir_all(&cache).unwrap();
    let change = ("key".to_owned(), Some("value".to_owned()));
    let entries = store.write(&[change], DEADLINE).unwrap();
    assert_eq!(entries.len(), 1);
    // The caller gives back what it knows.
    assert!(store.has_begun_anew());
    assert_eq!(Store::in_folder(&cache).unwrap().read(), entries);
    assert_eq!(cache.metadata().unwrap().permissions().mode() & 0o777, 0o700);
}

#[test]
fn a_line_that_a_killed_writer_left_unfinished_is_no_damage() {
    let folder = tempfile::tempdir().unwrap();
    let before = filled(folder.path()).read();
    let journal = folder.path().join("records.journal");
    let mut text = std::fs::read_to_string(&journal).unwrap();
    text += "0123abcd [\"half a";
    std::fs::write(&journal, text).unwrap();
    let store = Store::in_folder(folder.path()).unwrap();
    assert_eq!(store.read(), before);
    assert_eq!(store.write(&[("new".into(), Some("entry".into()))], DEADLINE).unwrap().len(), before.len() + 1);
    assert!(!folder.path().join("records.broken").exists());
}

#[test]
fn lines_in_the_place_of_ones_taken_back_stay() {
    // The second value's line is as long as the one that was taken back; the third is longer.
    for value in ["1", "a value that is longer than the lines before it"] {
        let folder = tempfile::tempdir().unwrap();
        let put = |store: &Store, key: &str, value: &str| {
            store.write(&[(key.to_owned(), Some(value.to_owned()))], DEADLINE).unwrap()
        };
        let [store, other] = [(); 2].map(|()| Store::in_folder(folder.path()).unwrap());
        put(&other, "first", "1");
        let journal = std::fs::File::options().write(true).open(folder.path().join("records.journal")).unwrap();
        let end = journal.metadata().unwrap().len();
        put(&other, "taken", "1");
        assert_eq!(store.read().len(), 2);
        journal.set_len(end).unwrap();
        put(&Store::in_folder(folder.path()).unwrap(), "other", value);
        // Many replaced lines make a rewrite due.
        for round in 0..20 {
            put(&store, "last", &format!("{round}{}", "x".repeat(20_000)));
        }
        let after = Store::in_folder(folder.path()).unwrap().read();
        assert_eq!(after.keys().collect::<Vec<_>>(), ["first", "last", "other"]);
        assert_eq!(store.read(), after);
        assert!(!folder.path().join("records.broken").exists());
        assert!(folder.path().join("records.journal").metadata().unwrap().len() < 400_000);
    }
}

#[test]
fn a_journal_of_another_version_stays_as_it_is() {
    let folder = tempfile::tempdir().unwrap();
    filled(folder.path());
    let journal = folder.path().join("records.journal");
    let text = std::fs::read_to_string(&journal).unwrap();
    for version in ["2", "10"] {
        let other = text.replacen("records 1 ", &format!("records {version} "), 1) + "an unfinished line";
        std::fs::write(&journal, &other).unwrap();
        let store = Store::in_folder(folder.path()).unwrap();
        assert!(store.read().is_empty());
        let refused = store.write(&[("a".into(), Some("b".into()))], DEADLINE).unwrap_err();
        assert!(refused.contains("records.journal: it has version ") && refused.contains(version), "{refused}");
        assert!(std::fs::read_to_string(&journal).unwrap() == other);
        assert!(!folder.path().join("records.broken").exists());
    }
}

#[test]
fn an_unfinished_snapshot_of_the_index_is_no_damage() {
    let folder = tempfile::tempdir().unwrap();
    let before = filled(folder.path()).read();
    let leftover = folder.path().join("records.index/snap.00000000FFFFFFFF.generating");
    std::fs::write(&leftover, "").unwrap();
    assert_eq!(Store::in_folder(folder.path()).unwrap().read(), before);
    assert!(!leftover.exists() && !folder.path().join("records.broken").exists());
}

#[test]
fn replaced_lines_do_not_fill_the_disk() {
    let folder = tempfile::tempdir().unwrap();
    let store = Store::in_folder(folder.path()).unwrap();
    let value = "x".repeat(20_000);
    for round in 0..40 {
        let written = store.write(&[("key".into(), Some(format!("{round}{value}")))], DEADLINE).unwrap();
        assert_eq!(written.len(), 1);
    }
    assert!(folder.path().join("records.journal").metadata().unwrap().len() < 400_000);
    assert!(Store::in_folder(folder.path()).unwrap().read()["key"].starts_with("39x"));
    assert!(!folder.path().join("records.broken").exists());
}

/// What the library wrote before it had a journal.
fn older_database(cache: &Path) {
    let database = sled::open(cache.join("records.sled")).unwrap();
    database.insert("old", "entry").unwrap();
    database.flush().unwrap();
}

#[test]
fn the_database_of_an_older_library_is_taken_over() {
    let folder = tempfile::tempdir().unwrap();
    older_database(folder.path());
    let leftover = folder.path().join("records.sled/snap.00000000FFFFFFFF.generating");
    std::fs::write(leftover, "").unwrap();
    let store = Store::in_folder(folder.path()).unwrap();
    assert_eq!(store.read()["old"], "entry");
    assert_eq!(store.write(&[("new".into(), Some("entry".into()))], DEADLINE).unwrap().len(), 2);
    assert_eq!(Store::in_folder(folder.path()).unwrap().read().len(), 2);
    // An index of the journal leaves the database alone, which the older library may use again.
    assert_eq!(store.write(&[("long".into(), Some("x".repeat(100_000)))], DEADLINE).unwrap().len(), 3);
    assert_eq!(Store::in_folder(folder.path()).unwrap().read().len(), 3);
    assert!(folder.path().join("records.index").exists());
    let database = sled::open(folder.path().join("records.sled")).unwrap();
    assert_eq!((database.len(), &*database.get("old").unwrap().unwrap()), (1, &b"entry"[..]));
}

#[test]
fn what_is_set_aside_stays() {
    let folder = tempfile::tempdir().unwrap();
    let database = folder.path().join("records.sled");
    for (round, name) in ["records.broken", "records.broken.1", "records.broken.2"].into_iter().enumerate() {
        std::fs::write(&database, format!("no folder {round}")).unwrap();
        assert!(Store::in_folder(folder.path()).unwrap().read().is_empty());
        assert_eq!(std::fs::read_to_string(folder.path().join(name)).unwrap(), format!("no folder {round}"));
    }
    let store = Store::in_folder(folder.path()).unwrap();
    assert_eq!(store.write(&[("a".into(), Some("b".into()))], DEADLINE).unwrap().len(), 1);
    // A damaged journal is made whole with the lines that are left of it.
    let journal = folder.path().join("records.journal");
    let damaged = std::fs::read_to_string(&journal).unwrap() + "00000000 no line\n";
    std::fs::write(&journal, &damaged).unwrap();
    let written = Store::in_folder(folder.path()).unwrap().write(&[("c".into(), Some("d".into()))], DEADLINE);
    assert_eq!(written.unwrap().len(), 2);
    let kept = std::fs::read_to_string(folder.path().join("records.broken.3")).unwrap();
    assert!(kept.starts_with(&damaged));
    assert!(!std::fs::read_to_string(&journal).unwrap().contains("no line"));
}

#[test]
fn a_lock_that_is_never_released_delays_but_does_not_stop() {
    let folder = tempfile::tempdir().unwrap();
    let cache = folder.path().join("cache");
    filled(&cache);
    let lock = std::fs::File::options().write(true).open(cache.join("records.lock")).unwrap();
    lock.lock().unwrap();
    let problems = problem_file(folder.path(), &[16]);
    let warning = assert_tuned(&autotune(&problems).env("FLASHTUNE_CACHE_DIR", &cache).output().unwrap(), false);
    assert!(warning.contains("held by another process"), "{warning}");
    drop(lock);
    assert_success(&autotune(&problems).env("FLASHTUNE_CACHE_DIR", &cache).output().unwrap());
    assert_eq!(keys_in(&cache).len(), 1);
}

#[test]
fn without_home_records_are_kept_in_memory() {
    let folder = tempfile::tempdir().unwrap();
    let problems = problem_file(folder.path(), &[16]);
    let warning = assert_tuned(&autotune(&problems).output().unwrap(), false);
    assert!(warning.contains("there is no cache folder"), "{warning}");
    // A file that was asked for is as good a place.
    let file = folder.path().join("records.jsonl");
    let output = autotune(&problems).arg("--output").arg(&file).output().unwrap();
    assert_success(&output);
    assert!(String::from_utf8_lossy(&output.stderr).contains("the records are in /"), "{output:?}");
    std::fs::remove_file(file).unwrap();
    let entries: Vec<_> = std::fs::read_dir(folder.path()).unwrap().collect();
    assert_eq!(entries.len(), 1, "only the problem file");
}

#[test]
fn full_disk_loses_only_the_records() {
    let folder = tempfile::tempdir().unwrap();
    let (cache, problems) = (folder.path().join("cache"), problem_file(folder.path(), &[16]));
    // `ulimit -f 0` forbids any file to grow; it acts like a full disk with another error code.
    let script = r#"ulimit -f 0; exec "$0" "$@""#;
    let mut shell = Command::new("sh");
    shell.args(["-c", script]).arg(program::path()).args(["autotune", "--device", "cpu", "--json", "--problems"]);
    let output = shell.arg(&problems).env("FLASHTUNE_CACHE_DIR", &cache).env_remove("RUST_LOG").output().unwrap();
    let warning = assert_tuned(&output, false);
    assert!(warning.contains(cache.to_str().unwrap()), "{warning}");
    // With room again the next run works, whatever the failed run left behind.
    let output = autotune(&problems).env("FLASHTUNE_CACHE_DIR", &cache).output().unwrap();
    assert_success(&output);
    assert_eq!(keys_in(&cache).len(), 1);
}
