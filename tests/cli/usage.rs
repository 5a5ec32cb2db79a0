//! Help, bad usage and exit codes, `info` and presets.

use crate::source_tree::root;
use crate::{SMALL, flashtune, json_lines, run, stderr, stdout, write};
use flashtune::problem::Feature;
use std::process::Stdio;

#[test]
fn every_feature_of_the_table_has_its_options() {
    let folder = tempfile::tempdir().unwrap();
    let help = stdout(&run(folder.path(), &["render", "--help"]));
    for (name, what) in Feature::ALL.iter().flat_map(|feature| feature.row().options) {
        let option = format!("--{} ", name.replace('_', "-"));
        assert!(help.lines().any(|line| line.contains(&option) && line.ends_with(what)), "{option}{what}");
    }
}

#[test]
fn an_unknown_field_of_a_problem_file_is_an_error_that_names_the_known_ones() {
    let folder = tempfile::tempdir().unwrap();
    let problems = write(folder.path(), "problems.jsonl", &SMALL.replace("seqlen_q", "seqlen"));
    let output = run(folder.path(), &["autotune", "--device", "cpu", "--problems", problems.to_str().unwrap()]);
    let message = String::from_utf8(output.stderr).unwrap();
    let message = message.lines().next().unwrap();
    let (unknown, known) = message.split_once(", expected one of ").expect(message);
    assert!(unknown.ends_with("problems.jsonl:1: unknown field `seqlen`"), "{message}");
    let known: Vec<&str> = known.split(", ").collect();
    let of_features = Feature::ALL.iter().flat_map(|feature| feature.row().options).map(|(name, _)| *name);
    for name in of_features.chain(["pass", "head_dim_v", "layout"]) {
        assert!(known.contains(&name), "{name}: {message}");
    }
}

