//! `autotune`, `bench` and `records`: the records that they write, read and verify.

use crate::{SMALL, flashtune, json_lines, program, run, stderr, stdout, write};
use flashtune::backend::Backend;
use flashtune::cpu::Cpu;
use flashtune::plan::record::read_lines;
use flashtune::plan::{Engine, EngineOptions, Source};
use flashtune::problem::{Dtype, Layout, Pass, Problem};
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
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

#[test]
fn an_output_with_anything_but_records_stays_and_nothing_is_tuned() {
    let folder = tempfile::tempdir().unwrap();
    let problems = write(folder.path(), "problems.jsonl", SMALL);
    for (text, reason) in [("notes\n", "line 1: "), ("\n{\"key\":\"of another version\"}\n", "line 2: ")] {
        let output = write(folder.path(), "out.jsonl", text);
        let (problems, output) = (problems.to_str().unwrap(), output.to_str().unwrap());
        let run = run(folder.path(), &["autotune", "--device", "cpu", "--problems", problems, "--output", output]);
        assert_eq!(run.status.code(), Some(1), "{}", stderr(&run));
        assert!(stderr(&run).contains(&format!("out.jsonl: {reason}")), "{}", stderr(&run));
        assert!(!stderr(&run).contains("[1/"), "{}", stderr(&run));
        assert_eq!(std::fs::read_to_string(output).unwrap(), text);
    }
    let missing = ["autotune", "--device", "cpu", "--preset", "all", "--output", "/nowhere/out.jsonl"];
    let run = run(folder.path(), &missing);
    assert_eq!(stderr(&run), "flashtune: /nowhere/out.jsonl: its folder does not exist\n");
}

#[test]
fn no_output_replaces_an_input_or_another_output() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let (problems, records) = (path("problems.jsonl"), path("records.jsonl"));
    write(folder.path(), "problems.jsonl", SMALL);
    write(folder.path(), "records.jsonl", &(crate::h200_records().swap_remove(0).to_line().unwrap() + "\n"));
    std::os::unix::fs::symlink(&records, path("link")).unwrap();
    let tune = ["autotune", "--device", "cpu", "--problems", &problems];
    let pack = ["pack", "--arch", "sm_90", "--problems", &problems];
    for (command, more) in [
        (&["report"][..], &[&records, "--output", &path("link")][..]),
        (&["report"], &["--log", &records, "--output", &records]),
        (&tune, &["--report", &problems]),
        (&tune, &["--log", &path("new"), "--report", &path("./new")]),
        (&tune, &["--output", &path("new"), "--log", &path("new")]),
        (&pack, &["--output", &problems]),
        (&pack, &["--records", &records, "--output", &records]),
    ] {
        let output = run(folder.path(), &[command, more].concat());
        assert_eq!(output.status.code(), Some(2), "{command:?} {more:?}: {}", stderr(&output));
        assert!(stderr(&output).contains("; give two"), "{command:?} {more:?}: {}", stderr(&output));
    }
    assert_eq!(std::fs::read_to_string(&problems).unwrap(), SMALL);
    assert!(std::fs::read_to_string(&records).unwrap().starts_with("{\"key\""));
    assert!(!Path::new(&path("new")).exists());
}

#[test]
fn a_run_that_nothing_reads_ends_and_its_files_have_what_it_tuned() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    write(folder.path(), "problems.jsonl", SMALL);
    let mut command = flashtune(folder.path());
    command.args(["autotune", "--device", "cpu", "--json", "--problems", &path("problems.jsonl")]);
    command.args(["--output", &path("out.jsonl"), "--log", &path("log.jsonl")]);
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let run = command.stdout(writer).stderr(Stdio::piped()).spawn().unwrap().wait_with_output().unwrap();
    assert_eq!(run.status.code(), Some(1), "{}", stderr(&run));
    assert!(stderr(&run).contains("1 of 2 problems have a record, 0 failed, 1 are left"), "{}", stderr(&run));
    assert!(stderr(&run).contains("standard output: Broken pipe"), "{}", stderr(&run));
    for name in ["out.jsonl", "log.jsonl"] {
        assert_eq!(std::fs::read_to_string(path(name)).unwrap().lines().count(), 1, "{name}");
    }
}

#[test]
fn the_models_error_is_of_all_given_records() {
    let folder = tempfile::tempdir().unwrap();
    let record = crate::h200_records().swap_remove(0).to_line().unwrap();
    let records = write(folder.path(), "records.jsonl", &format!("{record}\n{{}}\n"));
    let output = run(folder.path(), &["records", "model-error", records.to_str().unwrap()]);
    assert_eq!((output.status.code(), output.stdout.len()), (Some(1), 0));
    assert!(stderr(&output).contains("records.jsonl: line 2: missing field"), "{}", stderr(&output));
}

