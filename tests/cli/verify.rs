//! `records verify`: which records may ship, and the complaint about each other one.

use crate::{run, stderr, write};
use flashtune::plan::{Record, shipped};
use serde_json::{Value, json};
use std::path::Path;

fn shipped_record() -> Record {
    crate::h200_records().swap_remove(0)
}

/// The exit code and messages for a file.
fn verified(folder: &Path, text: &str) -> (Option<i32>, String) {
    let file = write(folder, "records.jsonl", text);
    let output = run(folder, &["records", "verify", file.to_str().unwrap()]);
    assert!(output.stdout.is_empty());
    (output.status.code(), stderr(&output))
}

/// The shipped record with other values of some fields, given as JSON pointers.
fn changed(changes: &[(&str, Value)]) -> String {
    let mut record: Value = serde_json::from_str(&shipped_record().to_line().unwrap()).unwrap();
    for (pointer, value) in changes {
        let (parent, name) = pointer.rsplit_once('/').unwrap();
        record.pointer_mut(parent).unwrap()[name] = value.clone();
    }
    record.to_string()
}

#[test]
fn each_fault_is_one_line_with_the_number_of_its_record() {
    let folder = tempfile::tempdir().unwrap();
    let good = shipped_record().to_line().unwrap();
    assert_eq!(verified(folder.path(), &format!("{good}\n")), (Some(0), "1 records are valid, 0 are not\n".to_owned()));
    let times = |us: f64| [("/median_us", json!(us)), ("/default_us", json!(us)), ("/runner_up", json!(null))].to_vec();
    for (changes, complaint) in [
        // Private data.
        (vec![("/host", json!("node7"))], "\"host\" is no field of a record"),
        (vec![("/problem/path", json!("/home/me"))], "\"problem/path\" is no field of a record"),
        (vec![("/runner_up/user", json!("me"))], "\"runner_up/user\" is no field of a record"),
        (vec![("/device", json!("NVIDIA H200 /home/me"))], "no model's name has '/'"),
        (
            vec![("/device", json!("NVIDIA H200 node7.example.com"))],
            "\"node7.example.com\" looks like the name of a host",
        ),
        (vec![("/device", json!("NVIDIA H200 me@node7"))], "\"me@node7\" looks like the name of a host"),
        (vec![("/device", json!("GPU-5a2f3c1e-77d0-4a8b-9c1e-000000000000"))], "looks like the name of a host"),
        (vec![("/device", json!("H200 10.1.2.3"))], "\"10.1.2.3\" looks like the name of a host"),
        (vec![("/library_version", json!("0.1.0 of me"))], "library_version is \"0.1.0 of me\""),
        // Figures that no H200 reaches.
        (times(300.0), "TFLOP/s; NVIDIA H200 does at most 1189.5"),
        (vec![("/default_us", json!(0.4))], "default_us is 0.4; a launch on a GPU takes at least 0.5 us"),
        (vec![("/default_us", json!(600.0))], "default_us is 600; the winner is the fastest"),
        (vec![("/spread", json!(0.3))], "spread is 0.3"),
        (vec![("/utilisation", json!(1.2))], "utilisation is 1.2"),
        (vec![("/check_error", json!(0.02))], "check_error is 0.02; in bf16 a kernel passes the check up to 1.6e-2"),
        // Versions that the library does not use.
        (vec![("/driver_version", json!(11040))], "driver_version is 11040"),
        (vec![("/nvrtc_version", json!([14, 0]))], "nvrtc_version is 14.0"),
        (vec![("/sm_count", json!(0))], "sm_count is 0"),
        // Configs that the architecture does not run.
        (vec![("/config/block_m", json!(80)), ("/config/block_n", json!(7))], "block_n is 7"),
        (vec![("/runner_up/config/block_m", json!(7))], "the runner-up: block_m is 7"),
        (vec![("/arch", json!("sm_80"))], "family is sm90; sm_80 is served by"),
        (vec![("/arch", json!("sm_70"))], "the kernels do not run on sm_70"),
        // Schema.
        (vec![("/median_us", json!("fast"))], "invalid type: string \"fast\""),
        (vec![("/problem/features", json!({"secret": 1}))], "unknown field `secret`"),
    ] {
        let (code, message) = verified(folder.path(), &format!("{good}\n\n{}\n", changed(&changes)));
        assert_eq!(code, Some(1), "{changes:?}: {message}");
        let is_it = |line: &str| line.contains("records.jsonl:3: ") && line.contains(complaint);
        assert!(message.lines().any(is_it), "{changes:?}: {message}");
        assert!(message.contains("1 records are valid, 1 are not"), "{message}");
    }
}

#[test]
fn a_record_is_given_once() {
    let folder = tempfile::tempdir().unwrap();
    let good = shipped_record().to_line().unwrap();
    let (code, message) = verified(folder.path(), &format!("{good}\n{good}\n"));
    assert_eq!(code, Some(1));
    assert!(message.contains("records.jsonl:2: line 1 is a record of the same device and problem"), "{message}");
}

#[test]
fn names_of_gpus_and_processors_are_no_private_data() {
    let folder = tempfile::tempdir().unwrap();
    for name in [
        "NVIDIA A100-SXM4-80GB MIG 3g.40gb",
        "NVIDIA RTX PRO 6000 Blackwell Workstation Edition",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "Orin (nvgpu)",
        "Intel(R) Xeon(R) Platinum 8481C CPU @ 2.70GHz",
        "AMD Ryzen 7 5800H with Radeon Graphics",
        "QEMU Virtual CPU version 2.5+",
        "x86_64",
    ] {
        let (code, message) = verified(folder.path(), &changed(&[("/device", json!(name))]));
        assert_eq!(code, Some(0), "{name}: {message}");
    }
}

#[test]
fn each_shipped_file_says_where_it_comes_from() {
    let table = std::fs::read_to_string(crate::source_tree::root().join("tuning-db/README.md")).unwrap();
    assert!(!shipped::EMBEDDED.is_empty());
    for (path, text) in shipped::EMBEDDED {
        let (records, _) = flashtune::plan::record::read_lines(text);
        let all = |of: &dyn Fn(&Record) -> String| {
            let mut values: Vec<String> = records.iter().map(of).collect();
            values.sort();
            values.dedup();
            values.join(", ")
        };
        let gpu = all(&|r| format!("{}, {} SMs", r.device, r.sm_count));
        let driver = all(&|r| format!("{}.{}", r.driver_version / 1000, r.driver_version % 1000 / 10));
        let nvrtc = all(&|r| format!("{}.{}", r.nvrtc_version.0, r.nvrtc_version.1));
        let row = format!("| `{path}` | {gpu} | {driver} | {nvrtc} | {} | ", all(&|r| r.library_version.clone()));
        let written = table.lines().find_map(|line| line.strip_prefix(&row));
        let by = written.unwrap_or_else(|| panic!("tuning-db/README.md has no row that begins with {row:?}"));
        assert!(by.trim_end_matches(" |").len() > 3, "{by:?} does not say who measured {path}");
    }
}
