//! `autotune --log`, `--report` and `report`: what the page tells, and what no file can make of it.

use crate::{SMALL, json_lines, run, stderr, write};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

/// A shipped record with a utilisation and a winner that is not the default.
fn record() -> Value {
    let records = crate::h200_records();
    let gains = |record: &&flashtune::plan::Record| record.default_us > Some(1.1 * record.median_us);
    let found = records.iter().filter(|record| record.utilisation.is_some()).find(gains);
    serde_json::to_value(found.unwrap()).unwrap()
}

/// A log's entry for a record, with the winner, another default, a slow candidate of an earlier run
/// and two failures.
pub fn entry(record: &Value) -> Value {
    let us = record["median_us"].as_f64().unwrap();
    let other = |more: u64| {
        let mut config = record["config"].clone();
        config["block_n"] = json!(record["config"]["block_n"].as_u64().unwrap_or(0) + more);
        config
    };
    let measured = |config: &Value, ratio: f64| {
        let figures = json!({"median_us": us * ratio, "utilisation": 0.5 / ratio, "over_default": ratio / 1.25});
        json!({"config": config, "verdict": {"measured": figures}})
    };
    let mut slow = measured(&other(16), 2.0);
    slow["earlier_run"] = json!(true);
    slow["verdict"]["measured"]["was_brief"] = json!(true);
    json!({
        "flashtune_log": 1,
        "key": record["key"], "device": record["device"], "arch": record["arch"], "sm_count": record["sm_count"],
        "problem": record["problem"], "record": record,
        "run": {
            "ended_at": 1_764_000_000, "seconds": 4.2, "default": other(32),
            "candidates": [
                slow,
                measured(&record["config"], 1.0),
                measured(&other(32), 1.25),
                {"config": other(48), "verdict": {"failed": {"reason": "does not compile:\nline <7>"}}},
                {"config": other(8), "verdict": {"failedhere": {"reason": "crashed & burned"}}},
            ],
        },
    })
}

/// The page of these files, and what was said on standard error.
fn page(folder: &Path, args: &[&str]) -> (String, String) {
    let html = folder.join("report.html");
    let output = run(folder, &[&["report", "--output", html.to_str().unwrap()], args].concat());
    assert!(output.status.success() && output.stdout.is_empty(), "{output:?}");
    (std::fs::read_to_string(html).unwrap(), stderr(&output))
}

pub fn page_of_log(folder: &Path, lines: &[Value]) -> PathBuf {
    let text: String = lines.iter().map(|line| format!("{line}\n")).collect();
    let log = write(folder, "log.jsonl", &text);
    page(folder, &["--log", log.to_str().unwrap()]);
    folder.join("report.html")
}

fn told(folder: &Path, lines: &[Value]) -> String {
    std::fs::read_to_string(page_of_log(folder, lines)).unwrap()
}

#[test]
fn a_tuning_run_leaves_a_log_and_a_page_of_all_its_candidates() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    write(folder.path(), "problems.jsonl", SMALL);
    let (problems, log, html) = (path("problems.jsonl"), path("log.jsonl"), path("run.html"));
    let args = ["autotune", "--device", "cpu", "--json", "--problems", &problems, "--log", &log, "--report", &html];
    let records = json_lines(&run(folder.path(), &args));
    let text = std::fs::read_to_string(&log).unwrap();
    let entries: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(entries.len(), 2);
    let of_run = std::fs::read_to_string(&html).unwrap();
    let (of_log, said) = page(folder.path(), &["--log", &log]);
    assert!(said.contains("2 problems written to "), "{said}");
    for entry in &entries {
        assert!(records.contains(&entry["record"]), "{entry}");
        let candidates = entry["run"]["candidates"].as_array().unwrap();
        assert!(candidates.len() > 5, "{candidates:?}");
        for candidate in candidates {
            let config = &candidate["config"];
            let name = format!("cpu block_m={} block_n={}", config["block_m"], config["block_n"]);
            assert!(of_run.contains(&name) && of_log.contains(&name), "{name}");
        }
        let key = entry["key"].as_str().unwrap();
        assert!(of_run.contains(key) && of_log.contains(key), "{key}");
    }
    for page in [&of_run, &of_log] {
        assert_eq!(page.matches("<section class=\"problem\"").count(), 2);
        assert!(page.contains("forward fp32, head dim 32") && page.contains("The limit of a CPU is not known."));
        assert!(page.contains("plan takes the winner (source "), "{page}");
    }
    // The second run measures nothing. The log keeps the candidates of the first.
    assert!(run(folder.path(), &args).status.success());
    assert_eq!(std::fs::read_to_string(&log).unwrap(), text);
    assert!(std::fs::read_to_string(&html).unwrap().contains("The candidates were not kept"));
    // The same records are this machine's.
    let (of_machine, _) = page(folder.path(), &["--device", "cpu"]);
    assert_eq!(of_machine.matches("<section class=\"problem\"").count(), 2);
    assert!(of_machine.contains("records keep no date"));
}

