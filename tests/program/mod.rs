//! The command line that was built with the tests.

use std::path::PathBuf;
use std::process::Command;

/// The program. A path given at run time comes first, because a test binary may run elsewhere than
/// it was built; nextest and scripts/test.py give one.
pub fn path() -> PathBuf {
    std::env::var_os("NEXTEST_BIN_EXE_flashtune").map_or_else(|| env!("CARGO_BIN_EXE_flashtune").into(), PathBuf::from)
}

/// The program without this process's settings.
pub fn command() -> Command {
    let mut command = Command::new(path());
    for name in [
        "FLASHTUNE_CACHE_DIR",
        "XDG_CACHE_HOME",
        "HOME",
        "RUST_LOG",
        "FLASHTUNE_PACK",
        "FLASHTUNE_TUNING_DB",
        "FLASHTUNE_TEMPLATES",
    ] {
        command.env_remove(name);
    }
    command
}
