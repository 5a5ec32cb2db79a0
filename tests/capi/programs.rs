//! Runs the C programs of tests/c and examples/c, and the C++ programs of tests/cpp and
//! examples/cpp, against the library built with this test. They compile with warnings as errors,
//! and with the address and undefined-behaviour sanitizers if the compiler has them.

use crate::library;
use crate::source_tree::root;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::OnceLock;

#[test]
fn bad_arguments_get_a_status_that_names_them_and_write_nothing() {
    passes("bad_arguments");
}

#[test]
fn forward_and_backward_agree_with_naive_arithmetic() {
    passes("round_trip");
}

#[test]
fn paged_keys_give_the_bits_of_contiguous_keys() {
    passes("pages");
}

#[test]
fn halves_of_the_keys_merge_into_attention_over_all_of_them() {
    passes("merge");
}

#[test]
fn new_keys_go_behind_those_in_a_cache() {
    passes("kv_append");
}

#[test]
fn slots_rotate_idle_and_advance_in_place() {
    passes("kv_append_slots");
}

#[test]
fn rows_of_int4_are_appended_attended_to_and_refused() {
    passes("four_bits");
}

#[test]
fn tensors_of_eight_bits_are_appended_attended_to_and_refused() {
    passes("eight_bits");
}

#[test]
fn keys_from_a_start_of_their_own_give_the_bits_of_plain_keys() {
    passes("key_starts");
}

#[test]
fn many_threads_share_a_context() {
    passes("threads");
}

#[test]
fn contexts_come_and_go() {
    passes("contexts");
}

#[test]
fn a_forked_child_gets_a_status_and_may_make_a_context_of_its_own() {
    passes("fork");
}

#[test]
fn junk_gets_a_status_and_leaves_outputs_alone() {
    passes("junk");
}

#[test]
fn processes_tune_and_launch_at_once_on_one_cache_folder() {
    passes("processes");
}

#[test]
fn sampled_rows_of_tensors_are_right_in_memory_of_any_pitch() {
    passes("large");
}

#[test]
#[ignore = "a million calls take minutes: cargo test --test capi -- --ignored junk"]
fn a_million_calls_of_junk_get_a_status() {
    let folder = tempfile::tempdir().unwrap();
    let program = compile("tests/c/junk.c", folder.path(), sanitizers());
    let output = run(&program, folder.path(), "1000000");
    assert!(output.status.success(), "{}\n{}", output.status, text(&output));
}

/// Without sanitizers, whose own memory is far above every limit.
#[test]
fn too_little_memory_or_too_few_threads_are_a_status_and_never_a_signal() {
    let folder = tempfile::tempdir().unwrap();
    let program = compile("tests/c/limits.c", folder.path(), &[]);
    let output = run(&program, folder.path(), "");
    assert!(output.status.success(), "{}\n{}", output.status, text(&output));
}

#[test]
fn tuning_is_remembered() {
    passes("tuning");
}

/// The example is also the README's demonstration: it tunes once, and the next run finds the
/// record. It runs without a sanitizer, because its unfused attention is slow and it may run on a
/// GPU.
#[test]
fn example_tunes_once_and_starts_from_its_record_later() {
    let folder = tempfile::tempdir().unwrap();
    let program = compile("examples/c/attention.c", folder.path(), &["-O3"]);
    for expected in ["tuning    took", "tuning    none: starts from this machine's record"] {
        let output = run(&program, folder.path(), "2");
        let printed = text(&output);
        assert!(output.status.success() && printed.contains(expected), "{}\n{printed}", output.status);
        for line in ["device ", "forward ", "backward ", "error ", "speed "] {
            assert!(printed.lines().any(|printed| printed.starts_with(line)), "no {line:?} in:\n{printed}");
        }
    }
}

#[test]
fn inputs_are_const_in_c_and_in_cpp() {
    let folder = tempfile::tempdir().unwrap();
    let source = "tests/c/const_inputs.c";
    let in_c = compile(source, folder.path(), &["-Wcast-qual"]);
    assert_silent(source, &run(&in_c, folder.path(), ""));
    let in_cpp = compile_cpp(source, folder.path(), &["-Wcast-qual", "-x", "c++"]);
    assert_silent(source, &run(&in_cpp, folder.path(), ""));
}

/// The C++ wrapper, with exceptions and without, under the warnings that its users turn on.
#[test]
fn cpp_wrapper_returns_values_and_failures() {
    for mode in [
        &["-Wshadow", "-Wconversion", "-Wsign-conversion", "-Wold-style-cast"][..],
        &["-std=c++20", "-Wshadow", "-Wconversion", "-fno-exceptions"],
    ] {
        let folder = tempfile::tempdir().unwrap();
        let program = compile_cpp("tests/cpp/wrapper.cpp", folder.path(), mode);
        let output = run(&program, folder.path(), "");
        assert!(output.status.success(), "{mode:?}: {}\n{}", output.status, text(&output));
    }
}

