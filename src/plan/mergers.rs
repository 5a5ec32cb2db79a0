//! Mergers: what merges partial results, of this process, readable without a lock. There is nothing to choose or to record: each
//! class has the one.

use super::loaded::{Map, Turns};
use crate::backend::{Backend, Merger};
use crate::error::Result;
use crate::merge::MergeClass;
use std::sync::Arc;

#[derive(Default)]
pub struct Mergers {
    built: Map<MergeClass, Arc<Merger>>,
    building: Turns<MergeClass>,
}

impl Mergers {
    /// If it is there. Takes no lock.
    pub fn prepared(&self, class: &MergeClass) -> Option<Arc<Merger>> {
        self.built.get(class)
    }

    /// Builds it, where it is not there yet, once however many threads ask for it.
    pub fn prepare(&self, backend: &Backend, class: &MergeClass) -> Result<Arc<Merger>> {
        self.building.alone(class, || match self.built.get(class) {
            Some(merger) => Ok(merger),
            None => {
                let merger = Arc::new(backend.build_merger(class)?);
                self.built.insert(*class, Arc::clone(&merger));
                Ok(merger)
            }
        })
    }
}
