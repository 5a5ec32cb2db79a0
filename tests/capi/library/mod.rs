//! Paths of the shared library and the source tree for the tests.

use std::path::PathBuf;

/// The source tree. A path given at run time comes first, because a test binary may run elsewhere
/// than it was built.
pub fn root() -> PathBuf {
    std::env::var_os("CARGO_MANIFEST_DIR").map_or_else(|| env!("CARGO_MANIFEST_DIR").into(), PathBuf::from)
}

/// The libflashtune.so built with this test: FLASHTUNE_LIBRARY, or the newest one beside or above
/// the test binary (target/debug/deps). An unpacked archive of test binaries has the same layout.
pub fn path() -> PathBuf {
    if let Some(path) = std::env::var_os("FLASHTUNE_LIBRARY") {
        return PathBuf::from(path);
    }
    let binary = std::env::current_exe().unwrap();
    let candidates = binary.ancestors().skip(1).take(3).map(|folder| folder.join("libflashtune.so"));
    let built = candidates.filter_map(|path| Some((path.metadata().ok()?.modified().ok()?, path)));
    let newest =
        built.max().unwrap_or_else(|| panic!("no libflashtune.so near {}; set FLASHTUNE_LIBRARY", binary.display()));
    newest.1
}
