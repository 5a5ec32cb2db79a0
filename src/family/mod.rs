//! Kernel families: which there are, which of them serve a problem, and what each answers.
//!
//! A family declares its knobs, constraints, heuristic, cost and kernels in its own folder, typed
//! (`space::Space`). This file is the registry, and asks the right family about configs in text
//! form (`space::Room`). A constraint that a kernel relies on is asserted once more in its
//! template. Everything here is arithmetic: nothing measures, launches or remembers.

mod backward;
mod combine;
pub mod cpu;
mod decode;
mod eight_bits;
mod knob;
mod limits;
mod sm80;
mod sm90;
mod space;
pub mod spec;
pub mod split_rest;
mod tile;
pub mod time;

pub use backward::SINKS;
pub use combine::{COMBINE, COMBINE_ROWS, COMBINE_RUNS, COMBINE_SEGMENTS};
pub use decode::is_bound_by_keys;
pub use knob::Knob;
pub use tile::BOX_COLS;

use crate::config::{Config, Family};
use crate::device::{Arch, Device};
use crate::error::{Error, Result};
use crate::problem::{Dtype, Pass, Problem};
use decode::Rank;
use space::Room;
use spec::KernelSpec;
use time::Work;

/// What a family's pass answers about configs in text form.
fn room(family: Family, pass: Pass) -> &'static Room {
    const CPU: Room = Room::of::<cpu::CpuKnobs>();
    const SM80_FORWARD: Room = Room::of::<sm80::ForwardKnobs>();
    const SM80_BACKWARD: Room = Room::of::<sm80::BackwardKnobs>();
    const SM90_FORWARD: Room = Room::of::<sm90::ForwardKnobs>();
    const SM90_BACKWARD: Room = Room::of::<sm90::BackwardKnobs>();
    const SM90_FP8: Room = Room::of::<sm90::Fp8Knobs>();
    const DECODE: Room = Room::of::<decode::DecodeKnobs>();
    match (family, pass) {
        (Family::Cpu, _) => &CPU,
        (Family::Sm80, Pass::Forward) => &SM80_FORWARD,
        (Family::Sm80, Pass::Backward) => &SM80_BACKWARD,
        (Family::Sm90, Pass::Forward) => &SM90_FORWARD,
        (Family::Sm90, Pass::Backward) => &SM90_BACKWARD,
        // These two have no backward pass, and `families` never names them for one.
        (Family::Sm90Fp8, _) => &SM90_FP8,
        (Family::Decode, _) => &DECODE,
    }
}

/// The families that do a problem on a device, the preferred one first.
pub fn families(problem: &Problem, device: &Device) -> &'static [Family] {
    if device.arch == Arch::Cpu {
        return &[Family::Cpu];
    }
    if let Some(families) = eight_bits::own_families(problem, device) {
        return families;
    }
    let is_sm90 = device.arch == Arch::Sm(9, 0) && sm90::refusal(problem).is_none();
    let rank = match decode::rank(problem) {
        Rank::Preferred if is_sm90 && sm90::serves_small_chunks(problem) => Rank::Last,
        rank => rank,
    };
    match (rank, is_sm90) {
        (Rank::Preferred, true) => &[Family::Decode, Family::Sm90, Family::Sm80],
        (Rank::Preferred, false) => &[Family::Decode, Family::Sm80],
        (Rank::Last, true) => &[Family::Sm90, Family::Sm80, Family::Decode],
        (Rank::Last, false) => &[Family::Sm80, Family::Decode],
        (Rank::Unserved, true) => &[Family::Sm90, Family::Sm80],
        (Rank::Unserved, false) => &[Family::Sm80],
    }
}

/// Why the family that was made for the device's architecture does not serve a problem, in one
/// clause. None if it does, or if the architecture has no such family.
pub fn passed_over(problem: &Problem, device: &Device) -> Option<String> {
    match device.arch {
        Arch::Sm(9, 0) => sm90::refusal(problem).map(|why| format!("sm90 does not serve: {why}")),
        _ => None,
    }
}

/// Whether some family of a device may widen 8-bit or int4 K and V in the workspace.
pub fn may_widen_kv(device: &Device) -> bool {
    device.arch == Arch::Sm(9, 0)
}

/// Whether a family's kernels take tensors of a dtype.
pub fn takes(family: Family, dtype: Dtype) -> bool {
    match family {
        Family::Cpu | Family::Sm80 => true,
        Family::Sm90 | Family::Sm90Fp8 | Family::Decode => dtype != Dtype::Fp32,
    }
}

/// Whether this device does the problem at all, whatever the config.
pub fn supported(problem: &Problem, device: &Device) -> Result<()> {
    problem.validate()?;
    match device.arch {
        Arch::Cpu => Ok(()),
        Arch::Sm(major, _) if major < 8 => Err(Error::unsupported(format!(
            "{} is {}; kernels need sm_80 or later, since bf16 mma and cp.async begin there",
            device.name, device.arch
        ))),
        // A tile's turn at a block follows from how many tiles before it meet the block. A list for
        // the other direction that names other blocks would make tiles wait for ever.
        Arch::Sm(..) if problem.deterministic && problem.features.block_mask.is_some() => Err(Error::unsupported(
            "deterministic is true and there is a block mask; on a GPU tiles take no turns at the blocks of lists (the CPU backend is always deterministic)",
        )),
        Arch::Sm(..) => eight_bits::supported(problem, device),
    }
}