#[test]
fn candidates_are_within_the_ratio_and_the_choice_is_near_their_best() {
    let folder = tempfile::tempdir().unwrap();
    let sizes = r#""batch":1,"heads":2,"heads_kv":2,"seqlen_q":6840,"seqlen_k":6840,"head_dim":64"#;
    let case = format!(r#"{{"kind":"few",{sizes},"causal":true}}"#);
    let backward = case.replace("\"head_dim\":64", "\"head_dim\":128");
    let problems =
        format!(r#"[{{"case":{case},"backward":false,"us":{{}}}},{{"case":{backward},"backward":true,"us":{{}}}}]"#);
    let problems = write(folder.path(), "problems.json", &problems);
    let listed =
        stdout(&run(folder.path(), &["records", "choice-error", "--candidates", "1.2", problems.to_str().unwrap()]));
    let value: serde_json::Value = serde_json::from_str(&listed).unwrap();
    for problem in value.as_array().unwrap() {
        let times: Vec<f64> = problem["us"].as_object().unwrap().values().map(|us| us.as_f64().unwrap()).collect();
        let least = times.iter().copied().fold(f64::INFINITY, f64::min);
        assert!(times.len() > 1 && times.iter().all(|us| *us <= 1.2 * least), "{problem}");
    }
    // Predicted times stand where a bench writes measured ones.
    let times = write(folder.path(), "times.json", &listed);
    let judged = stdout(&run(folder.path(), &["records", "choice-error", times.to_str().unwrap()]));
    let ratios: Vec<f64> = judged.lines().take(2).map(|line| line[..5].parse().unwrap()).collect();
    assert!(ratios.iter().all(|ratio| (1.0..=1.021).contains(ratio)), "{judged}");
}

#[test]
fn candidates_of_a_named_gpu_are_those_of_its_records() {
    let folder = tempfile::tempdir().unwrap();
    let sizes = r#""batch":16,"heads":16,"heads_kv":16,"seqlen_q":1000,"seqlen_k":1000,"head_dim":128"#;
    let problems = format!(r#"[{{"case":{{"kind":"many",{sizes},"causal":true}},"backward":false,"us":{{}}}}]"#);
    let problems = write(folder.path(), "problems.json", &problems);
    let of_gpu = |name: &str| {
        let args = ["records", "choice-error", "--candidates", "1.2", "--gpu", name, problems.to_str().unwrap()];
        run(folder.path(), &args)
    };
    let listed = ["NVIDIA H200", "NVIDIA H100 80GB HBM3"]
        .map(|name| -> serde_json::Value { serde_json::from_str(&stdout(&of_gpu(name))).unwrap() });
    let least = listed.each_ref().map(|listed| {
        let problem = &listed[0];
        assert!(problem["us"].get(problem["chosen"].as_str().unwrap()).is_some(), "{problem}");
        problem["us"].as_object().unwrap().values().map(|us| us.as_f64().unwrap()).fold(f64::INFINITY, f64::min)
    });
    assert!(least[0] != least[1], "their records have other times: {least:?}");
    let unknown = of_gpu("NVIDIA H300");
    assert!(!unknown.status.success() && stderr(&unknown).contains("NVIDIA H300"), "{}", stderr(&unknown));
}

/// A line of a record as this library writes it, tuned in a cache of its own.
fn tuned_line(folder: &Path) -> String {
    let problems = write(folder, "problems.jsonl", r#"{"pass":"forward","num_heads_q":1,"seqlen_q":16,"head_dim":8}"#);
    let args = ["autotune", "--device", "cpu", "--json", "--problems", problems.to_str().unwrap()];
    stdout(&run(&folder.join("tuned"), &args))
}

#[test]
fn import_says_in_one_line_what_it_took_and_fails_if_that_is_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let cache = folder.path().join("cache");
    let line = tuned_line(folder.path());
    let bad = format!("{}\n", line.trim().replace("\"median_us\":", "\"median_us\":1e-320,\"was\":"));
    let mixed = write(folder.path(), "mixed.jsonl", &format!("{bad}{line}{}not a record\n", bad.repeat(215)));
    let import = |file: &Path, more: &[&str]| {
        let output = run(&cache, &[&["records", "import", file.to_str().unwrap()], more].concat());
        assert!(output.stdout.is_empty());
        (output.status.code(), stderr(&output))
    };
    let (status, message) = import(&mixed, &[]);
    assert_eq!((status, message.lines().count()), (Some(0), 1), "{message}");
    assert!(message.contains("1 records imported") && message.contains("217 lines refused"), "{message}");
    assert!(message.contains("line 1: median_us is 1e-320"), "{message}");
    let (status, message) = import(&mixed, &[]);
    assert!(status == Some(3) && message.contains("1 are no better"), "{message}");
    // On the machine that measured it, a record is taken on request alone.
    let exported = write(folder.path(), "exported.jsonl", &line);
    let tuned = folder.path().join("tuned");
    let import = |more: &[&str]| run(&tuned, &[&["records", "import", exported.to_str().unwrap()], more].concat());
    let output = import(&[]);
    assert_eq!(output.status.code(), Some(3));
    assert!(stderr(&output).contains("this machine measured 1 itself (--replace takes them)"), "{output:?}");
    assert_eq!(import(&["--replace"]).status.code(), Some(0));
}

#[test]
fn a_million_lines_are_imported_in_bounded_memory() {
    let folder = tempfile::tempdir().unwrap();
    let line = tuned_line(folder.path());
    let path = folder.path().join("many.jsonl");
    let mut file = std::io::BufWriter::new(std::fs::File::create(&path).unwrap());
    for index in 0..1_000_000 {
        writeln!(file, "{{\"no record\":{index}}}").unwrap();
    }
    write!(file, "{}\n{line}", "x".repeat(1 << 20)).unwrap();
    drop(file);
    // The lines alone are 22 MB.
    let script = r#"ulimit -v 400000; "$0" "$@""#;
    let mut command = Command::new("sh");
    command.args(["-c", script]).arg(program::path()).args(["records", "import"]).arg(&path);
    let output = command.env("FLASHTUNE_CACHE_DIR", folder.path().join("cache")).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    assert!(stderr(&output).contains("1 records imported") && stderr(&output).contains("1000001 lines"), "{output:?}");
}

#[test]
fn files_that_never_end_or_never_begin_are_errors() {
    let folder = tempfile::tempdir().unwrap();
    let (cache, pipe) = (folder.path().join("cache"), folder.path().join("pipe"));
    assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    for file in ["/dev/zero", pipe.to_str().unwrap(), folder.path().to_str().unwrap()] {
        for command in [["records", "import", file], ["records", "verify", file], ["records", "export", file]] {
            let output = run(&cache, &command);
            let message = stderr(&output);
            let is_named = message.contains("is not a regular file") || message.contains("Is a directory");
            assert!(output.status.code() == Some(1) && is_named, "{command:?}: {output:?}");
        }
    }
    let output = folder.path().join("a.pack");
    let output = output.to_str().unwrap();
    for (command, code) in [
        (&["bench", "--device", "cpu", "file", "/dev/zero"][..], 2),
        (&["pack", "--arch", "sm_90", "--preset", "gpt2", "--records", "/dev/zero", "--output", output], 1),
    ] {
        let output = run(&cache, command);
        assert!(stderr(&output).contains("/dev/zero: it has more than 268435456 bytes"), "{command:?}: {output:?}");
        assert_eq!(output.status.code(), Some(code), "{command:?}");
    }
    // A pipe in the place of a file of the cache costs the records, not the run.
    std::fs::create_dir_all(&cache).unwrap();
    let line = write(folder.path(), "line.jsonl", &tuned_line(folder.path()));
    for name in ["records.lock", "records.journal"] {
        assert!(Command::new("mkfifo").arg(cache.join(name)).status().unwrap().success());
        let output = run(&cache, &["records", "import", line.to_str().unwrap()]);
        assert!(output.status.code() == Some(3) && stderr(&output).contains(name), "{output:?}");
        std::fs::remove_file(cache.join(name)).unwrap();
    }
    // So does one in the folder of shipped records.
    let database = folder.path().join("db/cpu");
    std::fs::create_dir_all(&database).unwrap();
    std::fs::rename(&pipe, database.join("pipe.jsonl")).unwrap();
    let mut list = flashtune(&cache);
    list.args(["records", "list", "--device", "cpu"]).env("FLASHTUNE_TUNING_DB", folder.path().join("db"));
    let output = list.output().unwrap();
    assert!(output.status.success() && stderr(&output).contains("pipe.jsonl: it is not a regular file"), "{output:?}");
}

#[test]
fn export_leaves_the_file_behind_a_planted_link() {
    let folder = tempfile::tempdir().unwrap();
    tuned_line(folder.path());
    let victim = write(folder.path(), "victim", "precious");
    let place = folder.path().join("shared");
    std::fs::create_dir(&place).unwrap();
    let target = place.join("records.jsonl");
    // The shell's process number is the program's, which once made the name of the temporary file.
    let script = r#"ln -s "$1" "$2.$$.0.tmp"; ln -s "$1" "$2"; exec "$0" records export --device cpu "$2""#;
    let mut command = Command::new("sh");
    command.args(["-c", script]).arg(program::path()).args([&victim, &target]);
    let output = command.env("FLASHTUNE_CACHE_DIR", folder.path().join("tuned")).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    assert_eq!(std::fs::read_to_string(&victim).unwrap(), "precious");
    let written = target.symlink_metadata().unwrap();
    assert!(written.is_file() && written.permissions().mode() & 0o777 == 0o600);
}