#[test]
fn the_page_tells_candidates_failures_limit_and_reasons() {
    let folder = tempfile::tempdir().unwrap();
    let record = record();
    let html = told(folder.path(), &[entry(&record)]);
    let share = format!("<dd>{:.1} %</dd>", 100.0 * record["utilisation"].as_f64().unwrap());
    for part in [
        "NVIDIA H200",
        "<dt>Measured</dt><dd>2025-11-24</dd>",
        "5 candidates in 4.2 s on 2025-11-24: 3 were measured, 2 failed; 1 of them by an earlier run",
        ">winner</text>",
        "dropped early: block_n=",
        &format!("default: block_n={}", record["config"]["block_n"].as_u64().unwrap() + 32),
        "dropped early, measured by an earlier run",
        "2 failed candidates",
        "does not compile:\nline &lt;7&gt;",
        "on every shape of its class",
        "crashed &amp; burned",
        "on this shape",
        "limit ",
        "With these records imported, a plan takes the winner (source machine: record of this machine; ",
        &share,
    ] {
        assert!(html.contains(part), "{part:?} is not in {html}");
    }
    // The default takes 1.25 of the winner's time, and the slow candidate twice that.
    assert!(html.contains(">1.250</td>") && html.contains(">2.000</td>"));
    // Nothing is loaded, and nothing runs.
    for part in ["<script", "http:", "https:", "//", "url(", "@import"] {
        assert!(!html.contains(part), "{part}");
    }
    assert!(skeleton(&html).iter().all(|tag| !tag.contains(" on")));
}

#[test]
fn a_problem_without_a_winner_tells_the_plan_that_serves_it() {
    let folder = tempfile::tempdir().unwrap();
    let mut failed = entry(&record());
    failed.as_object_mut().unwrap().remove("record");
    failed["failure"] = json!("no candidate works: ptxas <died>");
    let html = told(folder.path(), &[failed]);
    for part in ["No candidate won: no candidate works: ptxas &lt;died&gt;", "plan takes ", "(source heuristic: "] {
        assert!(html.contains(part), "{part:?} is not in {html}");
    }
}

#[test]
fn records_alone_tell_the_winner_and_that_candidates_were_not_kept() {
    let folder = tempfile::tempdir().unwrap();
    let root = crate::source_tree::root().join("tuning-db/sm_90/nvidia-h200.jsonl");
    let (html, _) = page(folder.path(), &[root.to_str().unwrap()]);
    let count = crate::h200_records().len();
    assert_eq!(html.matches("<section class=\"problem\"").count(), count);
    assert_eq!(html.matches("The candidates were not kept; autotune --log keeps them.").count(), count);
    assert!(
        html.contains("The default stays") && html.contains("The fastest") && html.contains("its config was not kept")
    );
    // With a block mask u is no share: it counts blocks that the mask does not list.
    assert!(html.contains("The rate counts all blocks"));
    let percents = html.split(" %</d").filter_map(|text| text.rsplit('>').next()?.parse::<f64>().ok());
    let most = percents.fold(0.0, f64::max);
    assert!((50.0..105.0).contains(&most), "{most} %");
    // A record that this library refuses says why.
    let mut foreign = record();
    foreign["config"]["block_m"] = json!(7);
    let file = write(folder.path(), "records.jsonl", &foreign.to_string());
    let (html, _) = page(folder.path(), &[file.to_str().unwrap()]);
    assert!(html.contains("This version of the library does not use the record: block_m is 7"), "{html}");
    // A log that has the problem too is shown in place of the record alone.
    let log = write(folder.path(), "log.jsonl", &entry(&record()).to_string());
    let args = [file.to_str().unwrap(), "--log", log.to_str().unwrap()];
    let (html, _) = page(folder.path(), &args);
    assert!(html.contains("5 candidates in 4.2 s") && html.matches("<section class=\"problem\"").count() == 1);
}