/// The knobs of a family's pass.
pub fn knobs(family: Family, pass: Pass) -> &'static [Knob] {
    room(family, pass).knobs
}

/// The config with the knobs that a library which was older than they did not write.
pub fn with_younger_knobs(config: Config, pass: Pass) -> Config {
    let knobs = knobs(config.family, pass);
    knob::with_younger_knobs(config, knobs)
}

/// Whether the config can run this problem on this device; if not, the violated constraint in one
/// sentence.
pub fn check(problem: &Problem, config: &Config, device: &Device) -> Result<(), String> {
    let serving = families(problem, device);
    if !serving.contains(&config.family) {
        let why = passed_over(problem, device).map_or(String::new(), |why| format!("; {why}"));
        let names: Vec<_> = serving.iter().map(|family| family.name()).collect();
        return Err(format!(
            "family is {}; {} is served by {}{why}",
            config.family.name(),
            device.arch,
            names.join(", ")
        ));
    }
    let check = room(config.family, problem.pass).check;
    // A batch-invariant config is chosen for all sizes.
    check(problem, config, device).or_else(|reason| match problem.batch_invariant {
        true => check(&problem.in_any_batch(), config, device).map_err(|_| reason),
        false => Err(reason),
    })
}

/// The config to use without any measurement. It passes `check`, unless a launch has no room for so
/// many tiles.
pub fn heuristic(problem: &Problem, device: &Device) -> Config {
    heuristics(problem, device).swap_remove(0)
}

/// The heuristic's config of each family that serves the problem, the preferred family first. A
/// later config is for the case that the earlier ones do not build. The last one always builds.
pub fn heuristics(problem: &Problem, device: &Device) -> Vec<Config> {
    families(problem, device).iter().filter_map(|family| heuristic_of(*family, problem, device)).collect()
}

/// The heuristic's config of a family that serves the problem; None where none of its configs fits.
/// Sizes do not decide that of a batch-invariant problem, since other blocks of keys may give other
/// bits.
pub fn heuristic_of(family: Family, problem: &Problem, device: &Device) -> Option<Config> {
    (room(family, problem.pass).heuristic)(&problem.in_any_batch(), device)
}

/// Every config of a serving family that passes `check`, each with its cost, in no order.
pub fn passing(family: Family, problem: &Problem, device: &Device) -> Vec<(f64, Config)> {
    (room(family, problem.pass).passing)(problem, device)
}

/// The cost that the family expects of a config, in any unit: it only orders candidates. None where
/// `check` refuses it.
pub fn cost(problem: &Problem, config: &Config, device: &Device) -> Option<f64> {
    check(problem, config, device).ok()?;
    (room(config.family, problem.pass).cost)(problem, config, device).ok()
}

/// The tiles of a launch with a config, and what each is expected to take. None where the family
/// does not know.
pub fn work(problem: &Problem, config: &Config, device: &Device) -> Option<Work> {
    (room(config.family, problem.pass).work)(problem, config, device)
}

/// Configs of the preferred family beside the heuristic's, which a lookup may choose by predicted
/// time.
pub fn alternatives(problem: &Problem, device: &Device) -> Vec<Config> {
    let preferred = families(problem, device).first();
    preferred.map_or(Vec::new(), |family| (room(*family, problem.pass).alternatives)(problem, device))
}

/// Configs of the preferred family that give a batch-invariant problem the bits of the heuristic's,
/// which a lookup may choose by predicted time and which may stand in for one another. None for
/// other problems.
pub fn of_same_bits(problem: &Problem, device: &Device) -> Option<Vec<Config>> {
    problem.batch_invariant.then(|| alternatives(problem, device))
}

/// Adapts a config that was measured on `from` to `to`, another problem of the class: knobs that
/// follow from the shape alone are chosen anew. A config that the family cannot read stays as it
/// is, for `check` to refuse.
pub fn carried_over(config: &Config, from: &Problem, to: &Problem, device: &Device) -> Config {
    adapted(config, to, device, |room| (room.carried_over)(config, from, to, device))
}

/// Adapts a config that was measured for the problem's shape on another GPU to this device. One
/// that the family cannot read stays as it is.
pub fn on_another_gpu(config: &Config, problem: &Problem, device: &Device) -> Config {
    adapted(config, problem, device, |room| (room.on_another_gpu)(config, problem, device))
}

fn adapted(
    config: &Config,
    problem: &Problem,
    device: &Device,
    adapt: impl FnOnce(&Room) -> std::result::Result<Config, String>,
) -> Config {
    let is_served = families(problem, device).contains(&config.family);
    let adapted = is_served.then(|| adapt(room(config.family, problem.pass)).ok()).flatten();
    adapted.unwrap_or_else(|| config.clone())
}

/// The kernels of a pass in launch order; none on the CPU. An error names a knob that is missing,
/// unknown or at a value that is not listed.
pub fn kernels(problem: &Problem, config: &Config) -> Result<Vec<KernelSpec>> {
    (room(config.family, problem.pass).kernels)(problem, config).map_err(Error::invalid)
}
