//! `autotune`, `bench` and `records`: the records that they write, read and verify.

use crate::{SMALL, flashtune, json_lines, run, stderr, write};
use flashtune::backend::Backend;
use flashtune::cpu::Cpu;
use flashtune::plan::record::read_lines;
use flashtune::plan::{Engine, EngineOptions, Source};
use flashtune::problem::{Dtype, Layout, Pass, Problem};
use std::io::{BufRead, BufReader, Read};
use std::process::{Command, Stdio};

/// The problem of `SMALL` as a call describes it.
const SMALL_PROBLEM: Problem =
    Problem { layout: Layout::Vec4, ..Problem::dense(Pass::Forward, Dtype::Fp32, 1, 2, 48, 32) };

#[test]
fn autotune_writes_records_that_the_other_commands_read() {
    let folder = tempfile::tempdir().unwrap();
    let cache = folder.path().join("cache");
    let problems = write(folder.path(), "problems.jsonl", SMALL);
    let output = folder.path().join("out.jsonl");
    let args = [
        "autotune",
        "--device",
        "cpu",
        "--json",
        "--problems",
        problems.to_str().unwrap(),
        "--output",
        output.to_str().unwrap(),
    ];
    let first = run(&cache, &args);
    let records = json_lines(&first);
    let passes: Vec<&str> = records.iter().map(|record| record["problem"]["pass"].as_str().unwrap()).collect();
    assert_eq!(passes, ["forward", "backward"]);
    // The output is no terminal, so progress is plain lines.
    let message = stderr(&first);
    assert!(
        message.contains("[1/2] v1 forward fp32") && message.contains("2 of 2 problems have a record"),
        "{message}"
    );
    assert!(!message.contains('\u{1b}'), "{message}");
    let written = std::fs::read_to_string(&output).unwrap();
    assert_eq!(written.lines().count(), 2);
    // A second run measures nothing and changes nothing.
    let again = run(&cache, &args);
    assert_eq!(json_lines(&again), records);
    assert_eq!(std::fs::read_to_string(&output).unwrap(), written);
    // A file that already has records from elsewhere is extended.
    let elsewhere = written.lines().next().unwrap().replace(r#""device":""#, r#""device":"Another "#);
    std::fs::write(&output, format!("{elsewhere}\n")).unwrap();
    assert!(run(&cache, &args).status.success());
    assert_eq!(std::fs::read_to_string(&output).unwrap().lines().count(), 3);

    let listed = json_lines(&run(&cache, &["records", "list", "--device", "cpu", "--json"]));
    assert_eq!(listed.len(), 2);
    assert!(listed.iter().all(|record| record["source"] == "machine" && record["median_us"].as_f64().unwrap() > 0.0));
    let exported = folder.path().join("exported.jsonl");
    assert!(run(&cache, &["records", "export", "--device", "cpu", exported.to_str().unwrap()]).status.success());
    assert_eq!(std::fs::read_to_string(&exported).unwrap(), written);
    let other = folder.path().join("other");
    let imported = run(&other, &["records", "import", exported.to_str().unwrap()]);
    assert!(stderr(&imported).contains("2 records imported"), "{}", stderr(&imported));
    assert_eq!(json_lines(&run(&other, &["records", "list", "--device", "cpu", "--json"])), listed);
    let bench = ["bench", "file", problems.to_str().unwrap(), "--device", "cpu", "--json", "--runs", "3"];
    for timing in json_lines(&run(&other, &bench)) {
        assert_eq!(timing["source"], "machine");
        assert!(timing["median_us"].as_f64().unwrap() > 0.0 && timing["tflops"].as_f64().unwrap() > 0.0);
    }
}

#[test]
fn problem_line_may_have_features() {
    let folder = tempfile::tempdir().unwrap();
    let features = r#","window_left":24,"window_right":4,"softcap":true,"alibi":true,"bias":true,"dbias":true,"mask":true,"sinks":true,"dlse":true,"varlen":true}"#;
    let problems = write(folder.path(), "problems.jsonl", &SMALL.replace('}', features));
    let output =
        run(folder.path(), &["bench", "file", problems.to_str().unwrap(), "--device", "cpu", "--json", "--runs", "1"]);
    let keys: Vec<String> =
        json_lines(&output).iter().map(|timing| timing["key"].as_str().unwrap().to_owned()).collect();
    let [forward, backward] = &keys[..] else { panic!("{keys:?}") };
    assert!(
        forward.contains(" window softcap alibi bias mask sinks varlen ") && forward.ends_with(" l24 r4"),
        "{forward}"
    );
    assert!(backward.contains(" window softcap alibi bias dbias mask sinks dlse varlen "), "{backward}");
}

#[test]
fn records_tuned_with_a_dtype_option_serve_calls_of_that_dtype() {
    let folder = tempfile::tempdir().unwrap();
    let own = SMALL.replace(r#","dtype":"fp32""#, "");
    let wide = own.replace('}', r#","layout":"vec8"}"#);
    let narrow = own.replace('}', r#","layout":"vec2"}"#);
    let in_fp32 = wide.replace('}', r#","dtype":"fp32"}"#);
    let (fp32, bf16) = (Dtype::Fp32, Dtype::Bf16);
    for (index, (line, option, dtype, layout)) in [
        (own.as_str(), "--dtype=fp32", fp32, Layout::Vec4),
        (SMALL, "--dtype=bf16", bf16, Layout::Vec8),
        (wide.as_str(), "--dtype=fp32", fp32, Layout::Vec4),
        (in_fp32.as_str(), "--retune", fp32, Layout::Vec4),
        (narrow.as_str(), "--dtype=fp32", fp32, Layout::Vec2),
    ]
    .into_iter()
    .enumerate()
    {
        let cache = folder.path().join(format!("cache{index}"));
        let problems = write(folder.path(), "problems.jsonl", line);
        let args = ["autotune", "--device", "cpu", option, "--problems", problems.to_str().unwrap()];
        assert!(run(&cache, &args).status.success(), "{line} {option}");
        let options = EngineOptions { cache_dir: Some(cache), ..EngineOptions::default() };
        let engine = Engine::new(Backend::Cpu(Cpu::new(0).unwrap()), options);
        for pass in [Pass::Forward, Pass::Backward] {
            let problem = Problem { pass, dtype, layout, ..SMALL_PROBLEM };
            assert_eq!(engine.prepare(&problem).unwrap().source, Source::Machine, "{line} {option}: {problem:?}");
        }
    }
}

#[test]
fn tuning_database_of_the_user_is_used() {
    let folder = tempfile::tempdir().unwrap();
    let (cache, database) = (folder.path().join("cache"), folder.path().join("db"));
    let problems = write(folder.path(), "problems.jsonl", SMALL);
    std::fs::create_dir_all(database.join("cpu")).unwrap();
    let output = database.join("cpu/this.jsonl");
    let args =
        ["autotune", "--device", "cpu", "--problems", problems.to_str().unwrap(), "--output", output.to_str().unwrap()];
    assert!(run(&cache, &args).status.success());
    let fresh = folder.path().join("fresh");
    let bench = ["bench", "file", problems.to_str().unwrap(), "--device", "cpu", "--json", "--runs", "1"];
    let with = flashtune(&fresh).args(bench).env("FLASHTUNE_TUNING_DB", &database).output().unwrap();
    assert!(json_lines(&with).iter().all(|timing| timing["source"] == "shipped"));
    assert!(json_lines(&run(&fresh, &bench)).iter().all(|timing| timing["source"] == "heuristic"));
}

#[test]
fn verify_finds_records_that_no_longer_fit() {
    let folder = tempfile::tempdir().unwrap();
    // CI relies on this: all shipped records must fit.
    let shipped = run(folder.path(), &["records", "verify"]);
    assert!(shipped.status.success(), "{}", stderr(&shipped));
    let problems = write(folder.path(), "problems.jsonl", SMALL);
    let output = folder.path().join("out.jsonl");
    let path = output.to_str().unwrap();
    assert!(
        run(
            folder.path(),
            &["autotune", "--device", "cpu", "--problems", problems.to_str().unwrap(), "--output", path]
        )
        .status
        .success()
    );
    assert!(run(folder.path(), &["records", "verify", path]).status.success());
    let good = std::fs::read_to_string(&output).unwrap();
    for (bad, message) in [
        (good.replacen(r#""block_m":"#, r#""block_m":7"#, 1), "block_m is 7"),
        (good.replacen(r#""block_n""#, r#""block_x""#, 1), "block_x"),
        (good.replacen("sq48", "sq64", 1), "its key is"),
        (good.replacen('}', "", 1), "line 1"),
    ] {
        std::fs::write(&output, bad).unwrap();
        let verified = run(folder.path(), &["records", "verify", path]);
        assert_eq!(verified.status.code(), Some(1));
        assert!(stderr(&verified).contains(message) || message == "line 1", "{message}: {}", stderr(&verified));
    }
}

#[test]
fn ctrl_c_keeps_finished_records() {
    let folder = tempfile::tempdir().unwrap();
    let cache = folder.path().join("cache");
    let lines: String = (1..60).map(|i| SMALL.replace("48", &(i * 64).to_string()) + "\n").collect();
    let problems = write(folder.path(), "problems.jsonl", &lines);
    let output = folder.path().join("out.jsonl");
    let mut command = flashtune(&cache);
    command.args([
        "autotune",
        "--device",
        "cpu",
        "--problems",
        problems.to_str().unwrap(),
        "--output",
        output.to_str().unwrap(),
    ]);
    let mut child = command.stderr(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(child.stderr.take().unwrap());
    let mut message = String::new();
    while !message.contains("[2/") {
        assert!(lines.read_line(&mut message).unwrap() > 0, "{message}");
    }
    assert!(Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap().success());
    lines.read_to_string(&mut message).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(1), "{message}");
    assert!(message.contains("stopped by a signal"), "{message}");
    let (records, ignored) = read_lines(&std::fs::read_to_string(&output).unwrap());
    assert!(records.len() >= 2 && ignored.is_empty(), "{message}");
    assert_eq!(json_lines(&run(&cache, &["records", "list", "--device", "cpu", "--json"])).len(), records.len());
}
