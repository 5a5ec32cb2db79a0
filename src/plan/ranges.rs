//! Ranges: building what ranges need, and which ranges are prepared.
//!
//! `covering` says which configs and kernels; this file compiles them and keeps the ranges, so that
//! a launch knows whether a loaded config is enough. It runs on the threads of a pool.

use super::among::Packed;
use super::canonical::Canonical;
use super::covering::{Kernel, covering};
use super::executables::{Executables, Loaded, is_of_the_config};
use super::key::Class;
use super::lookup::{self, Choice, Known};
use super::range::Range;
use crate::backend::Backend;
use crate::config::Config;
use crate::error::{Error, Result, Status};
use crate::kernel::Origin;
use crate::problem::Problem;
use arc_swap::ArcSwap;
use rayon::prelude::*;
use std::collections::HashSet;
use std::time::Duration;

/// What `prepare_range` prepared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Prepared {
    /// Problem classes (`key::Class`) of the ranges.
    pub classes: usize,
    /// Configs over all classes. Several may share kernels.
    pub configs: usize,
    /// Kernels of these configs; none on the CPU backend.
    pub kernels: usize,
    /// Kernels that this call compiled.
    pub compiled: usize,
    /// Kernels that this call took from the cubin cache or the pack. The rest were loaded before.
    pub cached: usize,
    pub time: Duration,
}

/// Kernels that one call of `prepare_range` may need.
pub const MOST_KERNELS: usize = 128;

/// How often `build` chooses again without configs that do not compile.
const MOST_ATTEMPTS: usize = 8;

/// The ranges that are prepared, readable without a lock.
#[derive(Default)]
pub struct Ranges(ArcSwap<Vec<Range>>);

impl Ranges {
    pub fn contain(&self, problem: &Problem) -> bool {
        self.0.load().iter().any(|range| range.contains(problem))
    }

    pub fn add(&self, ranges: &[Range]) {
        self.0.rcu(|known| {
            let new = ranges.iter().filter(|range| !known.contains(range));
            known.iter().chain(new).copied().collect::<Vec<_>>()
        });
    }
}

/// What building takes from the engine.
pub struct Building<'a> {
    pub backend: &'a Backend,
    pub known: &'a Known,
    pub executables: &'a Executables,
    pub packed: &'a Packed,
}

impl Building<'_> {
    /// Builds what the ranges need. Where a config does not compile, chooses again without it;
    /// where nothing can be compiled, among the configs of the pack.
    pub fn build(&self, ranges: &[Range]) -> Result<Prepared> {
        let is_packed = |problem: &Canonical, config: &Config| self.packed.has(self.backend, problem, config);
        let of_pack = |problem: &Canonical| self.packed.choices(self.known, problem, self.backend);
        let of_lookup = |problem: &Canonical| lookup::choices(self.known, problem, self.backend.device());
        match self.build_chosen(ranges, &of_lookup, &|_, _| true) {
            Err(error) if error.status == Status::NoCompiler && !self.packed.is_empty() => {
                self.build_chosen(ranges, &of_pack, &is_packed).map_err(|_| error)
            }
            built => built,
        }
    }

    /// With the configs of `choices` whose kernels are there, or may be compiled.
    fn build_chosen(
        &self,
        ranges: &[Range],
        choices: &(dyn Fn(&Canonical) -> Vec<Choice> + Sync),
        is_there: &(dyn Fn(&Canonical, &Config) -> bool + Sync),
    ) -> Result<Prepared> {
        let may_use = |problem: &Canonical, config: &Config| {
            !matches!(self.executables.get(Class::of(problem), config), Loaded::DoesNotBuild)
                && is_there(problem, config)
        };
        let mut failure = None;
        for _ in 0..MOST_ATTEMPTS {
            let covering = covering(self.known, ranges, self.backend.device(), choices, &may_use)?;
            if covering.kernels.len() > MOST_KERNELS {
                return Err(Error::invalid(format!(
                    "the range needs {} kernels, and at most {MOST_KERNELS} are allowed; optional and optional_features multiply them by {} combinations",
                    covering.kernels.len(),
                    ranges.len()
                )));
            }
            // Held until their executables are built. A failure comes back from the executable.
            let load = |kernel: &Kernel| self.backend.load(&kernel.source());
            let kernels: Vec<_> = covering.kernels.par_iter().map(load).collect();
            if let Some(Err(missing)) =
                kernels.iter().find(|kernel| matches!(kernel, Err(error) if !is_of_the_config(error)))
            {
                return Err(missing.clone());
            }
            let configs = covering.configs.par_iter();
            let built = configs.map(|(problem, config)| self.executables.build(self.backend, problem, config));
            let failures: Vec<Error> = built.filter_map(Result::err).collect();
            if let Some(other) = failures.iter().find(|error| !is_of_the_config(error)) {
                return Err(other.clone());
            }
            let Some(first) = failures.into_iter().next() else {
                let classes: HashSet<Class> = covering.configs.iter().map(|(problem, _)| Class::of(problem)).collect();
                let from = |origin| kernels.iter().flatten().filter(|kernel| kernel.origin == origin).count();
                return Ok(Prepared {
                    classes: classes.len(),
                    configs: covering.configs.len(),
                    kernels: covering.kernels.len(),
                    compiled: from(Origin::Compiler),
                    cached: from(Origin::Cache),
                    time: Duration::ZERO,
                });
            };
            log::warn!("preparing a range: {first}");
            failure = Some(first);
        }
        Err(failure.unwrap_or_else(|| Error::new(Status::Internal, "a range needs an attempt")))
    }
}
