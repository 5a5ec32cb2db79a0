//! The build script. It embeds the library's files that are not Rust, generates a C header to
//! compare with the committed one, and sets how the library is linked.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};

fn main() {
    embed_templates();
    embed_tuning_db();
    generate_header();
    link_arguments();
}

/// `templates.rs`: a table of every file under `templates/`, by its path from there, sorted.
fn embed_templates() {
    println!("cargo::rerun-if-changed=templates");
    let root = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").expect("cargo sets it")).join("templates");
    let mut files = files_under(&root);
    files.sort();
    let mut table = String::from("static TEMPLATES: &[(&str, &str)] = &[\n");
    for file in files {
        let name = file.strip_prefix(&root).expect("it was found there").to_str().expect("template names are ASCII");
        table.push_str(&format!("    ({name:?}, include_str!({:?})),\n", file));
    }
    table.push_str("];\n");
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets it")).join("templates.rs");
    fs::write(&out, table).unwrap_or_else(|error| panic!("writing {}: {error}", out.display()));
}

fn files_under(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).unwrap_or_else(|error| panic!("reading {}: {error}", folder.display()));
    let mut files = Vec::new();
    for entry in entries {
        let path = entry.expect("a readable folder").path();
        match path.is_dir() {
            true => files.extend(files_under(&path)),
            false if path.extension().is_some_and(|end| end == "tera" || end == "cuh") => files.push(path),
            false => {}
        }
    }
    files
}

/// `tuning_db.rs`: a table of every `tuning-db/<arch>/<gpu>.jsonl`, by its path from there, sorted.
fn embed_tuning_db() {
    println!("cargo::rerun-if-changed=tuning-db");
    let root = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").expect("cargo sets it")).join("tuning-db");
    let entries = |folder: &PathBuf| {
        let entries = fs::read_dir(folder).unwrap_or_else(|error| panic!("reading {}: {error}", folder.display()));
        let mut paths: Vec<PathBuf> = entries.map(|entry| entry.expect("a readable folder").path()).collect();
        paths.sort();
        paths
    };
    let mut table = String::from("&[\n");
    for file in entries(&root).iter().filter(|path| path.is_dir()).flat_map(&entries) {
        if file.extension().is_some_and(|extension| extension == "jsonl") {
            let name = file.strip_prefix(&root).expect("it was found there").to_str().expect("its name is a slug");
            table.push_str(&format!("    ({name:?}, include_str!({file:?})),\n"));
        }
    }
    table.push_str("]\n");
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets it")).join("tuning_db.rs");
    fs::write(&out, table).unwrap_or_else(|error| panic!("writing {}: {error}", out.display()));
}

/// The files of the C face and of the faces above it in the header's order: what is declared first
/// is read first.
const HEADER_SOURCES: [&str; 19] = [
    "src/capi/status.rs",
    "src/capi/last_error.rs",
    "src/capi/log.rs",
    "src/capi/context.rs",
    "src/capi/pack.rs",
    "src/capi/views.rs",
    "src/capi/types.rs",
    "src/capi/forward.rs",
    "src/capi/backward.rs",
    "src/capi/merge.rs",
    "src/capi/kv_append_params.rs",
    "src/capi/kv_append.rs",
    "src/capi/quantize.rs",
    "src/capi/plan_info.rs",
    "src/capi/range.rs",
    "src/capi/autotune.rs",
    "src/capi/records.rs",
    "src/xla/handlers.rs",
    "src/python/functions.rs",
];

/// Writes OUT_DIR/flashtune.h; `tests/capi/header.rs` compares it with include/flashtune.h, which
/// this never touches.
fn generate_header() {
    println!("cargo:rerun-if-changed=cbindgen.toml");
    println!("cargo:rerun-if-changed=src/capi");
    println!("cargo:rerun-if-changed=src/xla/handlers.rs");
    println!("cargo:rerun-if-changed=src/python/functions.rs");
    let root = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").expect("cargo sets CARGO_MANIFEST_DIR"));
    let mut config = cbindgen::Config::from_file(root.join("cbindgen.toml")).expect("cbindgen.toml is readable");
    config.after_includes = Some(version_macros());
    let builder = cbindgen::Builder::new().with_config(config);
    let builder = HEADER_SOURCES.iter().fold(builder, |builder, file| builder.with_src(root.join(file)));
    let header = builder.generate().expect("cbindgen reads the sources");
    header.write_to_file(PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR")).join("flashtune.h"));
}

/// The version has one home, Cargo.toml.
fn version_macros() -> String {
    let part = |name: &str| env::var(format!("CARGO_PKG_VERSION_{name}")).expect("cargo sets the version");
    let (major, minor, patch) = (part("MAJOR"), part("MINOR"), part("PATCH"));
    format!(
        "
#define FLASHTUNE_VERSION_MAJOR {major}
#define FLASHTUNE_VERSION_MINOR {minor}
#define FLASHTUNE_VERSION_PATCH {patch}
/** The version of this header, in the form in which flashtune_version() returns the library's. */
#define FLASHTUNE_VERSION \\
  (FLASHTUNE_VERSION_MAJOR * 1000000 + FLASHTUNE_VERSION_MINOR * 1000 + FLASHTUNE_VERSION_PATCH)"
    )
}

/// dlclose must not unmap the library: sled's and our own threads would be left without code.
fn link_arguments() {
    if env::var("CARGO_CFG_TARGET_OS").is_ok_and(|os| os == "linux") {
        println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");
    }
}
