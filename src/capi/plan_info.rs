//! The description of a plan as C sees it: which kernel, which config, its source and its cost.

use super::sized::SizedStruct;
use super::text::fixed;
use crate::plan::{Plan, Source};
use std::ffi::c_char;

/// The program pinned the config to this problem. Only Rust programs can do that.
pub const FLASHTUNE_SOURCE_PINNED: i32 = 1;
/// The config was measured in this process.
pub const FLASHTUNE_SOURCE_PROCESS: i32 = 2;
/// The config comes from a record that an earlier process measured on this machine, or that was
/// imported.
pub const FLASHTUNE_SOURCE_MACHINE: i32 = 3;
/// The config comes from a record for this GPU that ships with the library.
pub const FLASHTUNE_SOURCE_SHIPPED: i32 = 4;
/// The config comes from a record of another GPU of the same architecture, with the nearest number
/// of multiprocessors. The record ships with the library or is one of this machine's. On a CPU
/// context it is a record of this machine with another number of threads.
pub const FLASHTUNE_SOURCE_NEAREST_GPU: i32 = 5;
/// The heuristic chose the config without measurement, because no record serves. A config that was
/// loaded for another shape, and serves because preparing is not allowed, also has this source.
pub const FLASHTUNE_SOURCE_HEURISTIC: i32 = 6;
/// The config comes from a record of the context's pack. It may also be the pack's best config for
/// the problem: if no NVRTC was found, or if the best config of all would have to be compiled and
/// is predicted to be at most 2 % faster.
pub const FLASHTUNE_SOURCE_PACK: i32 = 7;

/// The description of a plan. Text is UTF-8, ends in NUL, and is cut if it is too long.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct flashtune_plan_info {
    /// sizeof(flashtune_plan_info), set by the caller.
    pub struct_size: u64,
    /// A FLASHTUNE_SOURCE_*: where the config comes from. One that was chosen by predicted time has
    /// the source of the record that calibrates the prediction.
    pub source: i32,
    /// The main kernel's name, for example "flashtune_sm80_forward".
    pub kernel: [c_char; 64],
    /// The config, for example "sm80 block_m=128 block_n=64 num_stages=2 num_warps=4".
    pub config: [c_char; 256],
    /// Why this config was chosen, as one sentence.
    pub reason: [c_char; 256],
    /// Registers of a thread of the main kernel. 0 on a CPU context.
    pub registers: u32,
    /// Spilled bytes of a thread of the main kernel. 0 on a CPU context.
    pub spill_bytes: u32,
    /// Shared memory of a CTA of the main kernel, in bytes. 0 on a CPU context.
    pub smem_bytes: u32,
    /// Threads of a CTA of the main kernel. 0 on a CPU context.
    pub threads: u32,
    /// Median time of this config in microseconds, from the record. It was measured at the record's
    /// shape, which may be a neighbour of this one, as reason says. 0 means not measured. It is
    /// also 0 if this config is not the neighbour's, since it splits the keys differently or was
    /// chosen by predicted time; reason then has the neighbour's time.
    pub measured_us: f64,
    /// The same for the config that the heuristic would have chosen.
    pub default_us: f64,
}

// SAFETY: repr(C), a u64 first, then integers and floats.
unsafe impl SizedStruct for flashtune_plan_info {
    const NAME: &'static str = "flashtune_plan_info";
    const OLDEST: usize = 624;
}
// This number grows with the struct. OLDEST stays.
const _: () = assert!(size_of::<flashtune_plan_info>() == 624);

impl flashtune_plan_info {
    pub(super) fn of(plan: &Plan) -> Self {
        let resources = plan.executable.resources();
        let measured = plan.record.as_ref().filter(|record| record.config == plan.config);
        flashtune_plan_info {
            struct_size: size_of::<Self>() as u64,
            source: match plan.source {
                Source::Pinned => FLASHTUNE_SOURCE_PINNED,
                Source::Process => FLASHTUNE_SOURCE_PROCESS,
                Source::Machine => FLASHTUNE_SOURCE_MACHINE,
                Source::Pack => FLASHTUNE_SOURCE_PACK,
                Source::Shipped => FLASHTUNE_SOURCE_SHIPPED,
                Source::NearestGpu => FLASHTUNE_SOURCE_NEAREST_GPU,
                Source::Heuristic => FLASHTUNE_SOURCE_HEURISTIC,
            },
            kernel: fixed(plan.executable.kernel_name()),
            config: fixed(&plan.config.to_string()),
            reason: fixed(&plan.reason),
            registers: resources.registers,
            spill_bytes: resources.spill_bytes,
            smem_bytes: resources.smem_bytes,
            threads: resources.threads,
            measured_us: measured.map_or(0.0, |record| record.median_us),
            default_us: measured.and_then(|record| record.default_us).unwrap_or(0.0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::Backend;
    use crate::cpu::Cpu;
    use crate::family;
    use crate::plan::Record;
    use crate::problem::{Dtype, Layout, Pass, Problem};
    use crate::tune::{Outcome, Timed};
    use std::sync::Arc;

    #[test]
    fn a_time_is_told_of_the_config_that_was_measured_alone() {
        let problem = Problem { layout: Layout::Vec4, ..Problem::dense(Pass::Forward, Dtype::Fp32, 1, 1, 64, 32) };
        let backend = Backend::Cpu(Cpu::new(1).unwrap());
        let measured = family::heuristic(&problem, backend.device());
        let executable = Arc::new(backend.build(&problem, &measured).unwrap());
        let winner = Timed { config: measured.clone(), median_us: 7.0, utilisation: None };
        let outcome = Outcome { winner, spread: 0.0, check_error: 0.0, runner_up: None, default_us: Some(9.0) };
        let record = Record::new(&problem, backend.device(), outcome);
        let times = |config| {
            let (record, executable) = (Some(record.clone()), Arc::clone(&executable));
            let (source, reason) = (Source::Machine, String::new());
            let info = flashtune_plan_info::of(&Plan { problem, config, source, reason, record, executable });
            (info.measured_us, info.default_us)
        };
        assert_eq!(times(measured.clone()), (7.0, 9.0));
        assert_eq!(times(measured.with("num_splits", 2)), (0.0, 0.0));
    }
}
