//! SharedMap: a map that readers use without a lock. KeyLocks: one thread at a time for each key.
//!
//! A launch loads an atomic pointer and looks up. A writer makes the next map, which shares all but
//! a few nodes with the last one, and swaps the pointer. Nothing here knows plans.

use crate::word_hash::BuildWordHasher;
use arc_swap::ArcSwap;
use rpds::HashTrieMapSync;
use std::collections::HashMap;
use std::hash::Hash;
use std::sync::{Arc, Mutex, PoisonError};

pub struct SharedMap<K: Eq + Hash, V>(ArcSwap<HashTrieMapSync<K, V, BuildWordHasher>>);

impl<K: Eq + Hash, V> Default for SharedMap<K, V> {
    fn default() -> Self {
        SharedMap(ArcSwap::from_pointee(HashTrieMapSync::default()))
    }
}

impl<K: Clone + Eq + Hash, V: Clone> SharedMap<K, V> {
    pub fn get(&self, key: &K) -> Option<V> {
        self.0.load().get(key).cloned()
    }

    /// What `pick` makes of entries, in no order.
    pub fn select<R>(&self, pick: impl Fn((&K, &V)) -> Option<R>) -> Vec<R> {
        self.0.load().iter().filter_map(pick).collect()
    }

    pub fn is_empty(&self) -> bool {
        self.0.load().is_empty()
    }

    pub fn insert(&self, key: K, value: V) {
        self.0.rcu(|map| map.insert(key.clone(), value.clone()));
    }
}

/// Lets one thread at a time work on each key. Work on different keys runs side by side.
pub struct KeyLocks<K>(Mutex<HashMap<K, Arc<Mutex<()>>>>);

impl<K> Default for KeyLocks<K> {
    fn default() -> Self {
        KeyLocks(Mutex::new(HashMap::new()))
    }
}

impl<K: Clone + Eq + Hash> KeyLocks<K> {
    /// Runs `work` under the key's lock. The work must first check whether another thread has done
    /// it meanwhile.
    pub fn locked<T>(&self, key: &K, work: impl FnOnce() -> T) -> T {
        let lock = Arc::clone(self.0.lock().unwrap_or_else(PoisonError::into_inner).entry(key.clone()).or_default());
        let guard = lock.lock().unwrap_or_else(PoisonError::into_inner);
        let result = work();
        drop(guard);
        let mut locks = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        // The map and this thread hold one reference each: no other thread waits for this key.
        if Arc::strong_count(&lock) <= 2 {
            locks.remove(key);
        }
        result
    }
}
