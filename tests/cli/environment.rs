//! Environment variables, which choose folders and libraries to load.

use crate::{program, stdout};
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::process::Command;

const NOBODY: u32 = 65534;

/// A copy of a program that runs as nobody, whoever starts it.
fn setuid_copy(of: &Path, folder: &Path) -> PathBuf {
    let copy = folder.join(of.file_name().unwrap());
    // Written by this process, the file would stay open for writing in any child that another test
    // starts meanwhile, and a program that is open for writing does not start.
    assert!(Command::new("cp").arg(of).arg(&copy).status().unwrap().success());
    chown(&copy, Some(NOBODY), Some(NOBODY)).unwrap();
    std::fs::set_permissions(&copy, PermissionsExt::from_mode(0o4755)).unwrap();
    copy
}

#[test]
fn a_setuid_program_takes_no_variable_from_its_caller() {
    if std::fs::metadata("/proc/self").map_or(1, |own| own.uid()) != 0 {
        eprintln!("SKIPPED: only root can make a setuid program of another user");
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    std::fs::set_permissions(folder.path(), PermissionsExt::from_mode(0o755)).unwrap();
    let id = setuid_copy(Path::new("/usr/bin/id"), folder.path());
    let user = Command::new(id).arg("-u").output().unwrap();
    if user.stdout != format!("{NOBODY}\n").as_bytes() {
        eprintln!("SKIPPED: the file system ignores the setuid bit");
        return;
    }
    let planted = folder.path().join("planted");
    for (name, place) in [
        ("FLASHTUNE_CACHE_DIR", "cache_dir"),
        ("XDG_CACHE_HOME", "cache_dir"),
        ("HOME", "cache_dir"),
        ("FLASHTUNE_NVRTC", "libnvrtc"),
        ("CUDA_HOME", "libnvrtc"),
        ("VIRTUAL_ENV", "libnvrtc"),
    ] {
        let names_it = |program: &Path| {
            let mut command = Command::new(program);
            command.args(["info", "--json"]).env_clear().env(name, &planted);
            let info: serde_json::Value = serde_json::from_str(&stdout(&command.output().unwrap())).unwrap();
            info[place].to_string().contains(planted.to_str().unwrap())
        };
        // VIRTUAL_ENV is a place only if the folder exists.
        std::fs::create_dir_all(planted.join("lib/python3.12/site-packages/nvidia")).unwrap();
        assert!(names_it(&program::path()) || name == "VIRTUAL_ENV", "{name} does not reach {place}");
        assert!(!names_it(&setuid_copy(&program::path(), folder.path())), "{name} reaches {place}");
    }
}
