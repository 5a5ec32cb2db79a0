//! From a kernel's text to a cubin, by NVRTC, with what ptxas says of registers and spills.
//!
//! It needs no GPU. What it is asked with (`options`) is part of a cubin's key; nothing else influences the result.

use crate::cuda::nvrtc::Nvrtc;
use crate::device::Arch;
use crate::error::{Error, Result, Status};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Compiled {
    pub cubin: Vec<u8>,
    /// What the compiler said beside the resources: warnings. Empty for a clean kernel.
    pub log: String,
    /// By the kernel's `extern "C"` name.
    pub resources: BTreeMap<String, EntryResources>,
}

/// What ptxas says of one kernel. Under `setmaxnreg` the register count is the launch bound's; only spills tell.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct EntryResources {
    pub registers: u32,
    /// Stores and loads together.
    pub spill_bytes: u32,
    pub stack_bytes: u32,
    pub static_smem_bytes: u32,
}

/// The options for a target such as `sm_90`.
pub fn options(target: &str) -> Vec<String> {
    vec![
        format!("--gpu-architecture={target}"),
        "--std=c++17".to_owned(),
        "-default-device".to_owned(),
        "--ptxas-options=-v".to_owned(),
        // Unused variable: a device file's constants are there for all kernels, and no kernel uses them all.
        "--diag-suppress=177".to_owned(),
    ]
}

/// What to compile for so that a device of `arch` runs it: the architecture itself or, where NVRTC is older than the
/// device, the nearest one below it of the same major version, whose cubins the device runs too.
pub fn target(arch: Arch, nvrtc: &Nvrtc) -> Result<String> {
    let (major, minor) = nvrtc.version();
    targets(arch)?
        .into_iter()
        .find(|number| nvrtc.archs().contains(number))
        .map(|number| format!("sm_{number}"))
        .ok_or_else(|| {
            Error::new(
                Status::NoCompiler,
                format!(
                    "NVRTC {major}.{minor} ({}) makes no cubins for {arch}; it knows {:?}",
                    nvrtc.path().display(),
                    nvrtc.archs()
                ),
            )
        })
}

/// The architectures whose cubins a device of `arch` runs, its own first.
pub(super) fn targets(arch: Arch) -> Result<Vec<u32>> {
    match arch {
        Arch::Cpu => Err(Error::invalid("the architecture is cpu; kernels are compiled for sm_80, sm_90, …")),
        Arch::Sm(major, minor) => Ok((0..=minor).rev().map(|minor| major * 10 + minor).collect()),
    }
}

/// Compiles one text. `name` is what messages call it.
pub fn compile(nvrtc: &Nvrtc, name: &str, text: &str, target: &str) -> Result<Compiled> {
    let output = nvrtc.compile(name, text, &options(target))?;
    let (resources, log) = read_log(&output.log);
    Ok(Compiled { cubin: output.cubin, log, resources })
}

/// The resources in a log, and the lines that do not speak of them.
fn read_log(log: &str) -> (BTreeMap<String, EntryResources>, String) {
    let mut resources: BTreeMap<String, EntryResources> = BTreeMap::new();
    let mut entry = String::new();
    let mut rest = String::new();
    for line in log.lines() {
        let info = line.strip_prefix("ptxas info").map(|line| line.trim_start_matches([' ', ':']));
        if let Some(name) = info.and_then(|info| info.strip_prefix("Compiling entry function '")) {
            entry = name.split('\'').next().unwrap_or_default().to_owned();
            resources.entry(entry.clone()).or_default();
        } else if let Some(info) = info.and_then(|info| info.strip_prefix("Used ")) {
            let used = resources.entry(entry.clone()).or_default();
            used.registers = number_before(info, " registers");
            used.static_smem_bytes = number_before(info, " bytes smem");
        } else if line.contains("bytes stack frame") {
            // Functions that were not inlined come after their kernel, with a line of their own each.
            let used = resources.entry(entry.clone()).or_default();
            used.stack_bytes += number_before(line, " bytes stack frame");
            used.spill_bytes += number_before(line, " bytes spill stores") + number_before(line, " bytes spill loads");
        } else if info.is_none() && !line.trim().is_empty() {
            rest.push_str(line);
            rest.push('\n');
        }
    }
    resources.remove("");
    (resources, rest)
}

/// The number right before `unit`, 0 where there is none.
fn number_before(text: &str, unit: &str) -> u32 {
    let before = text.split(unit).next().filter(|before| before.len() < text.len()).unwrap_or_default();
    let digits = before.len() - before.bytes().rev().take_while(u8::is_ascii_digit).count();
    before[digits..].parse().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn resources_are_read_per_entry_and_warnings_are_kept() {
        let log = "\
k.cu(3): warning #177-D: variable \"x\" was declared but never referenced

ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'first' for 'sm_90'
ptxas info    : Function properties for first
    16 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 16 bytes cumulative stack size, 1024 bytes smem, 912 bytes cmem[0]
ptxas info    : Compile time = 8.101 ms
ptxas info    : Compiling entry function 'second' for 'sm_90'
ptxas info    : Function properties for second
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 10 registers, used 0 barriers
";
        let (resources, rest) = read_log(log);
        let first = EntryResources { registers: 255, spill_bytes: 20, stack_bytes: 16, static_smem_bytes: 1024 };
        assert_eq!(resources["first"], first);
        assert_eq!(resources["second"], EntryResources { registers: 10, ..EntryResources::default() });
        assert_eq!(resources.len(), 2);
        assert_eq!(rest, "k.cu(3): warning #177-D: variable \"x\" was declared but never referenced\n");
    }

    #[test]
    fn a_device_runs_cubins_of_its_own_major_version_up_to_its_minor() {
        assert_eq!(targets(Arch::Sm(8, 6)).unwrap()[..2], [86, 85]);
        assert_eq!(targets(Arch::Sm(9, 0)).unwrap(), [90]);
        assert!(targets(Arch::Cpu).is_err());
    }
}