/// The tags of a page with the names of their attributes, without text and values.
fn skeleton(html: &str) -> Vec<String> {
    let mut tags = Vec::new();
    for tag in html.split('<').skip(1) {
        let (mut name, mut quoted) = (String::new(), false);
        for c in tag.chars() {
            match c {
                '"' => quoted = !quoted,
                '>' if !quoted => break,
                _ if !quoted => name.push(c),
                _ => {}
            }
        }
        tags.push(name);
    }
    tags
}

/// An entry with these words in each place where a file may have text of its own.
pub fn with_words(word: &str) -> Value {
    let mut record = record();
    record["device"] = json!(word);
    record["library_version"] = json!(word);
    let mut entry = entry(&record);
    for reason in ["/run/candidates/3/verdict/failed/reason", "/run/candidates/4/verdict/failedhere/reason"] {
        *entry.pointer_mut(reason).unwrap() = json!(word);
    }
    entry["run"]["candidates"][0]["config"][word] = json!(7);
    entry["run"]["default"][word] = json!(7);
    entry["run"]["candidates"][2]["config"][word] = json!(7);
    entry
}

pub const HOSTILE: &[&str] = &[
    "<script>alert(1)</script>",
    "\"><img src=http://127.0.0.1:9/ onerror=alert(1)>",
    "' onload='alert(1)",
    "</title></style></svg></table><h1>owned</h1>",
    "<!-- ]]> --> <svg onload=alert(1)>",
    "{{ 7 * 7 }}{% include \"page\" %}",
    "&lt;b&gt;\u{202e}\u{0}\u{7f}",
];

#[test]
fn hostile_names_and_reasons_never_become_markup() {
    let folder = tempfile::tempdir().unwrap();
    let harmless = skeleton(&told(folder.path(), &[with_words("harmless")]));
    assert!(harmless.len() > 100, "{harmless:?}");
    for word in HOSTILE {
        let html = told(folder.path(), &[with_words(word)]);
        assert_eq!(skeleton(&html), harmless, "{word}");
        assert!(!html.contains("<script") && !html.contains("<img") && !html.contains("<h1>owned"), "{word}");
        assert!(!html.contains(">49"), "{word}");
        let escaped = word.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
        let escaped = escaped.replace('"', "&quot;").replace('\'', "&#39;").replace('/', "&#x2F;");
        assert!(html.replace("&#x27;", "&#39;").replace('/', "&#x2F;").contains(&escaped), "{word}: {html}");
    }
}

#[test]
fn odd_figures_of_others_are_refused_or_shown() {
    let folder = tempfile::tempdir().unwrap();
    for sm_count in [0, 1, u32::MAX] {
        let mut record = record();
        record["sm_count"] = json!(sm_count);
        assert!(told(folder.path(), &[entry(&record)]).contains(&format!("<dd>{sm_count}</dd>")));
    }
    let mut late = entry(&record());
    late["run"]["ended_at"] = json!(u64::MAX);
    late["run"]["seconds"] = json!(-1e300);
    assert!(told(folder.path(), &[late]).contains("records keep no date"));
    for (pointer, value, complaint) in [
        ("/flashtune_log", json!(2), "it is of a log of another version of flashtune"),
        ("/run/candidates/1/verdict/measured/median_us", json!(1e300), "a candidate's median_us is 1e300"),
        ("/run/candidates/1/verdict/measured/over_default", json!(0), "over_default is not that of a measurement"),
        ("/record/median_us", json!(1e-320), "median_us is 1e-320"),
        ("/device", json!("Another"), "its record is of another problem or device"),
        ("/problem/head_dim", json!(513), "head_dim is 513"),
        ("/run/candidates/0/verdict", json!("none"), "unknown variant"),
    ] {
        let mut line = entry(&record());
        *line.pointer_mut(pointer).unwrap() = value;
        let log = write(folder.path(), "bad.jsonl", &line.to_string());
        let html = folder.path().join("bad.html");
        let args = ["report", "--log", log.to_str().unwrap(), "--output", html.to_str().unwrap()];
        let output = run(folder.path(), &args);
        let message = stderr(&output);
        assert!(output.status.code() == Some(1) && message.contains(complaint), "{pointer}: {message}");
        assert!(message.contains("bad.jsonl: no line is a valid entry of a tuning log; line 1: "), "{message}");
        assert!(!html.exists());
    }
}

