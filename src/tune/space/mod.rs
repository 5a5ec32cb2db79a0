//! The space of configs: each knob with its values, each constraint with its reason, and the heuristic choice.
//!
//! A family declares its knobs, constraints, heuristic and cost in its own file; the rules that hold for all families
//! are here: which families serve a problem, what passes `check`, and in which order candidates are tried. A constraint
//! that a kernel relies on is asserted once more in its template. Nothing here measures or remembers.

mod cpu;
mod decode;
mod gpu;
mod sm80;
mod sm80_fp32;
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

/// Candidates worth compiling before anything is known: at about a second per compilation and core, 16 cores build them
/// in four or five. What is learned from them says where to look further: see `neighbours`.
pub const MAX_CANDIDATES: usize = 64;

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

/// Every config that passes `check`, family after family, most promising first and the heuristic's before all, in a
/// fixed order.
pub fn candidates(problem: &Problem, device: &Device) -> Vec<Config> {
    families(problem, device).iter().flat_map(|family| of_family(*family, problem, device)).collect()
}

/// A family's configs that pass `check`, its heuristic's first.
fn of_family(family: Family, problem: &Problem, device: &Device) -> Vec<Config> {
    let heuristic = heuristic_of(family, problem, device);
    let constraints = constraints(family, problem.pass);
    let mut ranked = Vec::new();
    for_each_combination(family, knobs(family, problem.pass), |config| {
        let fits = constraints.iter().all(|constraint| (constraint.holds)(problem, config, device));
        if fits && heuristic.as_ref() != Some(config) {
            ranked.push((cost(problem, config, device), config.clone()));
        }
    });
    ranked.sort_by(|a, b| a.0.total_cmp(&b.0).then_with(|| a.1.cmp(&b.1)));
    heuristic.into_iter().chain(ranked.into_iter().map(|(_, config)| config)).collect()
}

/// The most promising ones that are apart: of configs that differ in a single knob the first stands for the others,
/// which are its `neighbours`. Of two families, three of the preferred one come to one of the other.
pub fn first_candidates(problem: &Problem, device: &Device) -> Vec<Config> {
    let mut queues: Vec<_> = families(problem, device)
        .iter()
        .map(|family| spread(of_family(*family, problem, device)).into_iter())
        .collect();
    let mut chosen = Vec::new();
    while chosen.len() < MAX_CANDIDATES {
        let before = chosen.len();
        for (index, queue) in queues.iter_mut().enumerate() {
            chosen.extend(queue.take(if index == 0 { 3 } else { 1 }));
        }
        if chosen.len() == before {
            break;
        }
    }
    chosen.truncate(MAX_CANDIDATES);
    chosen
}

/// Of one family's configs, at most MAX_CANDIDATES that are apart.
fn spread(all: Vec<Config>) -> Vec<Config> {
    let mut chosen: Vec<Config> = Vec::new();
    for config in &all {
        if chosen.len() == MAX_CANDIDATES {
            break;
        }
        if chosen.iter().all(|other| differences(config, other) > 1) {
            chosen.push(config.clone());
        }
    }
    // A small space is tried as a whole.
    for config in all {
        if chosen.len() < MAX_CANDIDATES && !chosen.contains(&config) {
            chosen.push(config);
        }
    }
    chosen
}

/// The configs one step away: one knob at the value before or after its own. Most promising first.
pub fn neighbours(problem: &Problem, config: &Config, device: &Device) -> Vec<Config> {
    let mut ranked: Vec<(f64, Config)> = knobs(config.family, problem.pass)
        .iter()
        .flat_map(|knob| {
            let at = knob.values.iter().position(|value| *value == config.get(knob.name));
            let beside = at.map(|at| [at.checked_sub(1), Some(at + 1)]).into_iter().flatten().flatten();
            beside.filter_map(|at| Some(config.clone().with(knob.name, *knob.values.get(at)?)))
        })
        .filter(|neighbour| check(problem, neighbour, device).is_ok())
        .map(|neighbour| (cost(problem, &neighbour, device), neighbour))
        .collect();
    ranked.sort_by(|a, b| a.0.total_cmp(&b.0).then_with(|| a.1.cmp(&b.1)));
    ranked.into_iter().map(|(_, neighbour)| neighbour).collect()
}

/// A config that was measured on one problem, as another problem of the class takes it: what follows from the shape
/// alone is decided anew. One whose knobs are not the family's stays as it is, for `check` to refuse.
pub fn carried_over(config: &Config, from: &Problem, to: &Problem, device: &Device) -> Config {
    match config.family {
        Family::Decode if check_knobs(config, to.pass).is_ok() => decode::carried_over(config, from, to, device),
        Family::Cpu | Family::Sm80 | Family::Sm90 | Family::Decode => config.clone(),
    }
}

fn differences(a: &Config, b: &Config) -> usize {
    a.knobs.iter().zip(&b.knobs).filter(|(a, b)| a != b).count()
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

fn heuristic_of(family: Family, problem: &Problem, device: &Device) -> Option<Config> {
    match family {
        Family::Cpu => Some(cpu::heuristic(problem, device)),
        Family::Sm80 => Some(sm80::heuristic(problem, device)),
        Family::Sm90 => sm90::heuristic(problem, device),
        Family::Decode => Some(decode::heuristic(problem, device)),
    }
}

/// What the family expects a config to cost, in any unit: it only orders candidates.
fn cost(problem: &Problem, config: &Config, device: &Device) -> f64 {
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
