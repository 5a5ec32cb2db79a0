//! Loaded: the plans and executables of this process, readable without a lock.
//!
//! Maps behind an atomic pointer: a launch loads the pointer and looks up; whoever prepares copies the map, adds to it
//! and swaps. Plans are few (one for each record key in use), so the copies are small.

use super::key::Class;
use super::lookup::Source;
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

#[derive(Default)]
pub struct Loaded {
    /// By the exact problem.
    pub pinned: Map<Problem, Arc<Plan>>,
    /// By the canonical problem.
    pub plans: Map<Problem, Arc<Plan>>,
    /// None: it did not compile, and is not tried again.
    pub executables: Map<(Class, Config), Option<Arc<Executable>>>,
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

    pub fn retain(&self, keep: impl Fn(&K) -> bool) {
        self.0.rcu(|map| {
            map.iter().filter(|(key, _)| keep(key)).map(|(k, v)| (k.clone(), v.clone())).collect::<HashMap<_, _>>()
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
