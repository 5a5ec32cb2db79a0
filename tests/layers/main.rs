//! The flow has one direction: no module imports from one above it, and no folder has a circle of
//! imports. These tests read `src/` and the Python package.
//!
//! Inside a folder, the modules and the folder's own file (`mod.rs`) form no circle. The file may
//! import a module, or the module may import what the file defines, but not both. A re-export (`pub
//! use child::Name`) is a table of contents and no import. A path through a re-export counts as an
//! import of the module that defines the name. Unit tests inside a module are left out, since the
//! library does not contain them.

#[path = "../source_tree/mod.rs"]
mod source_tree;

mod circles;
mod source;

use circles::{Edges, Modules};
use source::{named, python_imports};
use source_tree::root;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// Modules from the top of the flow down. Modules on one line are beside each other and may not
/// import one another. The last line holds the leaves, which may import only each other.
const LAYERS: &[&[&str]] = &[
    &["attention", "xla", "python"],
    &["capi"],
    &["plan"],
    &["tune"],
    &["backend"],
    &["ops"],
    &["kernel", "cpu"],
    &["cuda", "family"],
    &[
        "problem",
        "config",
        "device",
        "call",
        "dropout",
        "eight",
        "error",
        "environment",
        "files",
        "fork",
        "four",
        "pool",
        "word_hash",
    ],
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

/// The files below a folder with this extension.
fn files(folder: &Path, extension: &str) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).unwrap();
    let mut found = Vec::new();
    for path in entries.map(|entry| entry.unwrap().path()) {
        if path.is_dir() {
            found.extend(files(&path, extension));
        } else if path.extension().is_some_and(|of| of == extension) {
            found.push(path);
        }
    }
    found
}

/// A file's module: `kernel/render.rs` is kernel::render, `kernel/mod.rs` kernel, `lib.rs` and
/// `main.rs` the crate.
fn module_of(relative: &Path) -> source::Path {
    let mut module: source::Path = relative.iter().map(|part| part.to_str().unwrap().to_owned()).collect();
    let file = module.pop().unwrap();
    let name = file.trim_end_matches(".rs");
    module.extend((!["mod", "lib", "main"].contains(&name)).then(|| name.to_owned()));
    module
}

/// The edges of the crate whose own file lies in `folder`, without those below `except`.
fn edges(folder: &Path, except: &str) -> Edges {
    let mut modules = Modules::default();
    for file in files(folder, "rs") {
        let relative = file.strip_prefix(folder).unwrap();
        // Unit tests in a file of their own, behind `#[cfg(test)] mod tests;`.
        let is_unit_test = relative.ends_with("tests.rs");
        if !is_unit_test && (except.is_empty() || !relative.starts_with(except)) {
            modules.insert(module_of(relative), named(&std::fs::read_to_string(&file).unwrap()));
        }
    }
    modules.edges()
}

/// The circles of all folders, each after its folder's name.
fn listed(edges: &Edges, root: &str) -> Vec<String> {
    let of_folder = |(folder, edges): (&source::Path, &BTreeSet<(String, String)>)| {
        let name = [&[root.to_owned()], folder.as_slice()].concat().join("/");
        circles::circles(edges).into_iter().map(move |circle| format!("{name}: {}", circle.join(" -> ")))
    };
    edges.iter().flat_map(of_folder).collect()
}

#[test]
fn no_import_points_upward() {
    // The command line is above all of the library, which it uses by its name.
    let edges = &edges(&root().join("src"), "bin")[&Vec::new()];
    assert!(edges.len() > 30, "only {} imports were found", edges.len());
    let objections: Vec<String> = edges.iter().filter_map(|(module, imported)| objection(module, imported)).collect();
    assert!(objections.is_empty(), "{}", objections.join("\n"));
}

#[test]
fn every_module_has_its_place_in_the_flow() {
    let lib = std::fs::read_to_string(root().join("src/lib.rs")).unwrap();
    let modules: Vec<&str> = lib.lines().filter_map(|line| line.strip_prefix("pub mod ")?.strip_suffix(';')).collect();
    assert!(modules.len() >= 13, "{modules:?}");
    for module in modules {
        assert!(layer(module).is_some(), "{module} is in no layer");
    }
}

#[test]
fn no_folder_has_a_circle_of_imports() {
    let library = edges(&root().join("src"), "bin");
    for folder in ["kernel", "tune", "cpu", "capi", "plan", "cuda", "family", "ops", "xla", "python"] {
        assert!(library[&vec![folder.to_owned()]].len() >= 5, "few imports were found in {folder}");
    }
    let mut found = listed(&library, "src");
    found.extend(listed(&edges(&root().join("src/bin/flashtune"), ""), "src/bin/flashtune"));
    assert!(found.is_empty(), "{}", found.join("\n"));
}

#[test]
fn the_python_package_has_no_circle_of_imports() {
    let mut edges = BTreeSet::new();
    for file in files(&root().join("bindings/python/flashtune"), "py") {
        let module = file.file_stem().unwrap().to_str().unwrap().to_owned();
        let imported = python_imports(&std::fs::read_to_string(&file).unwrap());
        edges.extend(imported.into_iter().map(|imported| (module.clone(), imported)));
    }
    assert!(edges.len() > 20, "{edges:?}");
    assert_eq!(circles::circles(&edges), BTreeSet::new());
}