#[test]
fn files_that_are_no_records_leave_the_old_page_as_it_is() {
    let folder = tempfile::tempdir().unwrap();
    let name = |name: &str, text: &str| write(folder.path(), name, text).to_str().unwrap().to_owned();
    let html = name("old.html", "the old page");
    let (empty, junk) = (name("empty.jsonl", "\n"), name("junk.jsonl", "junk\n"));
    let (of_record, of_log) =
        (name("record.jsonl", &record().to_string()), name("log.jsonl", &entry(&record()).to_string()));
    let folder_name = folder.path().to_str().unwrap();
    for (args, code, complaint) in [
        (&["--device", "cpu"][..], 1, "this machine has no records of "),
        (&[&empty], 1, "empty.jsonl: the file is empty"),
        (&["--log", &empty], 1, "empty.jsonl: the file is empty"),
        (&[&junk], 1, "junk.jsonl: no line is a valid record; line 1: "),
        (&["--log", &of_record], 1, "it is a record, not an entry of a tuning log"),
        (&[&of_log], 1, "no line is a valid record"),
        (&["/nowhere"], 1, "/nowhere: "),
        (&["/dev/zero"], 1, "/dev/zero: it is not a regular file"),
        (&[folder_name], 1, "it is not a regular file"),
        (&["--device", "cpu", &of_record], 2, "records of files name their own"),
    ] {
        let output = run(folder.path(), &[&["report", "--output", &html], args].concat());
        let message = stderr(&output);
        assert!(output.status.code() == Some(code) && message.contains(complaint), "{args:?}: {output:?}");
        assert_eq!(std::fs::read_to_string(&html).unwrap(), "the old page", "{args:?}");
    }
    assert_eq!(run(folder.path(), &["report", &of_record]).status.code(), Some(2));
    for place in ["/nowhere/report.html", "/dev/zero", folder_name] {
        let output = run(folder.path(), &["report", &of_record, "--output", place]);
        assert!(output.status.code() == Some(1) && stderr(&output).contains(place), "{place}: {output:?}");
    }
    // A line that cannot be read costs that line, and the page says so.
    let mixed = name("mixed.jsonl", &format!("junk\n{}\n", record()));
    let (html, said) = page(folder.path(), &[&mixed]);
    assert!(said.contains("mixed.jsonl: 1 lines are ignored; line 1: ") && html.contains("1 lines are ignored"));
}

#[test]
fn a_log_or_page_that_cannot_be_kept_shows_before_anything_is_measured() {
    let folder = tempfile::tempdir().unwrap();
    let problems = write(folder.path(), "problems.jsonl", SMALL);
    let notes = write(folder.path(), "notes.txt", "my notes\n");
    for (option, place) in [
        ("--log", notes.to_str().unwrap()),
        ("--log", "/nowhere/log.jsonl"),
        ("--log", "/dev/zero"),
        ("--report", "/nowhere/report.html"),
        ("--report", "/dev/zero"),
        ("--report", folder.path().to_str().unwrap()),
    ] {
        let args = ["autotune", "--device", "cpu", "--problems", problems.to_str().unwrap(), option, place];
        let output = run(folder.path(), &args);
        let message = stderr(&output);
        assert!(output.status.code() == Some(1) && message.contains(place) && !message.contains("[1/"), "{message}");
    }
    assert_eq!(std::fs::read_to_string(&notes).unwrap(), "my notes\n");
}
