//! The sm80 family: `mma.sync` kernels, one warp for each slab of 16 rows, from compute capability
//! 8.0 on.
//!
//! Each pass has a file, with its knobs, constraints, heuristic and cost; what the two share is
//! here. Constraints stand there with their reason and once more as static asserts in
//! `templates/sm80_forward.cu.tera` and `sm80_backward.cu.tera`.

mod backward;
mod forward;
#[cfg(test)]
mod tests;

pub use backward::BackwardKnobs;
pub use forward::ForwardKnobs;

use super::knob::Constraint;
use super::space::Space;
use crate::device::Device;
use crate::problem::{Causal, Dtype, Problem};

/// The first of a short list of known good configs, most demanding first, that passes every
/// constraint. The last ones fit any head dim on any device.
///
/// The widest tile whose kernel spills nothing moves with the head dim and with what else is in the
/// loop (masks, dropout), by the compiler's register allocation alone. So the first configs are
/// given by class, as NVRTC 13.0 compiles them and as they were measured on an H200 (`tuning-db`);
/// `tests/kernels/matrix.rs` holds them to it.
fn first_that_fits<K: Space>(configs: &[K], problem: &Problem, device: &Device) -> Option<K> {
    configs.iter().find(|config| config.fits(problem, device)).or(configs.last()).copied()
}

/// `holds` asks `order_matters` where the knob is set.
const fn longest_first<K>(holds: fn(&Problem, &K, &Device) -> bool) -> Constraint<K> {
    Constraint {
        name: "longest_first",
        reason: "without a causal mask rows are equally long, except the first ones of a window, and unless tiles wait for turns at dQ, the order only costs L2 hits",
        holds,
    }
}

/// Whether tiles differ in length or wait for one another, so that their order matters.
fn order_matters(problem: &Problem) -> bool {
    problem.causal != Causal::None || problem.deterministic
}

/// Registers of a thread beside its fragments: 40 for addresses and statistics, and with fp32 those
/// that split an operand of 8 columns and hold its sum.
fn other_registers(problem: &Problem) -> u32 {
    40 + if problem.dtype == Dtype::Fp32 { 16 } else { 0 }
}

/// Registers that split an operand of 16 rows, for each tile of 16 rows; fp32 only.
fn split_registers(problem: &Problem) -> u32 {
    if problem.dtype == Dtype::Fp32 { 16 } else { 0 }
}

/// Whether rows see keys up to a diagonal or from one on, so that blocks beside it go through a
/// copy of the loop with a mask.
fn masks(problem: &Problem) -> bool {
    problem.right_shift().is_some() || problem.left_shift().is_some()
}

/// The cost of too few warps on an SM to hide latencies: part of either pass's cost.
fn few_warps(warps_per_sm: f64) -> f64 {
    if warps_per_sm < 8.0 { 0.05 * (8.0 / warps_per_sm - 1.0) } else { 0.0 }
}

/// Past about four fifths of the budget the compiler begins to spill or to load fragments late.
fn register_pressure(registers: u32, budget: u32) -> f64 {
    (f64::from(registers) / f64::from(budget) - 0.8).max(0.0)
}
