//! `pack` compiles kernels into a file without a GPU, and `pack --list` and `info` say what a file
//! holds.

use crate::{fake_cuda, flashtune, json_lines, run, stderr, stdout, write};
use flashtune::device::{Arch, Device};
use flashtune::kernel::cubin_cache::TextDigest;
use flashtune::kernel::pack::Pack;
use flashtune::kernel::render_pass;
use flashtune::plan::{Known, choices, key, shipped};
use flashtune::problem::Problem;
use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

const PROBLEM: &str =
    r#"{"pass":"forward","num_heads_q":16,"seqlen_q":1024,"head_dim":64,"causal":"bottom-right","batch_size":4}"#;

/// Where `pack` keeps cubins: in the folder that the tests of a run share, if there is one.
fn cache(folder: &Path) -> PathBuf {
    let shared = std::env::var_os("FLASHTUNE_TEST_CUBINS").filter(|shared| !shared.is_empty());
    shared.map_or_else(|| folder.to_owned(), PathBuf::from)
}

/// The command that packs a problem into a file of a folder.
fn pack_command(folder: &Path, problem: &str, more: &[&str]) -> (Command, PathBuf) {
    let problems = write(folder, "problems.jsonl", &format!("{problem}\n"));
    let pack = folder.join("a.pack");
    let mut command = flashtune(&cache(folder));
    command.args(["pack", "--arch", "sm_90a,sm_90"]).args(more).arg("--problems").arg(problems);
    command.arg("--output").arg(&pack);
    (command, pack)
}

/// Packs a problem. None without NVRTC.
fn packed(folder: &Path, problem: &str, more: &[&str]) -> Option<PathBuf> {
    let (mut command, pack) = pack_command(folder, problem, more);
    let made = command.output().unwrap();
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
    let [plan, ..] = &opened.manifest().plans[..] else { panic!("no plan") };
    assert!(opened.manifest().plans.iter().all(|other| other.problem == plan.problem));
    assert_eq!(plan.problem.head_dim, 64);
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
    let plans = opened.manifest().plans.len();
    assert_eq!((&info(&pack)["named_by"], &info(&pack)["plans"]), (&"FLASHTUNE_PACK".into(), &plans.into()));
    let damaged = write(folder.path(), "b.pack", "nothing that a pack begins with");
    let refused = info(&damaged)["refused"].as_str().unwrap().to_owned();
    assert!(refused.contains("does not begin as a pack does"), "{refused}");
    let output = run(folder.path(), &["pack", "--list", damaged.to_str().unwrap()]);
    assert_eq!(output.status.code(), Some(1));
    assert!(stderr(&output).contains("b.pack: it does not begin as a pack does"), "{}", stderr(&output));
}

