//! Kernel families: one room for each, and what every family answers.
//!
//! A family declares its knobs, constraints, heuristic, cost and kernels in its own folder. This file knows which
//! families there are, which of them serve a problem, and which configs pass `check`. A constraint that a kernel relies
//! on is asserted once more in its template. Everything here is arithmetic: nothing measures, launches or remembers.

pub mod cpu;
mod decode;
pub mod geometry;
mod limits;
mod sm80;
mod sm90;

use crate::config::{Config, Family};
use crate::device::{Arch, Device};
use crate::error::{Error, Result};
use crate::problem::{Dtype, Pass, Problem};

/// A named number of a config. Adding a value here adds it to the space; records name it by `name`.
pub struct Knob {
    pub name: &'static str,
    /// What it is, with its unit, in a few words.
    pub meaning: &'static str,
    pub values: &'static [u32],
}

/// A condition that every config of a family meets; the first one that fails is why a config is rejected.
pub struct Constraint {
    pub name: &'static str,
    /// Why: the hardware's or the kernel's reason.
    pub reason: &'static str,
    pub holds: fn(&Problem, &Config, &Device) -> bool,
}

/// The families that do a problem on a device, the preferred one first.
pub fn families(problem: &Problem, device: &Device) -> &'static [Family] {
    let is_sm90 = device.arch == Arch::Sm(9, 0) && sm90::refusal(problem).is_none();
    match (device.arch, decode::serves(problem)) {
        (Arch::Cpu, _) => &[Family::Cpu],
        // No other reads pages.
        (Arch::Sm(..), true) if problem.features.paged.is_some() => &[Family::Decode],
        (Arch::Sm(..), true) if is_sm90 => &[Family::Decode, Family::Sm90, Family::Sm80],
        (Arch::Sm(..), true) => &[Family::Decode, Family::Sm80],
        (Arch::Sm(..), false) if is_sm90 => &[Family::Sm90, Family::Sm80],
        (Arch::Sm(..), false) => &[Family::Sm80],
    }
}

/// Whether it is the reading of K and V that takes a problem's time on a GPU, not its products.
pub fn is_bound_by_keys(problem: &Problem) -> bool {
    decode::is_bound_by_keys(problem)
}

/// Why the family that was made for the device's architecture does not do a problem, in one clause; None where it does,
/// and where there is none.
pub fn passed_over(problem: &Problem, device: &Device) -> Option<String> {
    match device.arch {
        Arch::Sm(9, 0) => sm90::refusal(problem).map(|why| format!("sm90 does not serve: {why}")),
        _ => None,
    }
}

/// The knobs of a family's pass.
pub fn knobs(family: Family, pass: Pass) -> &'static [Knob] {
    match family {
        Family::Cpu => cpu::knobs(pass),
        Family::Sm80 => sm80::knobs(pass),
        Family::Sm90 => sm90::knobs(pass),
        Family::Decode => decode::knobs(),
    }
}

/// The constraints of a family's pass, in the order in which they are tried.
pub fn constraints(family: Family, pass: Pass) -> &'static [Constraint] {
    match family {
        Family::Cpu => cpu::constraints(pass),
        Family::Sm80 => sm80::constraints(pass),
        Family::Sm90 => sm90::constraints(pass),
        Family::Decode => decode::constraints(),
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
        Arch::Sm(..) if problem.dtype == Dtype::Fp32 && problem.features.paged.is_some() => Err(Error::unsupported(
            "dtype is fp32 and k and v are paged; on a GPU pages must be of fp16 or bf16 (the CPU backend does fp32)",
        )),
        // A turn is counted by the tiles before that meet a block, which another list would have to say alike, or
        // nobody's turn would come.
        Arch::Sm(..) if problem.deterministic && problem.features.block_mask.is_some() => Err(Error::unsupported(
            "deterministic is true and there is a block mask; on a GPU tiles take no turns at the blocks of lists (the CPU backend is always deterministic)",
        )),
        Arch::Sm(..) => Ok(()),
    }
}

