//! Writes into OUT_DIR what the library carries of files that are not Rust.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};

fn main() {
    embed_templates();
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
