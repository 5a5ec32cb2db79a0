//! include/flashtune.h: in step with src/capi, and clean on its own in C99 and C++11.

use std::path::{Path, PathBuf};
use std::process::Command;

/// What build.rs made of src/capi.
const GENERATED: &str = include_str!(concat!(env!("OUT_DIR"), "/flashtune.h"));

fn root() -> PathBuf {
    // At run time first: a test binary may run from another place than it was built in.
    std::env::var_os("CARGO_MANIFEST_DIR").map_or_else(|| env!("CARGO_MANIFEST_DIR").into(), PathBuf::from)
}

#[test]
fn header_is_what_cbindgen_makes_of_the_sources() {
    let path = root().join("include/flashtune.h");
    if std::env::var_os("FLASHTUNE_UPDATE_HEADER").is_some_and(|value| value == "1") {
        std::fs::write(&path, GENERATED).unwrap();
    }
    let committed = std::fs::read_to_string(&path).unwrap_or_default();
    let drift = GENERATED.lines().zip(committed.lines()).enumerate().find(|(_, (new, old))| new != old);
    assert!(
        committed == GENERATED,
        "include/flashtune.h is not what src/capi gives; first difference: {drift:?}\nFLASHTUNE_UPDATE_HEADER=1 cargo test --test header makes it anew"
    );
}

#[test]
fn version_macros_are_the_crates() {
    for (name, value) in [
        ("MAJOR", env!("CARGO_PKG_VERSION_MAJOR")),
        ("MINOR", env!("CARGO_PKG_VERSION_MINOR")),
        ("PATCH", env!("CARGO_PKG_VERSION_PATCH")),
    ] {
        assert!(GENERATED.contains(&format!("#define FLASHTUNE_VERSION_{name} {value}\n")));
    }
}

#[test]
fn header_compiles_alone_as_c99() {
    compiles_alone("CC", "cc", "-std=c99", "c");
}

#[test]
fn header_compiles_alone_as_cpp11() {
    compiles_alone("CXX", "c++", "-std=c++11", "cpp");
}

fn compiles_alone(variable: &str, default: &str, standard: &str, extension: &str) {
    let folder = tempfile::tempdir().unwrap();
    let source = folder.path().join("alone").with_extension(extension);
    // Twice, so that the include guard is tried; the use shows that the names are there.
    let text = "#include <flashtune.h>\n#include <flashtune.h>\nint main(void) { return flashtune_version() == FLASHTUNE_VERSION ? 0 : 1; }\n";
    std::fs::write(&source, text).unwrap();
    let compiler = std::env::var(variable).unwrap_or_else(|_| default.to_owned());
    let output = Command::new(&compiler)
        .args([standard, "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-fsyntax-only", "-I"])
        .arg(root().join("include"))
        .arg(Path::new(&source))
        .output()
        .unwrap_or_else(|error| panic!("{compiler} does not start: {error}"));
    assert!(output.status.success(), "{compiler} {standard}:\n{}", String::from_utf8_lossy(&output.stderr));
}
