//! The path of the shared library.

use std::path::PathBuf;

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
