//! The shared library exports only flashtune_* functions and links no CUDA library.

use crate::library;
use crate::source_tree::root;
use std::ffi::c_void;
use std::process::Command;

fn binutil(tool: &str, arguments: &[&str]) -> String {
    let output = Command::new(tool).args(arguments).arg(library::path()).output();
    let output = output
        .unwrap_or_else(|error| panic!("{tool} (of binutils, which come with the C compiler) does not start: {error}"));
    assert!(output.status.success(), "{tool}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn only_flashtune_functions_are_exported() {
    let listed = binutil("nm", &["-D", "--defined-only"]);
    let names: Vec<&str> = listed.lines().filter_map(|line| line.split_whitespace().last()).collect();
    assert!(names.contains(&"flashtune_forward") && names.contains(&"flashtune_backward"), "{names:?}");
    let foreign: Vec<_> = names.iter().filter(|name| !name.starts_with("flashtune_")).collect();
    assert!(foreign.is_empty(), "exported functions outside of flashtune_*: {foreign:?}");
}

#[test]
fn exports_and_header_name_the_same_functions() {
    let listed = binutil("nm", &["-D", "--defined-only"]);
    let mut exported: Vec<&str> = listed.lines().filter_map(|line| line.split_whitespace().last()).collect();
    exported.sort_unstable();
    let header = std::fs::read_to_string(root().join("include/flashtune.h")).unwrap();
    // A declaration starts a line and has its name before the parenthesis.
    let types = ["int32_t ", "const char *", "void *"];
    let declarations = header.lines().filter(|line| types.iter().any(|of_type| line.starts_with(of_type)));
    let mut declared: Vec<&str> = declarations
        .filter_map(|line| line.split('(').next()?.rsplit([' ', '*']).next())
        .filter(|name| name.starts_with("flashtune_"))
        .collect();
    declared.sort_unstable();
    assert_eq!(exported, declared);
}

/// These tests are such a program.
#[test]
fn a_program_without_cpython_gets_no_functions_of_it() {
    // SAFETY: as the header declares it. Without CPython nothing is read.
    let functions = unsafe {
        let library = libloading::Library::new(library::path()).unwrap();
        let make = library.get::<unsafe extern "C" fn(*mut c_void) -> *mut c_void>(b"flashtune_python_drafts").unwrap();
        make(std::ptr::null_mut())
    };
    assert!(functions.is_null());
}

#[test]
fn no_cuda_library_is_linked() {
    let needed = binutil("readelf", &["-d"]);
    let libraries: Vec<_> = needed.lines().filter(|line| line.contains("(NEEDED)")).collect();
    assert!(libraries.iter().any(|line| line.contains("libc.so")), "{libraries:?}");
    let cuda: Vec<_> =
        libraries.iter().filter(|line| ["cuda", "nvrtc", "nvidia"].iter().any(|n| line.contains(n))).collect();
    assert!(cuda.is_empty(), "linked: {cuda:?}");
}

#[test]
#[cfg(target_os = "linux")]
fn library_stays_mapped_after_dlclose() {
    assert!(binutil("readelf", &["-d"]).contains("NODELETE"));
}

#[test]
fn the_library_stays_after_dlclose() {
    let path = library::path();
    let is_mapped = || {
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        maps.lines().any(|line| line.ends_with(path.to_str().unwrap()))
    };
    // SAFETY: the library's initialisers only set up its own state.
    let loaded = unsafe { libloading::Library::new(&path) }.unwrap();
    assert!(is_mapped());
    loaded.close().unwrap();
    assert!(is_mapped(), "its threads and handlers would be left without code");
}
