//! Where problems with 8 bits have other families than those with 16 bits, and which of them no
//! family does.

use super::sm90;
use crate::config::Family;
use crate::device::{Arch, Device};
use crate::error::{Error, Result};
use crate::problem::{Layout, Problem};

/// The families that do a problem with 8 bits, where these are others than with 16 bits: q of 8
/// bits has a family of its own, and no family has scales in the walk of `batch_invariant`.
pub fn own_families(problem: &Problem, device: &Device) -> Option<&'static [Family]> {
    problem.features.eight_bits?;
    if problem.batch_invariant {
        return Some(&[]);
    }
    if !problem.features.has_fp8_queries() {
        return None;
    }
    let is_done = device.arch == Arch::Sm(9, 0) && sm90::fp8_refusal(problem).is_none();
    Some(if is_done { &[Family::Sm90Fp8] } else { &[] })
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
    if own_families(problem, device).is_some_and(<[Family]>::is_empty) {
        let arch = device.arch;
        let refusal = sm90::fp8_refusal(problem).filter(|_| arch == Arch::Sm(9, 0));
        return Err(Error::unsupported(match refusal {
            _ if problem.batch_invariant => format!(
                "k and v have 8 bits and batch_invariant is true, which no kernel family takes on {arch} (the CPU backend does)"
            ),
            Some(why) => format!("q has 8 bits: {why}"),
            None => format!("q has 8 bits, which kernels take on sm_90 alone, not on {arch} (the CPU backend does)"),
        }));
    }
    Ok(())
}
