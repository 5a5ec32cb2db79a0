//! Plans: what the engine chose and built for each canonical problem, readable without a lock.
//!
//! A launch looks a plan up here. Records change while plans are made, so plans carry the number of
//! the generation of records that they were chosen from. Nothing here chooses or builds.

use super::canonical::Canonical;
use super::lookup::{Choice, Source};
use super::record::Record;
use crate::backend::Executable;
use crate::config::Config;
use crate::problem::Problem;
use crate::word_hash::BuildWordHasher;
use arc_swap::ArcSwap;
use rpds::HashTrieMapSync;
use std::sync::Arc;

/// A problem's config, the reason for it, and the executable to launch.
pub struct Plan {
    /// The problem that the config was chosen for: the canonical one, or the exact one of a pinned
    /// plan.
    pub problem: Problem,
    pub config: Config,
    pub source: Source,
    /// One sentence: why this config.
    pub reason: String,
    pub record: Option<Record>,
    pub executable: Arc<Executable>,
}

impl Plan {
    pub fn new(canonical: &Canonical, choice: Choice, executable: Arc<Executable>) -> Arc<Plan> {
        Arc::new(Plan {
            problem: **canonical,
            config: choice.config,
            source: choice.source,
            reason: choice.reason,
            record: choice.record.as_deref().cloned(),
            executable,
        })
    }
}

/// Plans by canonical problem, and the generation of records that they follow. A plan chosen from
/// older records never replaces one chosen from newer records, however late its thread arrives.
#[derive(Default)]
pub struct Plans(ArcSwap<Generation>);

#[derive(Clone, Default)]
struct Generation {
    number: u64,
    /// Shares its nodes with the maps before it: a caller may bring a million problems.
    plans: HashTrieMapSync<Canonical, Arc<Plan>, BuildWordHasher>,
}

impl Plans {
    pub fn get(&self, canonical: &Canonical) -> Option<Arc<Plan>> {
        self.0.load().plans.get(canonical).cloned()
    }

    /// Inserts the plan that `choose` makes from the records of now. If a new generation begins
    /// meanwhile, the plan is made again. If `choose` fails, the old plan stays.
    pub fn insert_chosen<E>(
        &self,
        canonical: &Canonical,
        choose: impl Fn() -> Result<Arc<Plan>, E>,
    ) -> Result<Arc<Plan>, E> {
        loop {
            let generation = self.generation();
            let plan = choose()?;
            if self.insert(generation, canonical, &plan) {
                return Ok(plan);
            }
        }
    }

    /// The number to pass to `insert`. It is read before the records that the plan is chosen from.
    fn generation(&self) -> u64 {
        self.0.load().number
    }

    /// Begins the next generation, after new records are in place. Returns the problems that have
    /// plans; these serve until they are replaced.
    pub fn begin_generation(&self) -> Vec<Canonical> {
        let before = self.0.rcu(|now| Generation { number: now.number + 1, plans: now.plans.clone() });
        before.plans.keys().copied().collect()
    }

    /// Inserts a plan of a generation. Returns false, and inserts nothing, if a later generation
    /// has begun.
    fn insert(&self, generation: u64, canonical: &Canonical, plan: &Arc<Plan>) -> bool {
        let before = self.0.rcu(|now| {
            let mut next = Generation::clone(now);
            if now.number == generation {
                next.plans.insert_mut(*canonical, Arc::clone(plan));
            }
            next
        });
        before.number == generation
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::Backend;
    use crate::cpu::Cpu;
    use crate::family;
    use crate::plan::canonical::canonical;
    use crate::problem::{Dtype, Pass};
    use std::cell::Cell;

    #[test]
    fn a_plan_is_chosen_again_if_a_generation_begins_meanwhile() {
        let canonical = canonical(&Problem::dense(Pass::Forward, Dtype::Fp32, 1, 1, 64, 32));
        let backend = Backend::Cpu(Cpu::new(1).unwrap());
        let config = family::heuristic(&canonical, backend.device());
        let executable = Arc::new(backend.build(&canonical, &config).unwrap());
        let plan = |reason: &str| {
            let (config, executable) = (config.clone(), Arc::clone(&executable));
            let (source, reason) = (Source::Heuristic, reason.to_owned());
            Arc::new(Plan { problem: *canonical, config, source, reason, record: None, executable })
        };
        let plans = Plans::default();
        let reason = || plans.get(&canonical).unwrap().reason.clone();
        assert!(plans.insert_chosen(&canonical, || Ok::<_, ()>(plan("first"))).is_ok());
        // Another thread's records arrive while the plan is made, and that thread chooses for other
        // problems only.
        let times = Cell::new(0);
        let chosen = plans.insert_chosen(&canonical, || {
            assert_eq!(reason(), "first", "it serves until it is replaced");
            times.set(times.get() + 1);
            if times.get() == 1 {
                assert_eq!(plans.begin_generation(), [canonical]);
                return Ok(plan("from old records"));
            }
            Ok::<_, ()>(plan("from new records"))
        });
        assert_eq!((chosen.unwrap().reason.as_str(), reason().as_str()), ("from new records", "from new records"));
        assert!(plans.insert_chosen(&canonical, || Err(())).is_err());
        assert_eq!(reason(), "from new records", "a failure replaces nothing");
    }
}
