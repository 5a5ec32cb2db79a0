//! include/flashtune.h is in step with src/capi and compiles on its own as C99 and C++11.

use crate::library;
use crate::source_tree::root;
use std::path::Path;
use std::process::Command;

/// The header that build.rs generated from src/capi.
const GENERATED: &str = include_str!(concat!(env!("OUT_DIR"), "/flashtune.h"));

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
        "include/flashtune.h differs from src/capi; first difference: {drift:?}\nFLASHTUNE_UPDATE_HEADER=1 cargo test --test capi header writes it anew"
    );
}

#[test]
fn the_guides_function_index_names_each_function_once() {
    let (guide, declarations) = GENERATED.split_once("*/").unwrap();
    let (_, index) = guide.split_once(" * Function index\n").unwrap();
    let entry = |line: &str| Some(line.strip_prefix(" *     ")?.split_once("  ")?.0.to_owned());
    let mut indexed: Vec<String> = index.lines().filter_map(entry).collect();
    let declaration = |line: &str| Some(line.split_once('(')?.0.rsplit([' ', '*']).next()?.to_owned());
    let code = declarations.lines().filter(|line| line.starts_with(|first: char| first.is_ascii_lowercase()));
    let mut declared: Vec<String> =
        code.filter_map(declaration).filter(|name| name.starts_with("flashtune_")).collect();
    indexed.sort();
    declared.sort();
    assert_eq!(indexed, declared);
}

#[test]
fn version_macros_are_the_built_librarys() {
    let parts = ["MAJOR", "MINOR", "PATCH"].map(|name| {
        let start = format!("#define FLASHTUNE_VERSION_{name} ");
        GENERATED.lines().find_map(|line| line.strip_prefix(&start)?.parse::<i32>().ok()).unwrap()
    });
    // SAFETY: this is our own library, whose initialisers do nothing, and the header declares the
    // function so.
    let version = unsafe {
        let library = libloading::Library::new(library::path()).unwrap();
        library.get::<extern "C" fn() -> i32>(b"flashtune_version").unwrap()()
    };
    assert_eq!(parts[0] * 1_000_000 + parts[1] * 1_000 + parts[2], version);
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
    // Two includes test the include guard; main uses the declared names.
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
