//! Loaded: the plans and executables of this process, readable without a lock.
//!
//! Maps behind an atomic pointer: a launch loads the pointer and looks up; whoever prepares copies the map, adds to it
//! and swaps. Plans are few (one for each record key in use), so the copies are small.

use super::key::Class;
use super::lookup::{Choice, Source};
use super::record::Record;
use crate::backend::Executable;
use crate::config::Config;
use crate::problem::Problem;
use arc_swap::ArcSwap;
use std::collections::HashMap;
use std::hash::Hash;
use std::sync::{Arc, Mutex, PoisonError};

/// A problem's config, why it is that, and what to launch.
pub struct Plan {
    /// The problem that the config was chosen for; it stands for all with the same record key.
    pub problem: Problem,
    pub config: Config,
    pub source: Source,
    /// One sentence: why this config.
    pub reason: String,
    pub record: Option<Record>,
    pub executable: Arc<Executable>,
}

impl Plan {
    pub fn of(canonical: Problem, choice: Choice, executable: Arc<Executable>) -> Arc<Plan> {
        Arc::new(Plan {
            problem: canonical,
            config: choice.config,
            source: choice.source,
            reason: choice.reason,
            record: choice.record.as_deref().cloned(),
            executable,
        })
    }
}

#[derive(Default)]
pub struct Loaded {
    /// By the exact problem.
    pub pinned: Map<Problem, Arc<Plan>>,
    pub plans: Plans,
    /// None: it did not compile, and is not tried again.
    pub executables: Map<(Class, Config), Option<Arc<Executable>>>,
}

/// Plans by the canonical problem, and the generation of the records that they were chosen from. What was chosen from
/// older records may not replace what newer ones gave, however late its thread comes.
#[derive(Default)]
pub struct Plans(ArcSwap<Generation>);

#[derive(Clone, Default)]
struct Generation {
    number: u64,
    plans: HashMap<Problem, Arc<Plan>>,
}

impl Plans {
    pub fn get(&self, canonical: &Problem) -> Option<Arc<Plan>> {
        self.0.load().plans.get(canonical).cloned()
    }

    /// To be asked for before the records are, and given to `insert`.
    pub fn generation(&self) -> u64 {
        self.0.load().number
    }

    /// Begins the next generation, after new records are in place. Returns its number and the plans so far, which stay
    /// until they are replaced.
    pub fn renew(&self) -> (u64, Vec<Arc<Plan>>) {
        let before = self.0.rcu(|now| Generation { number: now.number + 1, plans: now.plans.clone() });
        (before.number + 1, before.plans.values().cloned().collect())
    }

    /// False, and nothing is inserted, where a later generation has begun.
    pub fn insert(&self, generation: u64, plan: &Arc<Plan>) -> bool {
        let before = self.0.rcu(|now| {
            let mut next = Generation::clone(now);
            if now.number == generation {
                next.plans.insert(plan.problem, Arc::clone(plan));
            }
            next
        });
        before.number == generation
    }
}

pub struct Map<K, V>(ArcSwap<HashMap<K, V>>);

impl<K, V> Default for Map<K, V> {
    fn default() -> Self {
        Map(ArcSwap::from_pointee(HashMap::new()))
    }
}

impl<K: Clone + Eq + Hash, V: Clone> Map<K, V> {
    pub fn get(&self, key: &K) -> Option<V> {
        self.0.load().get(key).cloned()
    }

    /// The entry with the smallest key among those that pass.
    pub fn first(&self, passes: impl Fn(&K, &V) -> bool) -> Option<(K, V)>
    where
        K: Ord,
    {
        let map = self.0.load();
        map.iter()
            .filter(|(key, value)| passes(key, value))
            .min_by(|a, b| a.0.cmp(b.0))
            .map(|(k, v)| (k.clone(), v.clone()))
    }

    pub fn is_empty(&self) -> bool {
        self.0.load().is_empty()
    }

    pub fn insert(&self, key: K, value: V) {
        self.0.rcu(|map| {
            let mut map = HashMap::clone(map);
            map.insert(key.clone(), value.clone());
            map
        });
    }
}

/// Lets one thread at a time work on each key; work on different keys runs side by side.
pub struct Turns<K>(Mutex<HashMap<K, Arc<Mutex<()>>>>);

impl<K> Default for Turns<K> {
    fn default() -> Self {
        Turns(Mutex::new(HashMap::new()))
    }
}

impl<K: Clone + Eq + Hash> Turns<K> {
    /// The work must first look whether another thread has done it meanwhile.
    pub fn alone<T>(&self, key: &K, work: impl FnOnce() -> T) -> T {
        let turn = Arc::clone(self.0.lock().unwrap_or_else(PoisonError::into_inner).entry(key.clone()).or_default());
        let guard = turn.lock().unwrap_or_else(PoisonError::into_inner);
        let result = work();
        drop(guard);
        let mut turns = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        // The map's and ours: nobody waits for this key any more.
        if Arc::strong_count(&turn) <= 2 {
            turns.remove(key);
        }
        result
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::Backend;
    use crate::cpu::Cpu;
    use crate::family;
    use crate::problem::{Dtype, Pass};

    #[test]
    fn a_plan_of_an_older_generation_replaces_none() {
        let problem = Problem::dense(Pass::Forward, Dtype::Fp32, 1, 1, 64, 32);
        let backend = Backend::Cpu(Cpu::new(1).unwrap());
        let config = family::heuristic(&problem, backend.device());
        let executable = Arc::new(backend.build(&problem, &config).unwrap());
        let plan = |reason: &str| {
            let (config, executable) = (config.clone(), Arc::clone(&executable));
            let (source, reason) = (Source::Heuristic, reason.to_owned());
            Arc::new(Plan { problem, config, source, reason, record: None, executable })
        };
        let plans = Plans::default();
        let old = plans.generation();
        assert!(plans.insert(old, &plan("before")));
        let (new, so_far) = plans.renew();
        assert_eq!(so_far.len(), 1);
        assert_eq!(plans.get(&problem).unwrap().reason, "before", "it serves until it is replaced");
        assert!(plans.insert(new, &plan("winner")));
        assert!(!plans.insert(old, &plan("late")));
        assert_eq!(plans.get(&problem).unwrap().reason, "winner");
    }

    #[test]
    fn the_first_entry_is_the_smallest_key_that_passes_with_its_value() {
        let map = Map::default();
        for (key, value) in [(3, Some('c')), (1, None), (2, Some('b'))] {
            map.insert(key, value);
        }
        // A smaller key whose value does not pass (a config that did not build) hides none behind it.
        assert_eq!(map.first(|_, value| value.is_some()), Some((2, Some('b'))));
        assert_eq!(map.first(|key, value| *key > 2 && value.is_some()), Some((3, Some('c'))));
        assert_eq!(map.first(|key, _| *key > 3), None);
    }
}
