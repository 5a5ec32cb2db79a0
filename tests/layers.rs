//! The flow has one direction: no module imports from one above it. Reads `src/`.

use std::path::{Path, PathBuf};

/// Modules from the top of the flow down. Those on one line are beside each other and may not import one another; the
/// last line are the leaves, which know nothing but each other.
const LAYERS: &[&[&str]] = &[
    &["capi"],
    &["plan"],
    &["tune"],
    &["backend"],
    &["kernel", "cpu"],
    &["cuda"],
    &["problem", "config", "device", "call", "merge", "kv_append", "dropout", "error"],
];

fn layer(module: &str) -> Option<usize> {
    LAYERS.iter().position(|layer| layer.contains(&module))
}

/// Why a file of `module` may not import `imported`; None where it may.
fn objection(module: &str, imported: &str) -> Option<String> {
    let (Some(own), Some(other)) = (layer(module), layer(imported)) else {
        return Some(format!("{module} or {imported} has no place in the flow; give it one in LAYERS"));
    };
    let is_leaf = own == LAYERS.len() - 1;
    match imported == module || other > own || (is_leaf && other == own) {
        true => None,
        false => Some(format!("{module} imports {imported}, which is above or beside it")),
    }
}

/// The modules named after `crate::` in a text, those of a braced list too. Comments do not count.
fn imports(text: &str) -> Vec<String> {
    let code: String = text.lines().map(|line| line.split("//").next().unwrap_or("")).collect::<Vec<_>>().join("\n");
    let name = |text: &str| text.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect::<String>();
    let mut found = Vec::new();
    for after in code.split("crate::").skip(1) {
        match after.strip_prefix('{') {
            None => found.push(name(after)),
            Some(list) => {
                let mut depth = 1;
                let mut item = String::new();
                for c in list.chars() {
                    match c {
                        '{' => depth += 1,
                        '}' => depth -= 1,
                        _ => {}
                    }
                    if depth == 0 || (c == ',' && depth == 1) {
                        found.push(name(item.trim()));
                        item.clear();
                    } else {
                        item.push(c);
                    }
                    if depth == 0 {
                        break;
                    }
                }
            }
        }
    }
    found.retain(|module| !module.is_empty());
    found
}

fn rust_files(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).unwrap();
    let mut files = Vec::new();
    for path in entries.map(|entry| entry.unwrap().path()) {
        if path.is_dir() {
            files.extend(rust_files(&path));
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            files.push(path);
        }
    }
    files
}

#[test]
fn no_import_points_upward() {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut objections = Vec::new();
    let mut seen = 0;
    for file in rust_files(&source) {
        let relative = file.strip_prefix(&source).unwrap();
        let module = relative.iter().next().unwrap().to_str().unwrap().trim_end_matches(".rs");
        // The command line is above all of the library, which it uses by its name.
        if ["lib", "bin"].contains(&module) {
            continue;
        }
        for imported in imports(&std::fs::read_to_string(&file).unwrap()) {
            seen += 1;
            objections.extend(objection(module, &imported).map(|why| format!("{}: {why}", relative.display())));
        }
    }
    assert!(seen > 100, "only {seen} imports were found in {}", source.display());
    assert!(objections.is_empty(), "{}", objections.join("\n"));
}

#[test]
fn every_module_has_its_place_in_the_flow() {
    let lib = std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("src/lib.rs")).unwrap();
    let modules: Vec<&str> = lib.lines().filter_map(|line| line.strip_prefix("pub mod ")?.strip_suffix(';')).collect();
    assert!(modules.len() >= 13, "{modules:?}");
    for module in modules {
        assert!(layer(module).is_some(), "{module} is in no layer");
    }
}

#[test]
fn upward_imports_are_seen_in_every_form() {
    assert_eq!(imports("use crate::plan::Engine;"), ["plan"]);
    assert_eq!(imports("use crate::{error::{Error, Result}, tune, call::Call};"), ["error", "tune", "call"]);
    assert_eq!(imports("fn f() -> crate::backend::Stream { crate::cpu::g() } // crate::capi"), ["backend", "cpu"]);
    assert_eq!(objection("tune", "backend"), None);
    assert_eq!(objection("problem", "error"), None);
    assert!(objection("tune", "plan").is_some());
    assert!(objection("kernel", "cpu").is_some());
    assert!(objection("error", "tune").is_some());
}