#[test]
fn fields_of_a_problem_file_need_and_exclude_what_the_options_do() {
    let folder = tempfile::tempdir().unwrap();
    for (fields, message) in [
        (r#""fp8_q":true"#, "fp8_q is true without kv_dtype"),
        (r#""keys_per_scale":128"#, "keys_per_scale is given without kv_dtype"),
        (r#""mask":true,"mask_bits":true"#, "mask and mask_bits are both true"),
    ] {
        let problems = write(folder.path(), "problems.jsonl", &SMALL.replace('}', &format!(",{fields}}}")));
        let output = run(folder.path(), &["bench", "--device", "cpu", "file", problems.to_str().unwrap()]);
        assert_eq!(output.status.code(), Some(2), "{fields}: {}", stderr(&output));
        assert!(stderr(&output).contains(&format!("problems.jsonl:1: {message}")), "{}", stderr(&output));
    }
    // Starts of keys are for the forward pass, which such a line means.
    let problems = write(folder.path(), "problems.jsonl", &SMALL.replace('}', r#","key_starts":true}"#));
    let args = ["bench", "--device", "cpu", "--json", "--runs", "1", "file", problems.to_str().unwrap()];
    assert_eq!(crate::json_lines(&run(folder.path(), &args)).len(), 1);
}

#[test]
fn exit_code_is_2_for_bad_usage_and_1_for_failure() {
    let folder = tempfile::tempdir().unwrap();
    let bad =
        write(folder.path(), "bad.jsonl", &format!("{SMALL}\n{{\"num_heads_q\":2,\"seqlen\":48,\"head_dim\":32}}\n"));
    let wrong =
        write(folder.path(), "wrong.jsonl", r#"{"num_heads_q":3,"num_heads_kv":2,"seqlen_q":48,"head_dim":32}"#);
    let features = write(folder.path(), "features.jsonl", &SMALL.replace('}', ",\"dbias\":true}"));
    let (bad, wrong, features) = (bad.to_str().unwrap(), wrong.to_str().unwrap(), features.to_str().unwrap());
    for (args, message) in [
        (&["frobnicate"][..], "frobnicate"),
        (&["autotune", "--device", "gpu0"], "number of a GPU"),
        (&["autotune", "--device", "cpu", "--preset", "gpt7"], "gpt2, bert-large"),
        (&["autotune", "--device", "cpu", "--problems", "/nowhere"], "/nowhere"),
        (&["autotune", "--device", "cpu", "--problems", bad], "bad.jsonl:2"),
        (&["autotune", "--device", "cpu", "--problems", wrong], "num_heads_q is 3"),
        (&["autotune", "--device", "cpu", "--preset", "gpt2", "--time-limit=-1"], "time-limit"),
        (&["bench", "--device", "cpu", "--runs", "0", "preset", "gpt2"], "--runs"),
        (&["render-merge", "--arch", "cpu"], "--arch is cpu"),
        (&["render-kv-append", "--arch", "sm_75"], "--arch is sm_75"),
        (&["render", "--arch", "sm_90", "--pass", "forward", "--head-dim", "513"], "head_dim is 513"),
        (&["render", "--arch", "sm_90", "--pass", "sideways", "--head-dim", "64"], "`forward` or `backward`"),
        (&["render", "--arch", "sm_75", "--pass", "forward", "--head-dim", "64"], "sm_75"),
        (
            &["render", "--arch", "sm_90", "--pass", "forward", "--head-dim", "64", "--dtype", "fp32", "--family=sm90"],
            "served by sm80",
        ),
        (
            &["render", "--arch", "sm_90", "--pass", "forward", "--head-dim", "64", "--config", "block_m=17"],
            "block_m is 17",
        ),
        (&["render", "--arch", "sm_90", "--pass", "forward", "--head-dim", "64", "--config", "blockm=64"], "blockm"),
        (&["autotune", "--device", "cpu", "--problems", features], "dbias is asked for without a bias"),
        (
            &["render", "--arch", "sm_90", "--pass", "forward", "--head-dim", "64", "--causal", "--window-right", "3"],
            "window_right is 3, and causal hides every key after the diagonal",
        ),
        (
            &["render", "--arch", "sm_90", "--pass", "forward", "--head-dim", "64", "--window-left=-2"],
            "window_left is -2",
        ),
        (
            &["render", "--arch", "sm_90", "--pass", "backward", "--head-dim", "264", "--family", "sm90"],
            "served by sm80",
        ),
        (
            &["render", "--arch", "sm_90", "--pass", "backward", "--head-dim", "64", "--page-size", "16"],
            "the backward pass does not take pages",
        ),
    ] {
        let output = run(folder.path(), args);
        assert_eq!(output.status.code(), Some(2), "{args:?}: {}", stderr(&output));
        assert!(stderr(&output).contains(message), "{args:?}: {}", stderr(&output));
        assert!(output.stdout.is_empty(), "{args:?}");
    }
    for args in [
        &["autotune", "--device", "999", "--preset", "gpt2"][..],
        &["records", "import", "/nowhere"],
        &["records", "export", "--device", "cpu", "/nowhere/records.jsonl"],
        &["records", "verify", "/nowhere"],
    ] {
        let output = run(folder.path(), args);
        assert_eq!(output.status.code(), Some(1), "{args:?}: {}", stderr(&output));
        assert!(!stderr(&output).is_empty(), "{args:?}");
    }
    assert_eq!(run(folder.path(), &["--version"]).status.code(), Some(0));
}

#[test]
fn info_shows_devices_libraries_and_the_places_searched() {
    let folder = tempfile::tempdir().unwrap();
    let cache = folder.path().join("cache");
    let text = stdout(&run(&cache, &["info"]));
    for part in ["flashtune 0.", "(cpu, ", "libcuda", "libnvrtc", "cache: ", "records of this machine: 0"] {
        assert!(text.contains(part), "{part} is not in {text}");
    }
    let info = &json_lines(&run(&cache, &["info", "--json"]))[0];
    assert_eq!(info["version"], env!("CARGO_PKG_VERSION"));
    assert!(!info["libnvrtc"]["attempts"].as_array().unwrap().is_empty());
    assert!(info["devices"].as_array().unwrap().iter().any(|device| device["arch"] == "cpu"));
    assert_eq!(info["cache_dir"], cache.to_str().unwrap());
}

#[test]
fn every_preset_is_in_the_guide_and_is_a_list_of_valid_problems() {
    let folder = tempfile::tempdir().unwrap();
    let refusal = stderr(&run(folder.path(), &["autotune", "--preset", "nothing"]));
    let names = refusal.split_once("the presets are ").and_then(|(_, names)| names.lines().next()).expect(&refusal);
    let guide = std::fs::read_to_string(root().join("docs/tuning-for-deployment.md")).unwrap();
    let rows = || guide.lines().filter(|line| line.starts_with("| `"));
    let mut total = 0;
    for name in names.split(", ") {
        assert!(rows().any(|row| row.contains(&format!("`{name}`"))), "{name} is in no row of the guide's presets");
        // With a time limit of 0 all problems are left, and the message counts them.
        let output = run(folder.path(), &["autotune", "--device", "cpu", "--time-limit", "0", "--preset", name]);
        assert!(output.status.success(), "{name}: {}", stderr(&output));
        let message = stderr(&output);
        let count: usize =
            message.split(" are left").next().and_then(|text| text.rsplit(' ').next()?.parse().ok()).unwrap();
        assert!(count >= 6, "{name}: {message}");
        if name == "grid" {
            assert_eq!(count, 3 * 6 * 2 * 2);
        }
        total = if ["all", "common"].contains(&name) { total } else { total + count };
        // Some presets share problems; `all` has each once.
        assert!(name != "all" || (count <= total && count > total / 2), "{message}, {total}");
    }
}

#[test]
fn closed_standard_output_does_not_panic() {
    let folder = tempfile::tempdir().unwrap();
    let problems = write(folder.path(), "problems.jsonl", SMALL);
    for args in [
        &["info"][..],
        &["info", "--json"],
        &["autotune", "--device", "cpu", "--json", "--problems", problems.to_str().unwrap()],
    ] {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let child = flashtune(folder.path()).args(args).stdout(writer).stderr(Stdio::piped()).spawn().unwrap();
        let output = child.wait_with_output().unwrap();
        assert_ne!(output.status.code(), Some(101), "{args:?}: {}", stderr(&output));
        assert!(!stderr(&output).contains("panicked"), "{args:?}: {}", stderr(&output));
    }
}

#[test]
fn a_full_disk_under_standard_output_is_one_sentence() {
    let folder = tempfile::tempdir().unwrap();
    let full = || std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
    for args in [&["info"][..], &["doctor"], &["render-merge", "--arch", "sm_90"], &["records", "model-error"]] {
        let output = flashtune(folder.path()).args(args).stdout(full()).output().unwrap();
        assert_eq!(output.status.code(), Some(1), "{args:?}: {}", stderr(&output));
        let expected = "flashtune: standard output: No space left on device (os error 28)\n";
        assert_eq!(stderr(&output), expected, "{args:?}");
    }
}

#[test]
fn a_tuning_run_survives_a_standard_error_that_cannot_be_written() {
    let folder = tempfile::tempdir().unwrap();
    let problems = write(folder.path(), "problems.jsonl", SMALL);
    let args = ["autotune", "--device", "cpu", "--json", "--problems", problems.to_str().unwrap()];
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let full = std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
    for stderr in [Stdio::from(writer), Stdio::from(full)] {
        let output = flashtune(folder.path()).args(args).stderr(stderr).output().unwrap();
        assert_eq!(json_lines(&output).len(), 2);
    }
}
