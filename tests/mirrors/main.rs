//! Files that repeat what Rust defines, for readers that cannot read Rust: each is made from the
//! definition, and compared with what is committed. `make header` writes them anew.
//!
//! `params.cuh` follows src/kernel/params.rs and the views of src/call.rs; `_header.py` follows
//! include/flashtune.h, which tests/capi compares with src/capi.

#[path = "../source_tree/mod.rs"]
mod source_tree;

mod cuda;
mod python;

use source_tree::root;

fn read(path: &str) -> String {
    let path = root().join(path);
    std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// Compares a file with what it should be, or writes it where the environment says so.
fn expect(path: &str, made: &str) {
    if std::env::var_os("FLASHTUNE_UPDATE_MIRRORS").is_some_and(|value| value == "1") {
        std::fs::write(root().join(path), made).unwrap();
    }
    let committed = read(path);
    let drift = made.lines().zip(committed.lines()).enumerate().find(|(_, (new, old))| new != old);
    assert!(
        committed == made,
        "{path} is not what its source gives; first difference: {drift:?}\nmake header makes it anew"
    );
}
