//! The command line as users see it: exit codes, output for people and for programs, signals,
//! files.

use flashtune::backend::Backend;
use flashtune::config::Config;
use flashtune::cpu::Cpu;
use flashtune::plan::record::read_lines;
use flashtune::plan::{Engine, EngineOptions, Source};
use flashtune::problem::{Causal, Dtype, Feature, Layout, Pass, Problem};
use flashtune::tune::candidates;
use flashtune::tune::worker;
use flashtune::tune::{Bench, Fault, Worker};
use serde_json::Value;
use std::io::{BufRead, BufReader, Read};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::Duration;

fn flashtune(cache: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_flashtune"));
    for name in ["XDG_CACHE_HOME", "HOME", "RUST_LOG", "FLASHTUNE_TUNING_DB", "FLASHTUNE_TEMPLATES"] {
        command.env_remove(name);
    }
    command.env("FLASHTUNE_CACHE_DIR", cache);
    command
}

fn run(cache: &Path, args: &[&str]) -> Output {
    flashtune(cache).args(args).output().unwrap()
}

fn stdout(output: &Output) -> String {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout.clone()).unwrap()
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn json_lines(output: &Output) -> Vec<Value> {
    stdout(output).lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn write(folder: &Path, name: &str, text: &str) -> PathBuf {
    let path = folder.join(name);
    std::fs::write(&path, text).unwrap();
    path
}

const SMALL: &str = r#"{"num_heads_q":2,"seqlen_q":48,"head_dim":32,"dtype":"fp32"}"#;

/// The same problem as a call describes it.
const SMALL_PROBLEM: Problem =
    Problem { layout: Layout::Vec4, ..Problem::dense(Pass::Forward, Dtype::Fp32, 1, 2, 48, 32) };

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
fn every_preset_is_a_list_of_valid_problems() {
    let folder = tempfile::tempdir().unwrap();
    let mut total = 0;
    for name in [
        "gpt2",
        "bert-large",
        "llama-3-8b",
        "llama-3-70b",
        "mistral-7b",
        "vit-l",
        "stable-diffusion",
        "gemma",
        "grid",
        "odd-dims",
        "dropout",
        "decode",
        "decode-paged",
        "speculative",
        "all",
    ] {
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
        total = if name == "all" { total } else { total + count };
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
fn render_prints_one_self_contained_text_per_kernel() {
    let folder = tempfile::tempdir().unwrap();
    for pass in ["forward", "backward"] {
        let args = ["render", "--arch", "sm_90a", "--pass", pass, "--head-dim", "80", "--causal", "--dropout"];
        let text = stdout(&run(folder.path(), &args));
        assert!(text.contains("__global__") && !text.contains("#include") && !text.contains("@{"), "{pass}");
        assert_eq!(text, stdout(&run(folder.path(), &args)), "{pass}");
    }
    let with = |config: &str| {
        let args = ["render", "--arch", "sm_80", "--pass", "forward", "--head-dim", "64", "--config", config];
        stdout(&run(folder.path(), &args))
    };
    assert_ne!(with("num_stages=1"), with("num_stages=2"));
}

#[test]
fn render_prints_decode_paged_merge_and_kv_append_kernels() {
    let folder = tempfile::tempdir().unwrap();
    let of = |args: &str| stdout(&run(folder.path(), &args.split(' ').collect::<Vec<_>>()));
    const FORWARD: &str = "render --arch sm_90 --pass forward --head-dim 64";
    let few = of(&format!("{FORWARD} --seqlen-q 1 --seqlen-k 8192 --num-heads-kv 4"));
    assert!(few.contains("flashtune_decode(") && few.contains("flashtune_combine("), "{few}");
    let paged = of(&format!("{FORWARD} --page-size 16"));
    assert!(paged.contains("flashtune_decode(") && paged.contains("kPageSize = 16;"), "{paged}");
    let narrow = of(&format!("{FORWARD} --layout vec2"));
    assert!(narrow.contains("flashtune_sm80_forward(") && narrow.contains("kVec = 2;"), "{narrow}");
    let merge = of("render-merge --arch sm_90 --dtype fp16 --partials-are-fp32");
    assert!(merge.contains("flashtune_merge(") && merge.contains("partials_are_fp32=true"), "{merge}");
    let append = of("render-kv-append --arch sm_90 --access-bytes 4");
    assert!(append.contains("flashtune_kv_append(") && append.contains("kAccessBytes = 4;"), "{append}");
    let odd = run(folder.path(), &["render-kv-append", "--arch", "sm_90", "--access-bytes", "3"]);
    assert_eq!(odd.status.code(), Some(2), "{}", stderr(&odd));
}

#[test]
fn render_compiles_where_there_is_nvrtc() {
    let folder = tempfile::tempdir().unwrap();
    let cubin = folder.path().join("main.cubin");
    let mut command = Command::new(env!("CARGO_BIN_EXE_flashtune"));
    command
        .args(["render", "--arch", "sm_90", "--pass", "backward", "--head-dim", "64", "--json", "--cubin"])
        .arg(&cubin);
    let output = command.output().unwrap();
    let required = std::env::var("FLASHTUNE_REQUIRE_NVRTC").is_ok_and(|value| value == "1");
    if stderr(&output).contains("libnvrtc") && !required {
        assert_eq!(output.status.code(), Some(1));
        eprintln!("SKIPPED: no NVRTC: {}", stderr(&output));
        return;
    }
    let used = json_lines(&output);
    assert!(used.iter().all(|kernel| kernel["registers"].as_u64().unwrap() > 0), "{used:?}");
    assert!(used.iter().any(|kernel| kernel["cubin"] == cubin.to_str().unwrap()), "{used:?}");
    assert_eq!(&std::fs::read(&cubin).unwrap()[..4], b"\x7fELF");
}

const PROBLEM: Problem = Problem {
    num_heads_kv: 2,
    causal: Causal::BottomRight,
    dropout: true,
    ..Problem::dense(Pass::Backward, Dtype::Bf16, 1, 4, 64, 32)
};

#[test]
fn worker_answers_every_question_of_a_search() {
    let args = ["worker", "--device", "cpu"].map(Into::into).to_vec();
    let (patience, build_patience) = (Duration::from_secs(60), Duration::from_secs(60));
    let command = worker::Command { program: env!("CARGO_BIN_EXE_flashtune").into(), args, patience, build_patience };
    let cpu = flashtune::cpu::Cpu::new(0).unwrap();
    let good: Vec<Config> = candidates::all(&PROBLEM, cpu.device()).into_iter().take(3).collect();
    let configs = [&good[..], &[good[0].clone().with("block_m", 17)]].concat();
    let mut bench = Worker::new(command, &PROBLEM);
    let mut built = vec![None; configs.len()];
    bench.build(&configs, &mut |index, result| {
        built[index] = Some(result.is_ok());
        ControlFlow::Continue(())
    });
    assert_eq!(built, [Some(true), Some(true), Some(true), Some(false)]);
    for config in &good {
        let error = bench.check(config).unwrap();
        assert!(error > 0.0 && error < 0.02, "{error}");
        assert!(bench.sample(config).unwrap().time > Duration::ZERO);
    }
    assert!(matches!(bench.check(&configs[3]), Err(Fault::Candidate(reason)) if reason.contains("block_m is 17")));
}

#[test]
fn worker_ends_with_its_parent() {
    let folder = tempfile::tempdir().unwrap();
    let mut child = flashtune(folder.path()).args(["worker", "--device", "cpu"]).stdin(Stdio::piped()).spawn().unwrap();
    drop(child.stdin.take());
    assert_eq!(child.wait().unwrap().code(), Some(0));
    let mut child = flashtune(folder.path())
        .args(["worker", "--device", "cpu"])
        .stdin(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    // The pipe stays open, because its end would end the worker too.
    let mut questions = child.stdin.take().unwrap();
    std::io::Write::write_all(&mut questions, b"what?\n").unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(1));
}
