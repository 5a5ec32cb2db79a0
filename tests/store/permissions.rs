//! Permissions: what other users own, may write to or may not write to. A test that needs root says
//! so when it is skipped.

use super::{DEADLINE, assert_success, assert_tuned, autotune, files_under, filled, older_database, problem_file};
use crate::program;
use flashtune::plan::Store;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::process::Command;

#[test]
fn files_that_others_may_write_to_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    filled(folder.path());
    for name in ["records.journal", "records.lock"] {
        let file = folder.path().join(name);
        std::fs::set_permissions(&file, PermissionsExt::from_mode(0o666)).unwrap();
        let refused = Store::in_folder(folder.path()).unwrap().write(&[("a".into(), None)], DEADLINE).unwrap_err();
        assert!(refused.contains(name) && refused.contains("0666"), "{refused}");
        std::fs::set_permissions(&file, PermissionsExt::from_mode(0o600)).unwrap();
    }
}

#[test]
fn an_index_that_others_may_write_to_is_made_anew_and_an_old_database_is_not_read() {
    for name in ["records.index", "records.index/db"] {
        let folder = tempfile::tempdir().unwrap();
        let store = filled(folder.path());
        let long = ("long".to_owned(), Some("x".repeat(100_000)));
        let before = store.write(&[long], DEADLINE).unwrap();
        assert_eq!(Store::in_folder(folder.path()).unwrap().read(), before);
        let place = folder.path().join(name);
        std::fs::set_permissions(&place, PermissionsExt::from_mode(0o777)).unwrap();
        let inode = place.metadata().unwrap().ino();
        // Another file keeps the inode from being used again.
        let _held = std::fs::File::open(&place).unwrap();
        for _ in 0..2 {
            assert_eq!(Store::in_folder(folder.path()).unwrap().read(), before);
        }
        let anew = place.metadata().unwrap();
        assert!(anew.ino() != inode && anew.mode() & 0o022 == 0, "{name}");
    }
    let folder = tempfile::tempdir().unwrap();
    older_database(folder.path());
    let database = folder.path().join("records.sled");
    std::fs::set_permissions(&database, PermissionsExt::from_mode(0o777)).unwrap();
    assert!(Store::in_folder(folder.path()).unwrap().read().is_empty());
    std::fs::set_permissions(&database, PermissionsExt::from_mode(0o755)).unwrap();
    assert_eq!(Store::in_folder(folder.path()).unwrap().read()["old"], "entry");
}

#[test]
fn a_umask_of_zero_lets_nobody_in() {
    let folder = tempfile::tempdir().unwrap();
    let (cache, problems) = (folder.path().join("cache"), problem_file(folder.path(), &[16]));
    let mut shell = Command::new("sh");
    shell.args(["-c", r#"umask 000; exec "$0" "$@""#]).arg(program::path());
    shell.args(["autotune", "--device", "cpu", "--json", "--problems"]).arg(&problems);
    let output = shell.env("FLASHTUNE_CACHE_DIR", &cache).env_remove("RUST_LOG").output().unwrap();
    assert_success(&output);
    for path in files_under(&cache) {
        let reached = path.ancestors().take_while(|place| place.starts_with(&cache));
        let modes: Vec<u32> = reached.map(|place| place.metadata().unwrap().mode() & 0o777).collect();
        assert!(modes[1..].iter().all(|mode| *mode == 0o700), "{}: {modes:?}", path.display());
        assert_eq!(modes[0] & 0o022, 0, "{}: {modes:?}", path.display());
    }
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
    let warning = assert_tuned(&autotune(&problems).env("FLASHTUNE_CACHE_DIR", &cache).output().unwrap(), false);
    assert!(warning.contains("belongs to user 65534"), "{warning}");
    assert_eq!(std::fs::read_dir(&cache).unwrap().count(), 0);
}

#[test]
fn folder_that_others_may_write_to_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let (cache, problems) = (folder.path().join("cache"), problem_file(folder.path(), &[16]));
    std::fs::create_dir(&cache).unwrap();
    std::fs::set_permissions(&cache, PermissionsExt::from_mode(0o777)).unwrap();
    let warning = assert_tuned(&autotune(&problems).env("FLASHTUNE_CACHE_DIR", &cache).output().unwrap(), false);
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
    let warning = assert_tuned(&command.output().unwrap(), false);
    assert!(warning.contains(cache.to_str().unwrap()), "{warning}");
    std::fs::set_permissions(&cache, PermissionsExt::from_mode(0o700)).unwrap();
    assert_eq!(std::fs::read_dir(&cache).unwrap().count(), 0);
}
