//! Space and Room: what one pass of a kernel family tells about its configs.
//!
//! A family declares the typed knobs of a pass as a struct and implements `Space` for the struct.
//! Callers outside of `family` have configs in text form (`Config`) and call a `Room`. A function
//! of a `Room` converts a config from text to the struct, calls `Space`, and converts returned
//! configs to text.

use super::knob::{Constraint, Knob, Knobs};
use super::spec::KernelSpec;
use super::time::Work;
use crate::config::Config;
use crate::device::Device;
use crate::problem::Problem;

/// The configs of one pass of a family; the implementor is the struct of its knobs.
pub trait Space: Knobs {
    /// The constraints, in the order in which they are checked.
    const CONSTRAINTS: &'static [Constraint<Self>];

    /// The config to use without any measurement; None if no config fits the device.
    fn heuristic(problem: &Problem, device: &Device) -> Option<Self>;

    /// The cost that the family expects, in any unit: it only orders candidates.
    fn cost(&self, problem: &Problem, device: &Device) -> f64;

    /// The kernels of the pass in launch order.
    fn kernels(&self, problem: &Problem) -> Vec<KernelSpec>;

    /// The tiles of a launch and the cycles of each, for predictions of time. None where the family
    /// does not know.
    fn work(&self, _problem: &Problem, _device: &Device) -> Option<Work> {
        None
    }

    /// Configs that a lookup may choose instead of the heuristic's if their predicted time is less.
    /// Each passes `fits`, and the consumer warpgroups of its kernel spill no registers.
    fn alternatives(_problem: &Problem, _device: &Device) -> Vec<Self> {
        Vec::new()
    }

    /// The values of a knob that may be usable for the problem, judged without the other knobs.
    /// This only shortens the search: `CONSTRAINTS` decides.
    fn usable(knob: &Knob, _problem: &Problem) -> &'static [u32] {
        knob.values
    }

    /// Adapts a config that was measured on `from` to `to`, another problem of the same class.
    /// Knobs that follow from the shape alone are chosen anew.
    fn carried_over(self, _from: &Problem, _to: &Problem, _device: &Device) -> Self {
        self
    }

    /// Adapts a config that was measured for this shape on another GPU: its memory and L2 differ.
    fn on_another_gpu(self, _problem: &Problem, _device: &Device) -> Self {
        self
    }

    /// The first constraint that does not hold.
    fn broken(&self, problem: &Problem, device: &Device) -> Option<&'static Constraint<Self>> {
        Self::CONSTRAINTS.iter().find(|constraint| !(constraint.holds)(problem, self, device))
    }

    /// Whether every knob has one of its listed values and every constraint holds.
    fn fits(&self, problem: &Problem, device: &Device) -> bool {
        self.is_listed() && self.broken(problem, device).is_none()
    }
}

/// The functions of a `Space` for configs in text form. They are function pointers, because a
/// `Space` has constants and functions without `self`, and so cannot be a trait object.
pub struct Room {
    pub knobs: &'static [Knob],
    pub check: fn(&Problem, &Config, &Device) -> Result<(), String>,
    pub heuristic: fn(&Problem, &Device) -> Option<Config>,
    /// Every config that passes `check`, each with its cost, in no particular order.
    pub passing: fn(&Problem, &Device) -> Vec<(f64, Config)>,
    pub cost: fn(&Problem, &Config, &Device) -> Result<f64, String>,
    pub kernels: fn(&Problem, &Config) -> Result<Vec<KernelSpec>, String>,
    pub work: fn(&Problem, &Config, &Device) -> Option<Work>,
    pub alternatives: fn(&Problem, &Device) -> Vec<Config>,
    /// Takes a config, the problem that it was measured on, and the problem to adapt it to.
    pub carried_over: fn(&Config, &Problem, &Problem, &Device) -> Result<Config, String>,
    pub on_another_gpu: fn(&Config, &Problem, &Device) -> Result<Config, String>,
}

impl Room {
    pub const fn of<K: Space>() -> Room {
        Room {
            knobs: K::LIST,
            check: check::<K>,
            heuristic: |problem, device| K::heuristic(problem, device).map(K::to_config),
            passing: passing::<K>,
            cost: |problem, config, device| Ok(K::of(config)?.cost(problem, device)),
            // An unlisted value, such as 0 warps, would make `kernels` divide by zero.
            kernels: |problem, config| Ok(K::of_listed(config)?.kernels(problem)),
            work: |problem, config, device| K::of_listed(config).ok()?.work(problem, device),
            alternatives: |problem, device| K::alternatives(problem, device).into_iter().map(K::to_config).collect(),
            carried_over: |config, from, to, device| {
                Ok(K::of_listed(config)?.carried_over(from, to, device).to_config())
            },
            on_another_gpu: |config, problem, device| {
                Ok(K::of_listed(config)?.on_another_gpu(problem, device).to_config())
            },
        }
    }
}

fn check<K: Space>(problem: &Problem, config: &Config, device: &Device) -> Result<(), String> {
    match K::of_listed(config)?.broken(problem, device) {
        Some(broken) => Err(format!("{config} breaks {}: {}", broken.name, broken.reason)),
        None => Ok(()),
    }
}

fn passing<K: Space>(problem: &Problem, device: &Device) -> Vec<(f64, Config)> {
    let mut passing = Vec::new();
    let lists: Vec<&[u32]> = K::LIST.iter().map(|knob| K::usable(knob, problem)).collect();
    for_each_combination(&lists, |values| {
        let knobs = K::from_values(values);
        if knobs.broken(problem, device).is_none() {
            passing.push((knobs.cost(problem, device), knobs.to_config()));
        }
    });
    passing
}

/// Visits every combination of one value from each list. There may be tens of thousands of
/// combinations.
fn for_each_combination(lists: &[&[u32]], mut visit: impl FnMut(&[u32])) {
    let mut values: Vec<u32> = lists.iter().map(|list| list[0]).collect();
    let mut index = vec![0; lists.len()];
    loop {
        visit(&values);
        let Some(at) = (0..lists.len()).rev().find(|&at| index[at] + 1 < lists[at].len()) else { return };
        index[at] += 1;
        index[at + 1..].fill(0);
        for (at, list) in lists.iter().enumerate().skip(at) {
            values[at] = list[index[at]];
        }
    }
}
