//! `render`, `render-merge` and `render-kv-append`: the printed texts and their cubins.

use crate::{json_lines, program, run, stderr, stdout};
use std::process::Command;

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
    for (queries, kernel) in [(1, "flashtune_decode("), (4096, "flashtune_sm90_forward(")] {
        let paged = of(&format!("{FORWARD} --page-size 16 --seqlen-q {queries} --seqlen-k 8192"));
        assert!(paged.contains(kernel) && paged.contains("kPageSize = 16;"), "{queries}: {paged}");
    }
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
    let (cubin, victim) = (folder.path().join("main.cubin"), folder.path().join("victim"));
    std::fs::write(&victim, "precious").unwrap();
    std::os::unix::fs::symlink(&victim, &cubin).unwrap();
    let mut command = Command::new(program::path());
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
    assert_eq!(std::fs::read_to_string(victim).unwrap(), "precious", "a link in the cubin's place is followed");
}
