//! The families with kernels for 8-bit k and v, and the problems that none of them does.

use super::decode;
use crate::config::Family;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::problem::{Layout, Problem};

/// The families that do a problem with 8 bits, the preferred one first. None does fp8 queries yet,
/// or has scales in the walk of `batch_invariant`.
pub fn families(problem: &Problem, _device: &Device) -> &'static [Family] {
    match decode::rank(problem) {
        _ if problem.features.has_fp8_queries() || problem.batch_invariant => &[],
        decode::Rank::Preferred => &[Family::Decode, Family::Sm80],
        decode::Rank::Last => &[Family::Sm80, Family::Decode],
        decode::Rank::Unserved => &[Family::Sm80],
    }
}

/// Refuses 8-bit problems that no family does on this GPU.
pub fn supported(problem: &Problem, device: &Device) -> Result<()> {
    if problem.features.eight_bits.is_none() {
        return Ok(());
    }
    if problem.layout == Layout::Vec1 {
        return Err(Error::unsupported(
            "k and v have 8 bits; on a GPU their addresses, strides and head dims must be multiples of 4 bytes, and those of q and out of 2 elements",
        ));
    }
    if families(problem, device).is_empty() {
        let arch = device.arch;
        let what = match problem.features.has_fp8_queries() {
            true => "q has 8 bits",
            false => "k and v have 8 bits and batch_invariant is true",
        };
        return Err(Error::unsupported(format!(
            "{what}, which no kernel family takes on {arch} (the CPU backend does)"
        )));
    }
    Ok(())
}
