//! Built: what runs beside the passes (merging, writing into a cache), of this process, readable without a lock. There is nothing to
//! choose or to record: each class has the one.

use super::shared_map::{KeyLocks, SharedMap};
use crate::backend::Backend;
use crate::error::Result;
use std::hash::Hash;
use std::sync::Arc;

pub struct Built<C, T> {
    build: fn(&Backend, &C) -> Result<T>,
    built: SharedMap<C, Arc<T>>,
    building: KeyLocks<C>,
}

impl<C: Clone + Eq + Hash, T> Built<C, T> {
    /// `build` is the backend's way to one of a class.
    pub fn new(build: fn(&Backend, &C) -> Result<T>) -> Self {
        Built { build, built: SharedMap::default(), building: KeyLocks::default() }
    }

    /// If it is there. Takes no lock.
    pub fn prepared(&self, class: &C) -> Option<Arc<T>> {
        self.built.get(class)
    }

    /// Builds it, where it is not there yet, once however many threads ask for it.
    pub fn prepare(&self, backend: &Backend, class: &C) -> Result<Arc<T>> {
        self.building.locked(class, || match self.built.get(class) {
            Some(built) => Ok(built),
            None => {
                let built = Arc::new((self.build)(backend, class)?);
                self.built.insert(class.clone(), Arc::clone(&built));
                Ok(built)
            }
        })
    }
}
