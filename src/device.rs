//! Device: *where* a problem runs, with the facts that a family's constraints and the record key
//! need.

use serde::{Deserialize, Serialize};
use std::fmt;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub enum Arch {
    Cpu,
    /// Compute capability, major and minor: `Sm(9, 0)` is written `sm_90`.
    Sm(u32, u32),
}

impl fmt::Display for Arch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Arch::Cpu => f.write_str("cpu"),
            Arch::Sm(major, minor) => write!(f, "sm_{major}{minor}"),
        }
    }
}

impl From<Arch> for String {
    fn from(arch: Arch) -> String {
        arch.to_string()
    }
}

impl TryFrom<String> for Arch {
    type Error = String;
    fn try_from(text: String) -> Result<Arch, String> {
        text.parse()
    }
}

impl std::str::FromStr for Arch {
    type Err = String;
    /// Reads `cpu` or `sm_90`; a trailing `a` or `f` (sm_90a) names the same GPU.
    fn from_str(text: &str) -> Result<Arch, String> {
        if text == "cpu" {
            return Ok(Arch::Cpu);
        }
        let digits = text.strip_prefix("sm_").map(|t| t.strip_suffix(['a', 'f']).unwrap_or(t));
        match digits.and_then(|d| d.parse::<u32>().ok()) {
            Some(number) if (50..1000).contains(&number) => Ok(Arch::Sm(number / 10, number % 10)),
            _ => Err(format!("{text:?} is not an architecture; write cpu or sm_80, sm_90a, …")),
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Device {
    /// As the driver spells it ("NVIDIA H200"); for the CPU its model name.
    pub name: String,
    pub arch: Arch,
    /// Streaming multiprocessors; for the CPU the worker threads.
    pub sm_count: u32,
    /// Shared memory in bytes that one block may ask for (opt-in limit), and that one SM has. 0 on
    /// the CPU.
    pub smem_per_block: u32,
    pub smem_per_sm: u32,
    /// 32-bit registers of one SM. 0 on the CPU.
    pub registers_per_sm: u32,
    /// Threads that one SM holds. 0 on the CPU.
    pub threads_per_sm: u32,
    /// Last-level cache in bytes.
    pub l2_bytes: u64,
    pub memory_bytes: u64,
    /// Bytes that the memory moves in a second, by its clock and width. 0 on the CPU, and if the
    /// driver does not tell.
    pub memory_bytes_per_second: u64,
    /// `major * 1000 + minor * 10` as the driver reports it; 0 on the CPU.
    pub driver_version: u32,
}

impl Device {
    /// A well-known GPU of the architecture, for rendering and checking configs without a GPU. None
    /// for architectures that the kernels do not run on. Limits per compute capability: CUDA
    /// programming guide, technical specifications.
    pub fn typical(arch: Arch) -> Option<Device> {
        // Name, SMs, shared memory of an SM in KB, threads of an SM, L2 in MB, GB/s of memory.
        let (name, sm_count, smem_kb, threads_per_sm, l2_mb, memory_gbs) = match arch {
            Arch::Sm(8, 0) => ("NVIDIA A100", 108, 164, 2048, 40, 1555),
            Arch::Sm(8, 7) => ("NVIDIA Orin", 16, 164, 1536, 4, 205),
            Arch::Sm(8, 9) => ("NVIDIA L40S", 142, 100, 1536, 96, 864),
            Arch::Sm(8, _) => ("NVIDIA A10", 72, 100, 1536, 6, 600),
            Arch::Sm(9, _) => ("NVIDIA H200", 132, 228, 2048, 50, 4917),
            Arch::Sm(10 | 11, _) => ("NVIDIA B200", 148, 228, 2048, 126, 8000),
            Arch::Sm(12, _) => ("NVIDIA RTX PRO 6000", 188, 100, 1536, 128, 1792),
            Arch::Cpu | Arch::Sm(..) => return None,
        };
        Some(Device {
            name: name.to_owned(),
            arch,
            sm_count,
            // One KB of an SM's shared memory is CUDA's own.
            smem_per_block: (smem_kb - 1) << 10,
            smem_per_sm: smem_kb << 10,
            registers_per_sm: 1 << 16,
            threads_per_sm,
            l2_bytes: l2_mb << 20,
            memory_bytes: 16 << 30,
            memory_bytes_per_second: memory_gbs * 1_000_000_000,
            driver_version: 0,
        })
    }

    /// The GPU of this name, where its rate of memory is known. That of each GPU with shipped
    /// records is known. The limits are those of the architecture, and so far L2 is as large as
    /// that of the typical GPU.
    pub fn named(arch: Arch, name: &str) -> Option<Device> {
        let typical = Device::typical(arch)?;
        let memory_gbs = match (arch, name) {
            (_, name) if name == typical.name => return Some(typical),
            (Arch::Sm(9, 0), "NVIDIA H100 80GB HBM3") => 3352,
            _ => return None,
        };
        Some(Device { name: name.to_owned(), memory_bytes_per_second: memory_gbs * 1_000_000_000, ..typical })
    }

    /// The most operations of an SM's tensor cores in a cycle; a multiply-add is two. They are
    /// dense products of 16-bit elements summed in fp32, by the whitepapers of the architectures. 0
    /// on the CPU.
    pub const fn tensor_flops_per_cycle(&self) -> u32 {
        match self.arch {
            Arch::Sm(8, 0 | 7) => 2048,
            Arch::Sm(8 | 12, _) => 1024,
            Arch::Sm(9, _) => 4096,
            Arch::Sm(10 | 11, _) => 8192,
            Arch::Cpu | Arch::Sm(..) => 0,
        }
    }
}
