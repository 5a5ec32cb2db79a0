//! What a cubin comes down to: its instructions, by nvdisasm. Without it the tests say so and pass, unless
//! `FLASHTUNE_REQUIRE_NVDISASM=1`.

use flashtune::cuda::nvrtc::Nvrtc;
use std::path::{Path, PathBuf};
use std::process::Command;

/// nvdisasm beside the NVRTC in use, as in a toolkit and in NVIDIA's Python packages, or on the path.
pub fn nvdisasm(nvrtc: &Nvrtc) -> Option<PathBuf> {
    let beside = nvrtc.path().parent().map(|folder| folder.join("../bin/nvdisasm"));
    let found = beside
        .into_iter()
        .chain([PathBuf::from("nvdisasm")])
        .find(|program| Command::new(program).arg("--version").output().is_ok_and(|output| output.status.success()));
    if found.is_none() {
        let required = std::env::var("FLASHTUNE_REQUIRE_NVDISASM").is_ok_and(|value| value == "1");
        assert!(!required, "FLASHTUNE_REQUIRE_NVDISASM=1, but there is none near {}", nvrtc.path().display());
        eprintln!("SKIPPED, no nvdisasm near {} or on the path", nvrtc.path().display());
    }
    found
}

/// The instructions in the order of their addresses, with their modifiers: `HMMA.16816.F32.BF16`.
pub fn instructions(nvdisasm: &Path, cubin: &[u8]) -> Vec<String> {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), cubin).unwrap();
    let output = Command::new(nvdisasm).arg(file.path()).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    // `/*2db0*/  @P0 HMMA.16816.F32.BF16 R212, R44, R168, RZ ;`, and data, whose words begin with a dot.
    String::from_utf8_lossy(&output.stdout)
        .lines()
        .filter_map(|line| line.trim_start().strip_prefix("/*")?.split_once("*/"))
        .filter_map(|(_, code)| code.split_whitespace().find(|word| !word.starts_with('@')))
        .filter(|word| word.starts_with(|first: char| first.is_ascii_uppercase()))
        .map(|word| word.trim_end_matches(';').to_owned())
        .collect()
}

/// Bytes of registers that an sm90 kernel's consumers store and load: their code begins where they take more registers
/// and ends where the producer gives some up.
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
