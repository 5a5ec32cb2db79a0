//! The source tree, for tests that read its files.

use std::path::PathBuf;

/// The root. A path given at run time comes first, because a test binary may run elsewhere than it
/// was built; cargo, nextest and scripts/test.py give one.
pub fn root() -> PathBuf {
    std::env::var_os("CARGO_MANIFEST_DIR").map_or_else(|| env!("CARGO_MANIFEST_DIR").into(), PathBuf::from)
}