#[test]
fn cpp_examples_check_themselves() {
    for (name, prints) in [("packed_qkv", "loss "), ("decode_pages", "3 sequences of 40 keys")] {
        let folder = tempfile::tempdir().unwrap();
        let program = compile_cpp(&format!("examples/cpp/{name}.cpp"), folder.path(), &[]);
        let output = run(&program, folder.path(), "");
        let printed = text(&output);
        assert!(output.status.success() && printed.starts_with(prints), "{name}: {}\n{printed}", output.status);
    }
}

#[test]
fn example_of_packed_qkv_learns() {
    let folder = tempfile::tempdir().unwrap();
    let program = compile("examples/c/packed_qkv.c", folder.path(), sanitizers());
    let output = run(&program, folder.path(), "");
    let printed = text(&output);
    assert!(output.status.success() && printed.starts_with("loss "), "{}\n{printed}", output.status);
}

#[test]
fn example_serves_random_batches_in_a_sealed_context() {
    let folder = tempfile::tempdir().unwrap();
    let program = compile("examples/c/serving.c", folder.path(), sanitizers());
    let output = run(&program, folder.path(), "300");
    let printed = text(&output);
    assert!(output.status.success(), "{}\n{printed}", output.status);
    assert!(printed.contains("launches  300, none of which had to prepare"), "{printed}");
}

#[test]
fn prepared_range_serves_a_sealed_context() {
    passes("ranges");
}

/// Compiles tests/c/<name>.c and runs it in an empty home. Its argument is the path of a cache
/// folder that does not exist yet.
fn passes(name: &str) {
    let folder = tempfile::tempdir().unwrap();
    let program = compile(&format!("tests/c/{name}.c"), folder.path(), sanitizers());
    let cache = folder.path().join("cache");
    assert_silent(name, &run(&program, folder.path(), cache.to_str().unwrap()));
}

pub fn assert_silent(name: &str, output: &Output) {
    assert!(output.status.success(), "{name}: {}\n{}", output.status, text(output));
    assert!(output.stdout.is_empty() && output.stderr.is_empty(), "{name} or the library printed:\n{}", text(output));
}

fn run(program: &Path, home: &Path, argument: &str) -> Output {
    let mut command = Command::new(program);
    command.arg(argument).env("HOME", home).env_remove("XDG_CACHE_HOME").env_remove("FLASHTUNE_CACHE_DIR");
    command.env("LD_LIBRARY_PATH", library::path().parent().unwrap());
    // The CUDA driver maps memory in AddressSanitizer's shadow gap. If the gap is protected, cuInit
    // reports that memory is out.
    command.env("ASAN_OPTIONS", "protect_shadow_gap=0");
    command.output().unwrap_or_else(|error| panic!("{} does not start: {error}", program.display()))
}

pub fn compile(source: &str, folder: &Path, extra: &[&str]) -> PathBuf {
    let root = root();
    let program = folder.join("program");
    let mut command = Command::new(compiler());
    command.args(["-std=c99", "-O1", "-g", "-Wall", "-Wextra", "-Wpedantic", "-Werror"]);
    command.args(extra).arg("-I").arg(root.join("include")).arg(root.join(source)).arg("-o").arg(&program);
    command.arg(library::path()).args(["-lm", "-ldl", "-pthread"]);
    let output = command.output().unwrap_or_else(|error| panic!("{} does not start: {error}", compiler()));
    assert!(output.status.success(), "{source}:\n{}", text(&output));
    program
}

fn compile_cpp(source: &str, folder: &Path, extra: &[&str]) -> PathBuf {
    let root = root();
    let program = folder.join("program");
    let compiler = std::env::var("CXX").unwrap_or_else(|_| "c++".to_owned());
    let mut command = Command::new(&compiler);
    command.args(["-std=c++17", "-O1", "-g", "-Wall", "-Wextra", "-Wpedantic", "-Werror"]).args(extra);
    command.args(sanitizers()).arg("-I").arg(root.join("include")).arg(root.join(source)).arg("-o").arg(&program);
    // The library is no source, whatever language the flags name.
    let output = command
        .args(["-x", "none"])
        .arg(library::path())
        .output()
        .unwrap_or_else(|error| panic!("{compiler}: {error}"));
    assert!(output.status.success(), "{source}:\n{}", text(&output));
    program
}

fn compiler() -> String {
    std::env::var("CC").unwrap_or_else(|_| "cc".to_owned())
}

/// The sanitizers' flags, if a program built with them runs on this machine.
pub fn sanitizers() -> &'static [&'static str] {
    const FLAGS: &[&str] = &["-fsanitize=address,undefined", "-fno-sanitize-recover=all"];
    static WORK: OnceLock<bool> = OnceLock::new();
    let work = *WORK.get_or_init(|| {
        let folder = tempfile::tempdir().unwrap();
        let (source, program) = (folder.path().join("try.c"), folder.path().join("try"));
        std::fs::write(&source, "int main(void) { return 0; }\n").unwrap();
        let built = Command::new(compiler()).args(FLAGS).arg(&source).arg("-o").arg(&program).output();
        built.is_ok_and(|built| built.status.success())
            && Command::new(&program).status().is_ok_and(|status| status.success())
    });
    if !work {
        eprintln!("{} cannot build and run sanitized programs: the C tests run without them", compiler());
    }
    if work { FLAGS } else { &[] }
}

pub fn text(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr)
}
