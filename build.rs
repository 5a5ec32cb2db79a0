//! Writes into OUT_DIR what the library carries of files that are not Rust.

use std::env;
use std::fs;
use std::path::PathBuf;

fn main() {
    embed_tuning_db();
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
