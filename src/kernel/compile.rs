//! Compilation: from a kernel's text to a cubin by NVRTC, with the registers and spills that ptxas
//! reports.
//!
//! It needs no GPU. The compiler options (`options`) are part of a cubin's key; nothing else
//! influences the result.

use crate::config::Family;
use crate::cuda::nvrtc::Nvrtc;
use crate::device::Arch;
use crate::error::{Error, Result, Status};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Compiled {
    pub cubin: Vec<u8>,
    /// The compiler's warnings. Empty for a clean kernel.
    pub log: String,
    /// By the kernel's `extern "C"` name.
    pub resources: BTreeMap<String, EntryResources>,
}

/// The resources of one kernel, as ptxas reports them. Under `setmaxnreg` the register count is
/// that of the launch bound, so only the spills carry information.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct EntryResources {
    pub registers: u32,
    /// Stores and loads together.
    pub spill_bytes: u32,
    pub stack_bytes: u32,
    pub static_smem_bytes: u32,
}

/// The first NVRTC version that keeps a cache of its own.
const NVRTC_WITH_CACHE: (u32, u32) = (12, 9);

/// The options for a target such as `sm_90` and a version of NVRTC.
pub fn options(target: &str, nvrtc_version: (u32, u32)) -> Vec<String> {
    let mut options = vec![
        format!("--gpu-architecture={target}"),
        "--std=c++17".to_owned(),
        "-default-device".to_owned(),
        "--ptxas-options=-v".to_owned(),
        // Unused variables: device files declare constants for all kernels, and no kernel uses them
        // all.
        "--diag-suppress=177".to_owned(),
    ];
    if nvrtc_version >= NVRTC_WITH_CACHE {
        // A cubin from NVRTC's cache comes without a log, and the log reports spills and serialised
        // products.
        options.push("--no-cache".to_owned());
    }
    options
}

/// A compilation target: `sm_86`, or `sm_90a` with the instructions of that architecture alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Target {
    /// 86 is sm_86.
    number: u32,
    family: Family,
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "sm_{}{}", self.number, self.family.target_suffix())
    }
}

/// Chooses the target of a family's kernels for a device of `arch`: the architecture itself, if
/// NVRTC knows it. An older NVRTC compiles for the nearest lower architecture of the same major
/// version, whose cubins the device also runs.
pub fn target(arch: Arch, family: Family, nvrtc: &Nvrtc) -> Result<String> {
    let (major, minor) = nvrtc.version();
    targets(arch, family)?
        .into_iter()
        .find(|target| nvrtc.archs().contains(&target.number))
        .map(|target| target.to_string())
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

/// The targets whose cubins a device of `arch` runs, its own first.
pub(super) fn targets(arch: Arch, family: Family) -> Result<Vec<Target>> {
    let target = |number| Target { number, family };
    match (arch, family) {
        (Arch::Cpu, _) | (_, Family::Cpu) => {
            Err(Error::invalid("the architecture is cpu; kernels are compiled for sm_80, sm_90, …"))
        }
        // A cubin of sm_90a runs only on compute capability 9.0 (CUDA programming guide, feature
        // sets).
        (Arch::Sm(9, 0), Family::Sm90 | Family::Sm90Fp8) => Ok(vec![target(90)]),
        (_, Family::Sm90 | Family::Sm90Fp8) => {
            Err(Error::invalid(format!("the architecture is {arch}; kernels of the sm90 family are for sm_90 alone")))
        }
        (Arch::Sm(major, minor), Family::Sm80 | Family::Decode) => {
            Ok((0..=minor).rev().map(|minor| target(major * 10 + minor)).collect())
        }
    }
}

/// Compiles one text. Messages call it `name`.
pub fn compile(nvrtc: &Nvrtc, name: &str, text: &str, target: &str) -> Result<Compiled> {
    let output = nvrtc.compile(name, text, &options(target, nvrtc.version()))?;
    let (resources, log) = read_log(&output.log);
    // Serialised products run at half speed, which is slower than the sm80 family: the kernel is
    // useless.
    if let Some(warning) = log.lines().find(|line| line.contains("wgmma") && line.contains("serialized")) {
        return Err(Error::new(Status::CompileFailed, format!("{name}: {warning}")));
    }
    Ok(Compiled { cubin: output.cubin, log, resources })
}

/// Splits a log into the resources and the lines that report no resources.
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
            // Functions that were not inlined come after their kernel, with a line of their own
            // each.
            let used = resources.entry(entry.clone()).or_default();
            used.stack_bytes += number_before(line, " bytes stack frame");
            used.spill_bytes += number_before(line, " bytes spill stores") + number_before(line, " bytes spill loads");
        } else if info.is_none_or(|info| info.contains("Performance Loss")) && !line.trim().is_empty() {
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
    fn nvrtcs_own_cache_is_off_where_there_is_one() {
        let has_option = |version| options("sm_90a", version).contains(&"--no-cache".to_owned());
        assert_eq!([(12, 0), (12, 8), (12, 9), (13, 0)].map(has_option), [false, false, true, true]);
    }

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
    fn sm90_kernels_are_for_compute_capability_9_0_alone() {
        assert_eq!(targets(Arch::Sm(9, 0), Family::Sm90).unwrap()[0].to_string(), "sm_90a");
        assert!(targets(Arch::Sm(10, 0), Family::Sm90).is_err());
        assert!(targets(Arch::Sm(8, 0), Family::Sm90).is_err());
    }

    #[test]
    fn a_device_runs_cubins_of_its_own_major_version_up_to_its_minor() {
        let names =
            |arch, family| -> Vec<String> { targets(arch, family).unwrap().iter().map(ToString::to_string).collect() };
        assert_eq!(names(Arch::Sm(8, 6), Family::Sm80)[..2], ["sm_86", "sm_85"]);
        assert_eq!(names(Arch::Sm(9, 0), Family::Sm80), ["sm_90"]);
        assert!(targets(Arch::Cpu, Family::Sm80).is_err());
    }
}
