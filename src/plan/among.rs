//! Among: which of a pack's configs serves a problem.
//!
//! `lookup` names the config that it would compile. One of the pack's is there already. It serves
//! where nothing can be compiled, and where the model tells no difference between the two. A
//! lookup of one problem asks for the second, unless the context is sealed; `ranges` does not.
//! Nothing here builds or reads the cubin cache.

use super::canonical::Canonical;
use super::key::{self, Class};
use super::lookup::{self, Choice, Known, Source};
use super::shared_map::SharedMap;
use crate::backend::Backend;
use crate::config::Config;
use crate::device::Arch;
use crate::family;
use crate::kernel::pack::{Pack, PackedPlan};
use crate::problem::Problem;
use std::collections::HashMap;
use std::sync::Arc;

/// The configs whose kernels a pack has, by class.
#[derive(Default)]
pub struct Packed {
    pack: Option<Arc<Pack>>,
    /// The places of its plans of the device's architecture.
    available: HashMap<Class, Vec<usize>>,
    /// Whether the pack has all kernels of other configs. A config of a class has the same texts
    /// for all shapes, so they are rendered once.
    others: SharedMap<(Class, Config), bool>,
}

impl Packed {
    pub fn of(pack: Option<&Arc<Pack>>, arch: Arch) -> Packed {
        let mut available: HashMap<Class, Vec<usize>> = HashMap::new();
        let plans = pack.map_or(&[][..], |pack| &pack.manifest().plans);
        for (place, plan) in plans.iter().enumerate().filter(|(_, plan)| plan.arch == arch) {
            available.entry(Class::of(&plan.problem)).or_default().push(place);
        }
        Packed { pack: pack.cloned(), available, others: SharedMap::default() }
    }

    pub fn is_empty(&self) -> bool {
        self.available.is_empty()
    }

    /// Whether the pack has all kernels of a config for a problem.
    pub fn has(&self, backend: &Backend, problem: &Problem, config: &Config) -> bool {
        let class = Class::of(problem);
        if self.of_class(&class).any(|one| one.config == *config) {
            return true;
        }
        let key = (class, config.clone());
        self.others.get(&key).unwrap_or_else(|| {
            let is_packed = backend.is_packed(problem, config);
            self.others.insert(key, is_packed);
            is_packed
        })
    }

    /// The configs that run a problem, best first: by kernel family, the preferred one first, then
    /// by predicted time, then by the distance to the problem that each was chosen for. None for a
    /// problem that follows no record: another config would give other bits.
    pub fn choices(&self, known: &Known, problem: &Canonical, backend: &Backend) -> Vec<Choice> {
        let ranked = self.ranked(known, problem, backend);
        let count = ranked.len();
        let reason = |ranked: &Ranked| {
            let why = ranked.us.map_or("the nearest shape".to_owned(), |us| format!("{us:.1} us predicted"));
            format!("nothing can be compiled here, and the best choice is not in the pack: {why}, of {count} configs")
        };
        ranked.into_iter().map(|ranked| choice(reason(&ranked), ranked.config)).collect()
    }

    /// The config that serves as well as the first choice of a lookup, which would have to be
    /// compiled. None if the pack has that choice, if it rests on a record of this machine or of
    /// this very shape, and if the model expects it to be faster by more than the least gain for
    /// which a lookup leaves a measured config. A choice rests on the nearest record also where the
    /// model picked another config. None for a problem that follows no record, as in `choices`.
    pub fn instead_of(&self, first: &Choice, known: &Known, problem: &Canonical, backend: &Backend) -> Option<Choice> {
        let is_measured = first.is_exact || matches!(first.source, Source::Process | Source::Machine);
        let is_kept = is_measured || problem.follows_no_record().is_some();
        let has_class = self.available.contains_key(&Class::of(problem));
        if is_kept || !has_class || self.has(backend, problem, &first.config) {
            return None;
        }
        let first_us = lookup::predicted_us(known, problem, &first.config, backend.device())?;
        let best = self.ranked(known, problem, backend).into_iter().next()?;
        let us =
            best.us.filter(|us| *us <= (1.0 + lookup::GAIN) * first_us && best.config.family == first.config.family)?;
        let reason =
            format!("the pack has it: {us:.1} us predicted, and {first_us:.1} for the best choice, not in the pack");
        Some(choice(reason, best.config))
    }

    /// The plans of a class. Each has the problem that its config was chosen for.
    fn of_class(&self, class: &Class) -> impl Iterator<Item = &PackedPlan> {
        let places = self.available.get(class).map_or(&[][..], Vec::as_slice);
        let plans = self.pack.as_ref().map_or(&[][..], |pack| &pack.manifest().plans);
        places.iter().map(|place| &plans[*place])
    }

    fn ranked(&self, known: &Known, problem: &Canonical, backend: &Backend) -> Vec<Ranked> {
        if problem.follows_no_record().is_some() {
            return Vec::new();
        }
        let device = backend.device();
        let families = family::families(problem, device);
        let mut candidates: Vec<(Config, f64)> = Vec::new();
        for one in self.of_class(&Class::of(problem)) {
            for config in self.adapted(one, problem, backend).into_iter().chain([one.config.clone()]) {
                let is_known = candidates.iter().any(|(other, _)| *other == config);
                if !is_known && family::check(problem, &config, device).is_ok() {
                    candidates.push((config, key::distance(&one.problem, problem)));
                }
            }
        }
        let configs: Vec<&Config> = candidates.iter().map(|(config, _)| config).collect();
        let times = lookup::predicted_times(known, problem, &configs, device);
        let ranked = candidates.into_iter().zip(times).map(|((config, distance), us)| Ranked {
            family: families.iter().position(|family| *family == config.family),
            us,
            distance,
            config,
        });
        let mut ranked: Vec<Ranked> = ranked.collect();
        ranked.sort_by(|a, b| {
            let us = |ranked: &Ranked| ranked.us.unwrap_or(f64::INFINITY);
            a.family.cmp(&b.family).then(us(a).total_cmp(&us(b))).then(a.distance.total_cmp(&b.distance))
        });
        ranked
    }

    /// A config carried over to the problem, if that changes it and the pack has its kernels. Knobs
    /// that follow from the shape may be in no kernel's text, such as a launch's number of splits.
    /// The carried-over config then has the same kernels, unless it splits and the other does not,
    /// or has other tiles.
    fn adapted(&self, one: &PackedPlan, problem: &Canonical, backend: &Backend) -> Option<Config> {
        let carried_over = family::carried_over(&one.config, &one.problem, problem, backend.device());
        (carried_over != one.config && self.has(backend, problem, &carried_over)).then_some(carried_over)
    }
}

struct Ranked {
    /// Place of the config's family among those that serve the problem.
    family: Option<usize>,
    us: Option<f64>,
    distance: f64,
    config: Config,
}

fn choice(reason: String, config: Config) -> Choice {
    Choice { config, source: Source::Pack, reason, record: None, is_exact: false }
}
