//! The instructions of a cubin, listed by nvdisasm. Without nvdisasm the tests say so and pass;
//! `FLASHTUNE_REQUIRE_NVDISASM=1` makes that a failure.

use flashtune::cuda::nvrtc::Nvrtc;
use std::path::{Path, PathBuf};
use std::process::Command;

/// nvdisasm next to the NVRTC in use, as in a toolkit and in NVIDIA's Python packages, or on PATH.
pub fn nvdisasm(nvrtc: &Nvrtc) -> Option<PathBuf> {
    let beside = nvrtc.path().parent().map(|folder| folder.join("../bin/nvdisasm"));
    let found = beside
        .into_iter()
        .chain([PathBuf::from("nvdisasm")])
        .find(|program| Command::new(program).arg("--version").output().is_ok_and(|output| output.status.success()));
    if found.is_none() {
        let required = std::env::var("FLASHTUNE_REQUIRE_NVDISASM").is_ok_and(|value| value == "1");
        assert!(!required, "FLASHTUNE_REQUIRE_NVDISASM=1, but no nvdisasm was found near {}", nvrtc.path().display());
        eprintln!("SKIPPED: no nvdisasm near {} or on PATH", nvrtc.path().display());
    }
    found
}

/// Instructions in address order with their modifiers: `HMMA.16816.F32.BF16`.
pub fn instructions(nvdisasm: &Path, cubin: &[u8]) -> Vec<String> {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), cubin).unwrap();
    let output = Command::new(nvdisasm).arg(file.path()).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    // Instruction lines look like `/*2db0*/  @P0 HMMA.16816.F32.BF16 R212, R44, R168, RZ ;`. Data
    // lines have words that begin with a dot.
    String::from_utf8_lossy(&output.stdout)
        .lines()
        .filter_map(|line| line.trim_start().strip_prefix("/*")?.split_once("*/"))
        .filter_map(|(_, code)| code.split_whitespace().find(|word| !word.starts_with('@')))
        .filter(|word| word.starts_with(|first: char| first.is_ascii_uppercase()))
        .map(|word| word.trim_end_matches(';').to_owned())
        .collect()
}

/// Bytes of registers that an sm90 kernel's consumers store to and load from the stack. Their code
/// begins where they raise their register count and ends where the producer lowers its own.
pub fn consumer_spill_bytes(instructions: &[String]) -> u32 {
    let begin = instructions.iter().position(|name| name.starts_with("USETMAXREG.TRY_ALLOC")).expect("setmaxnreg.inc");
    let consumers = instructions[begin..].iter().take_while(|name| !name.starts_with("USETMAXREG.DEALLOC"));
    let bytes = |name: &str| {
        let (opcode, modifiers) = name.split_once('.').unwrap_or((name, ""));
        let width = match modifiers.split('.').next_back().unwrap_or_default() {
            "U8" | "S8" => 1,
            "U16" | "S16" => 2,
            "64" => 8,
            "128" => 16,
            _ => 4,
        };
        if ["STL", "LDL"].contains(&opcode) { width } else { 0 }
    };
    consumers.map(|name| bytes(name)).sum()
}