/// With an NVRTC that compiles nothing, a pack has the same bytes.
#[test]
fn a_pack_takes_kernels_that_were_compiled_before_from_the_cache() {
    let folder = tempfile::tempdir().unwrap();
    let Some(pack) = packed(folder.path(), PROBLEM, &[]) else { return };
    let made = std::fs::read(&pack).unwrap();
    let (major, minor) = Pack::open(&pack).unwrap().manifest().origin.nvrtc_version;
    std::fs::remove_file(&pack).unwrap();
    let again = |folder: &Path| {
        let (mut command, pack) = pack_command(folder, PROBLEM, &[]);
        command.env("FLASHTUNE_NVRTC", fake_cuda::nvrtc(folder)).env("FAKE_NVRTC_ARCH", "90");
        command.env("FAKE_NVRTC_VERSION", format!("{}", major * 1000 + minor * 10));
        (command, pack)
    };
    let (mut command, pack) = again(folder.path());
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    assert!(std::fs::read(&pack).unwrap() == made);
    let other = tempfile::tempdir().unwrap();
    let (mut command, pack) = again(other.path());
    let output = command.env("FLASHTUNE_CACHE_DIR", other.path()).output().unwrap();
    assert!(!output.status.success() && !pack.exists(), "{}", stderr(&output));
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

/// The GPUs that have shipped records, as their contexts know them: names and numbers of SMs are
/// those of the records, and the driver tells the rate of the memory.
fn gpus_with_records() -> Vec<Device> {
    let driver_tells = |name: &str| match name {
        "NVIDIA H200" => 4_916_736_000_000,
        "NVIDIA H100 80GB HBM3" => 3_352_320_000_000,
        other => panic!("what does the driver tell of the memory of {other}?"),
    };
    let mut gpus: Vec<Device> = Vec::new();
    for record in shipped::records(Arch::Sm(9, 0)) {
        if gpus.iter().all(|gpu| (&gpu.name, gpu.sm_count) != (&record.device, record.sm_count)) {
            let memory_bytes_per_second = driver_tells(&record.device);
            let (name, sm_count) = (record.device, record.sm_count);
            let typical = Device::typical(Arch::Sm(9, 0)).unwrap();
            gpus.push(Device { name, sm_count, memory_bytes_per_second, ..typical });
        }
    }
    gpus
}

#[test]
fn a_pack_has_the_kernels_that_every_gpu_with_shipped_records_chooses() {
    let folder = tempfile::tempdir().unwrap();
    let problem = |batch: i64, seqlen: i64, causal: &str| {
        format!(
            r#"{{"pass":"forward","num_heads_q":16,"seqlen_q":{seqlen},"head_dim":64,"causal":"{causal}","batch_size":{batch}}}"#
        )
    };
    // On each of these the two GPUs choose kernels of their own.
    let problems = [problem(16, 512, "none"), problem(2, 8192, "bottom-right")].join("\n");
    let Some(pack) = packed(folder.path(), &problems, &["--sm-count", "78"]) else { return };
    let opened = Pack::open(&pack).unwrap();
    let manifest = opened.manifest();
    let known =
        Known { shipped: shipped::records(Arch::Sm(9, 0)).into_iter().map(Arc::new).collect(), ..Known::default() };
    let mut problems: Vec<Problem> = manifest.plans.iter().map(|plan| plan.problem).collect();
    problems.dedup();
    let mut configs = HashSet::new();
    let gpus = gpus_with_records();
    assert!(gpus.len() > 1);
    for (gpu, problem) in gpus.iter().flat_map(|gpu| problems.iter().map(move |problem| (gpu, problem))) {
        let config = choices(&known, problem, gpu).swap_remove(0).config;
        for (spec, text) in render_pass(problem, &config, gpu.arch).unwrap() {
            assert!(
                opened.has(&TextDigest::new(&text), &["sm_90a".to_owned()]),
                "{} of {config} on {}",
                spec.entry,
                gpu.name
            );
        }
        let is_told = manifest.plans.iter().any(|plan| {
            let on = plan.gpus.iter().map(|index| &manifest.gpus[*index as usize]);
            plan.config == config && plan.problem == *problem && on.clone().any(|other| other.name == gpu.name)
        });
        assert!(is_told, "{config} on {}", gpu.name);
        configs.insert((key::record_key(problem), config));
    }
    assert_eq!(configs.len(), 4, "the GPUs choose alike, so this test shows nothing: {configs:?}");
    let listed = stdout(&run(folder.path(), &["pack", "--list", pack.to_str().unwrap()]));
    assert!(
        listed.contains("configs are for NVIDIA H200 (132 SMs), NVIDIA H100 80GB HBM3 (132 SMs), NVIDIA H200 (78 SMs)"),
        "{listed}"
    );
    // A GPU of fewer SMs may share the choice of one of them.
    assert!(listed.contains(" on NVIDIA H200 (132 SMs): sm90 "), "{listed}");
    assert!(listed.contains(" on NVIDIA H100 80GB HBM3 (132 SMs)"), "{listed}");
}

#[test]
fn a_pack_that_is_there_stays_where_no_problem_has_a_place() {
    let folder = tempfile::tempdir().unwrap();
    let problems = write(folder.path(), "problems.jsonl", "");
    let pack = write(folder.path(), "a.pack", "the pack before");
    let (problems, path) = (problems.to_str().unwrap(), pack.to_str().unwrap());
    let output = run(folder.path(), &["pack", "--arch", "sm_90", "--problems", problems, "--output", path]);
    assert_eq!(output.status.code(), Some(1), "{}", stderr(&output));
    assert_eq!(std::fs::read_to_string(&pack).unwrap(), "the pack before");
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
