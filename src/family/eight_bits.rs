//! Which families serve problems with 8 bits and with int4, and which of these problems none does.

use super::sm90;
use crate::config::Family;
use crate::device::{Arch, Device};
use crate::error::{Error, Result};
use crate::problem::{Layout, Problem};

/// The widest rows of int4 of a warp: more columns of V would not fit its registers.
const MOST_FOUR_BIT_COLUMNS: i64 = 256;

/// The families that do a problem with 8 bits or int4, where these are others than with 16 bits. q
/// of 8 bits has a family of its own. int4 has `decode`, and for prompts `sm90`, which widens it.
/// No family has scales in the walk of `batch_invariant`.
pub fn own_families(problem: &Problem, device: &Device) -> Option<&'static [Family]> {
    if problem.features.four_bits.is_some() {
        return Some(match four_bits_refusal(problem) {
            Some(_) => &[],
            None if widens_four_bits(problem, device) => &[Family::Sm90, Family::Decode],
            None => &[Family::Decode],
        });
    }
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

/// Whether `sm90` does a problem of int4. It widens K and V first, which pays where the decode
/// kernel would read the keys many times: once for each 64 packed rows.
fn widens_four_bits(problem: &Problem, device: &Device) -> bool {
    let may_widen = device.arch == Arch::Sm(9, 0) && sm90::refusal(problem).is_none();
    may_widen && problem.keeps_widened_kv_nearby()
}

/// Why no family takes a problem of int4 k and v, in one clause; None where `decode` does.
fn four_bits_refusal(problem: &Problem) -> Option<&'static str> {
    if problem.batch_invariant {
        return Some("batch_invariant is true");
    }
    if problem.features.block_mask.is_some() {
        return Some("there is a block mask");
    }
    let is_wide = problem.head_dim.max(problem.head_dim_v) > MOST_FOUR_BIT_COLUMNS;
    is_wide.then_some("head_dim or head_dim_v is above 256")
}

/// Refuses problems of 8 bits and of int4 that no family does on this GPU.
pub fn supported(problem: &Problem, device: &Device) -> Result<()> {
    if let Some(four) = problem.features.four_bits {
        let name = four.name();
        if problem.layout == Layout::Vec1 {
            return Err(Error::unsupported(format!(
                "k and v are {name}; on a GPU their addresses and strides must be multiples of 4 bytes, and those of q and out of 2 elements"
            )));
        }
        return match four_bits_refusal(problem) {
            None => Ok(()),
            Some(why) => Err(Error::unsupported(format!(
                "k and v are {name} and {why}, which no kernel family takes on {} (the CPU backend does)",
                device.arch
            ))),
        };
    }
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