/// A crate of made-up files: (module, text).
fn crate_of(files: &[(&str, &str)]) -> Edges {
    let mut modules = Modules::default();
    for (module, text) in files {
        let path = module.split("::").filter(|segment| !segment.is_empty()).map(str::to_owned).collect();
        modules.insert(path, named(text));
    }
    modules.edges()
}

fn circles_of(files: &[(&str, &str)]) -> Vec<String> {
    listed(&crate_of(files), "src")
}

#[test]
fn imports_are_seen_in_every_form() {
    for text in [
        "use super::b;",
        "use super::b::{C, D};",
        "use super::{e::F, b::C};",
        "use crate::f::b::C;",
        "pub use super::b::C;",
        "pub(crate) use super::b::C;",
        "fn g() { super::b::h() }",
        "fn g() -> crate::f::b::C { use super::e; e::h() }",
        "const G: char = '\"'; const H: &str = r#\"\"#; use super::b;",
    ] {
        let edges = crate_of(&[("", ""), ("f", ""), ("f::a", text), ("f::b", ""), ("f::e", "")]);
        let found = edges.get(&vec!["f".to_owned()]).cloned().unwrap_or_default();
        assert!(found.contains(&("a".to_owned(), "b".to_owned())), "{text}: {found:?}");
    }
    for text in [
        "// use super::b;",
        "/* super::b::c() */",
        "const C: &str = \"super::b::c\";",
        "use std::b; use half::b::C;",
        "#[cfg(test)]\nmod tests {\n    use super::super::b;\n}",
    ] {
        let edges = crate_of(&[("", ""), ("f", ""), ("f::a", text), ("f::b", "")]);
        assert_eq!(edges, Edges::new(), "{text}");
    }
}

#[test]
fn a_circle_is_reported_by_its_names() {
    let files = [
        ("", ""),
        ("f", "mod a; mod b; mod c; pub use a::A;"),
        ("f::a", "use super::b::B;"),
        ("f::b", "use super::c;"),
        ("f::c", "use crate::f::a;"),
    ];
    assert_eq!(circles_of(&files), ["src/f: a -> b -> c -> a"]);
    assert_eq!(circles_of(&files[..4]), [""; 0]);
}

#[test]
fn a_reexport_is_no_import_and_leads_to_its_module() {
    let through_the_folder =
        [("", ""), ("f", "mod a; mod b; pub use a::A; pub use b::B;"), ("f::a", "use super::B;"), ("f::b", "")];
    assert_eq!(circles_of(&through_the_folder), [""; 0]);
    let both_ways = [&through_the_folder[..3], &[("f::b", "fn f(_: crate::f::A) {}")]].concat();
    assert_eq!(circles_of(&both_ways), ["src/f: a -> b -> a"]);
}

#[test]
fn a_folder_that_calls_a_module_which_uses_its_definition_is_a_circle() {
    let child = ("f::a", "use super::Defined;");
    let definition_alone = [("", ""), ("f", "mod a; pub struct Defined;"), child];
    assert_eq!(circles_of(&definition_alone), [""; 0]);
    let calls = [("", ""), ("f", "mod a; pub struct Defined; fn g() { a::h() }"), child];
    assert_eq!(circles_of(&calls), ["src/f: a -> mod.rs -> a"]);
    let uses = [("", ""), ("f", "mod a; use a::A; pub struct Defined;"), child];
    assert_eq!(circles_of(&uses), ["src/f: a -> mod.rs -> a"]);
}

#[test]
fn a_circle_of_two_folders_is_one_of_the_folder_above() {
    let files = [("", ""), ("f", ""), ("f::a", ""), ("f::a::x", "use crate::f::b::y;"), ("f::b", "")];
    let back = ("f::b::y", "use super::super::a::x::X;");
    assert_eq!(circles_of(&[&files[..], &[back]].concat()), ["src/f: a -> b -> a"]);
}

#[test]
fn imports_of_a_package_are_seen_inside_functions_too() {
    let text = "import torch\nfrom . import _a, _b as b\ndef f():\n    from ._c import g\n    from . import (\n        _d,\n        _e,\n    )\n";
    assert_eq!(python_imports(text), ["_a", "_b", "_c", "_d", "_e"]);
}

#[test]
fn upward_imports_are_objected_to() {
    assert_eq!(objection("tune", "backend"), None);
    assert_eq!(objection("problem", "error"), None);
    assert!(objection("tune", "plan").is_some());
    assert!(objection("kernel", "cpu").is_some());
    assert!(objection("error", "tune").is_some());
    assert!(objection("error", "unheard_of").is_some());
}

#[test]
fn the_environment_is_read_in_one_file() {
    let sources = root().join("src");
    let of_library = |file: &PathBuf| !file.starts_with(sources.join("bin")) && !file.ends_with("environment.rs");
    let library: Vec<PathBuf> = files(&sources, "rs").into_iter().filter(of_library).collect();
    assert!(library.len() > 100, "{library:?}");
    for file in library {
        let text = std::fs::read_to_string(&file).unwrap();
        assert!(!text.contains("env::var"), "{}: call environment::variable", file.display());
    }
}
