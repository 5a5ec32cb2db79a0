//! `pack` compiles kernels into a file without a GPU, and `pack --list` and `info` say what a file
//! holds.

use crate::{flashtune, json_lines, run, stderr, stdout, write};
use flashtune::device::Arch;
use flashtune::kernel::cubin_cache::TextDigest;
use flashtune::kernel::pack::Pack;
use flashtune::kernel::render_pass;
use flashtune::plan::key;
use std::path::{Path, PathBuf};

const PROBLEM: &str =
    r#"{"pass":"forward","num_heads_q":16,"seqlen_q":1024,"head_dim":64,"causal":"bottom-right","batch_size":4}"#;

/// Packs a problem. None without NVRTC.
fn packed(folder: &Path, problem: &str, more: &[&str]) -> Option<PathBuf> {
    let problems = write(folder, "problems.jsonl", &format!("{problem}\n"));
    let pack = folder.join("a.pack");
    let (problems, output) = (problems.to_str().unwrap(), pack.to_str().unwrap());
    let args = ["pack", "--arch", "sm_90a,sm_90", "--problems", problems, "--output", output];
    let made = run(folder, &[&args, more].concat());
    let required = std::env::var("FLASHTUNE_REQUIRE_NVRTC").is_ok_and(|value| value == "1");
    if stderr(&made).contains("libnvrtc") && !required {
        assert_eq!((made.status.code(), pack.exists()), (Some(1), false));
        eprintln!("SKIPPED: no NVRTC: {}", stderr(&made));
        return None;
    }
    assert!(stdout(&made).is_empty());
    assert!(stderr(&made).contains("0 problems are left out"), "{}", stderr(&made));
    Some(pack)
}

#[test]
fn a_pack_has_the_cubins_of_its_problems_and_is_listed() {
    let folder = tempfile::tempdir().unwrap();
    // A record that ships for another problem goes in as one of a tuned GPU would.
    let record = crate::h200_records().swap_remove(0).to_line().unwrap();
    let records = write(folder.path(), "records.jsonl", &format!("{record}\n"));
    let Some(pack) = packed(folder.path(), PROBLEM, &["--records", records.to_str().unwrap()]) else { return };
    let opened = Pack::open(&pack).unwrap();
    opened.check_library().unwrap();
    assert_eq!(opened.manifest().archs(), [Arch::Sm(9, 0)]);
    assert!(opened.manifest().records.contains(&record));
    let [plan] = &opened.manifest().plans[..] else { panic!("{:?}", opened.manifest().plans) };
    assert_eq!((plan.problem.head_dim, plan.sm_count), (64, 132));
    for (spec, text) in render_pass(&plan.problem, &plan.config, Arch::Sm(9, 0)).unwrap() {
        let compiled = opened.cubin(&TextDigest::new(&text), &["sm_90a".to_owned()]).expect(spec.entry);
        assert_eq!(&compiled.cubin[..4], b"\x7fELF");
        assert!(compiled.resources[spec.entry].registers > 0);
    }
    let path = pack.to_str().unwrap();
    let listed = stdout(&run(folder.path(), &["pack", "--list", path]));
    let expected = [
        "this library uses it",
        &key::record_key(&plan.problem),
        &plan.config.to_string(),
        "kv_append by 16 bytes",
        "merge bf16 from fp32 vec4",
    ];
    for part in expected {
        assert!(listed.contains(part), "{part} is not in {listed}");
    }
    let json = &json_lines(&run(folder.path(), &["pack", "--list", path, "--json"]))[0];
    assert_eq!((json["library_version"].as_str(), &json["refused"]), (Some(env!("CARGO_PKG_VERSION")), &().into()));
    assert_eq!(json["bytes"], std::fs::metadata(&pack).unwrap().len());
    assert_eq!(json["plans"][0]["arch"], "sm_90");
    assert_eq!(json["kernels"].as_array().unwrap().len(), opened.manifest().kernels.len());

    let info = |pack: &Path| {
        let output = flashtune(folder.path()).args(["info", "--json"]).env("FLASHTUNE_PACK", pack).output().unwrap();
        json_lines(&output)[0]["pack"].clone()
    };
    assert_eq!((&info(&pack)["named_by"], &info(&pack)["plans"]), (&"FLASHTUNE_PACK".into(), &1.into()));
    let damaged = write(folder.path(), "b.pack", "nothing that a pack begins with");
    let refused = info(&damaged)["refused"].as_str().unwrap().to_owned();
    assert!(refused.contains("does not begin as a pack does"), "{refused}");
    let output = run(folder.path(), &["pack", "--list", damaged.to_str().unwrap()]);
    assert_eq!(output.status.code(), Some(1));
    assert!(stderr(&output).contains("b.pack: it does not begin as a pack does"), "{}", stderr(&output));
}

/// A decode kernel, and what combines its splits, are compiled for another target than the sm90
/// kernel that lends them rows.
#[test]
fn every_kernel_of_a_mixed_batch_is_packed_for_the_target_that_loads_it() {
    let folder = tempfile::tempdir().unwrap();
    let mixed = r#"{"pass":"forward","num_heads_q":8,"num_heads_kv":2,"seqlen_q":512,"seqlen_k":4096,"head_dim":64,"causal":"bottom-right","batch_size":8,"varlen":true,"page_size":64}"#;
    let Some(pack) = packed(folder.path(), mixed, &[]) else { return };
    let opened = Pack::open(&pack).unwrap();
    let [plan] = &opened.manifest().plans[..] else { panic!("{:?}", opened.manifest().plans) };
    let kernels = render_pass(&plan.problem, &plan.config, Arch::Sm(9, 0)).unwrap();
    let targets: Vec<&str> = kernels.iter().map(|(spec, _)| spec.family(&plan.config).target_suffix()).collect();
    assert_eq!(targets, ["", "a", ""]);
    for ((spec, text), suffix) in kernels.iter().zip(targets) {
        assert!(opened.cubin(&TextDigest::new(text), &[format!("sm_90{suffix}")]).is_some(), "{}", spec.entry);
    }
}

#[test]
fn wrong_usage_of_pack_names_the_argument() {
    let folder = tempfile::tempdir().unwrap();
    let problems = write(folder.path(), "problems.jsonl", PROBLEM);
    let problems = problems.to_str().unwrap();
    for (args, message) in [
        (&["pack"][..], "--arch"),
        (&["pack", "--arch", "sm_90"], "--output"),
        (&["pack", "--arch", "sm_90", "--output", "a.pack"], "give --preset or --problems"),
        (&["pack", "--arch", "sm_75", "--problems", problems, "--output", "a.pack"], "sm_75"),
        (&["pack", "--arch", "ampere", "--problems", problems, "--output", "a.pack"], "ampere"),
        (&["pack", "--arch", "sm_90", "--preset", "gpt7", "--output", "a.pack"], "gpt7"),
        (&["pack", "--arch", "sm_90", "--sm-count", "0", "--problems", problems, "--output", "a.pack"], "sm-count"),
        (&["pack", "--list", "a.pack", "--output", "a.pack"], "--output"),
    ] {
        let output = run(folder.path(), args);
        assert_eq!(output.status.code(), Some(2), "{args:?}: {}", stderr(&output));
        assert!(stderr(&output).contains(message), "{args:?}: {}", stderr(&output));
    }
    let output = run(folder.path(), &["pack", "--list", "/nowhere/a.pack"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(stderr(&output).contains("/nowhere/a.pack: No such file"), "{}", stderr(&output));
}