/// Every config of a family that passes `check`, each with its cost, in no order.
pub fn passing(family: Family, problem: &Problem, device: &Device) -> Vec<(f64, Config)> {
    let constraints = constraints(family, problem.pass);
    let mut passing = Vec::new();
    for_each_combination(family, knobs(family, problem.pass), |config| {
        if constraints.iter().all(|constraint| (constraint.holds)(problem, config, device)) {
            passing.push((cost(problem, config, device), config.clone()));
        }
    });
    passing
}

/// A config that was measured on one problem, as another problem of the class takes it: what follows from the shape
/// alone is decided anew. One whose knobs are not the family's stays as it is, for `check` to refuse.
pub fn carried_over(config: &Config, from: &Problem, to: &Problem, device: &Device) -> Config {
    match config.family {
        Family::Decode if check_knobs(config, to.pass).is_ok() => decode::carried_over(config, from, to, device),
        Family::Cpu | Family::Sm80 | Family::Sm90 | Family::Decode => config.clone(),
    }
}

/// Whether the config can run this problem on this device; if not, the violated constraint in one sentence.
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
    check_knobs(config, problem.pass)?;
    match constraints(config.family, problem.pass).iter().find(|c| !(c.holds)(problem, config, device)) {
        Some(broken) => Err(format!("{config} breaks {}: {}", broken.name, broken.reason)),
        None => Ok(()),
    }
}

/// Whether the config has the knobs of its family's pass, each at one of its values, and no other.
fn check_knobs(config: &Config, pass: Pass) -> Result<(), String> {
    let knobs = knobs(config.family, pass);
    if let Some(unknown) = config.knobs.keys().find(|name| !knobs.iter().any(|knob| knob.name == name.as_str())) {
        let known: Vec<_> = knobs.iter().map(|knob| knob.name).collect();
        return Err(format!("{unknown} is no knob of {}; they are {}", config.family.name(), known.join(", ")));
    }
    for knob in knobs {
        match config.knobs.get(knob.name) {
            None => return Err(format!("{} ({}) is missing from {config}", knob.name, knob.meaning)),
            Some(value) if !knob.values.contains(value) => {
                return Err(format!("{} is {value}; it must be one of {:?}", knob.name, knob.values));
            }
            Some(_) => {}
        }
    }
    Ok(())
}

/// The config that is right for any problem without any measurement; it passes `check`, but where a launch has no room
/// for so many tiles.
pub fn heuristic(problem: &Problem, device: &Device) -> Config {
    heuristics(problem, device).swap_remove(0)
}

/// The heuristic's config and, where it does not build, those of the other families, in order. The last one always does.
pub fn heuristics(problem: &Problem, device: &Device) -> Vec<Config> {
    families(problem, device).iter().filter_map(|family| heuristic_of(*family, problem, device)).collect()
}

/// The heuristic's config of one family; None where none of its configs fits.
pub fn heuristic_of(family: Family, problem: &Problem, device: &Device) -> Option<Config> {
    match family {
        Family::Cpu => Some(cpu::heuristic(problem, device)),
        Family::Sm80 => Some(sm80::heuristic(problem, device)),
        Family::Sm90 => sm90::heuristic(problem, device),
        Family::Decode => Some(decode::heuristic(problem, device)),
    }
}

/// The cost that the family expects of a config, in any unit: it only orders candidates.
pub fn cost(problem: &Problem, config: &Config, device: &Device) -> f64 {
    match config.family {
        Family::Cpu => cpu::cost(problem, config, device),
        Family::Sm80 => sm80::cost(problem, config, device),
        Family::Sm90 => sm90::cost(problem, config, device),
        Family::Decode => decode::cost(problem, config, device),
    }
}

/// Visits every combination of the knobs' values, of which there are tens of thousands: one config changes in place.
fn for_each_combination(family: Family, knobs: &[Knob], mut visit: impl FnMut(&Config)) {
    let mut config = Config::new(family, knobs.iter().map(|knob| (knob.name, knob.values[0])));
    let mut index = vec![0; knobs.len()];
    loop {
        visit(&config);
        let Some(at) = (0..knobs.len()).rev().find(|&at| index[at] + 1 < knobs[at].values.len()) else { return };
        index[at] += 1;
        index[at + 1..].fill(0);
        for (knob, index) in knobs.iter().zip(&index).skip(at) {
            *config.knobs.get_mut(knob.name).expect("every knob is in the config") = knob.values[*index];
        }
    }
}
